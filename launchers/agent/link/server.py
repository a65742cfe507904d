"""Server of the link: node 0's endpoint, which the others connect to, and which passes on what concerns others."""

from __future__ import annotations

import asyncio
import os
import time
from asyncio.sslproto import SSLProtocol

from orc.launchers.agent.link.channel import OWN, VERSION, Channel, PeerDisconnected, concerns, may_send, tls_context
from orc.launchers.agent.link.endpoint import HANDSHAKE_S, LinkEndpoint
from orc.launchers.agent.network import interface_of, plain

TYPE_CHECKING = False

if TYPE_CHECKING:
    import socket
    from collections.abc import Mapping
    from typing import Any


STRANGERS = 512  # connections that have not said who they are
ACCEPT_AGAIN_S = 0.5  # after an error of this host, like too many open files


class LinkServer(LinkEndpoint):
    """Node 0's endpoint."""

    def __init__(self, settings: Mapping[str, Any], listener: socket.socket) -> None:
        super().__init__(settings)
        self.listener = listener
        self.context = tls_context(self.token, server=True)
        # From Python 3.11 on a buffer that each connection keeps: 256 KiB, unless told otherwise.
        SSLProtocol.max_size = 1 << 14
        self.strangers: list[asyncio.Task[None]] = []
        self.of_clients = set[str]()  # names of records of their own that have come
        self.closed_at: dict[int, float] = {}  # peers that have closed their connection and not come back yet
        self.reached_at: dict[str, int] = {}  # own address -> how many have come by it
        self.interfaces: dict[str, str | None] = {}

    async def connect(self) -> None:
        """Take connections."""
        self.listener.setblocking(False)
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, _ = await loop.sock_accept(self.listener)
            except OSError:
                await asyncio.sleep(ACCEPT_AGAIN_S)
                continue
            if len(self.strangers) >= max(
                STRANGERS, 2 * self.nnodes
            ):  # who belongs here has said so long before it is the oldest
                self.strangers.pop(0).cancel()
            self.strangers.append(loop.create_task(self.on_connection(sock)))

    async def on_connection(self, sock: socket.socket) -> None:
        """Find out who connects, then exchange records."""
        task, channel = asyncio.current_task(), None
        patience = HANDSHAKE_S * self.slowness
        try:
            channel = await asyncio.wait_for(Channel.accepted(sock, self.context), patience)
            await asyncio.wait_for(self.shake_hands(channel), patience)
        except (PeerDisconnected, OSError, asyncio.TimeoutError):
            return
        finally:
            self.strangers = [other for other in self.strangers if other is not task]
            if channel is not None and channel.node is None:
                channel.writer.close()
        await self.serve(channel)

    async def shake_hands(self, channel: Channel) -> None:
        """Have the client say who it is. Raises `PeerDisconnected`."""
        # The restart is for who does not know its own: see the entry of SageMaker.
        channel.send({"orc-link": VERSION, "restart": self.restart})
        hello = await channel.receive()
        node = hello.get("node")
        if hello.get("marker") != self.marker or hello.get("restart") != self.restart:
            raise PeerDisconnected("it belongs to another attempt")
        if not isinstance(node, int) or not 0 < node < self.nnodes:
            raise PeerDisconnected(f"there is no node {node!r}")
        channel.send({"welcome": node})
        self.refuse_lost(channel, node)
        for other in self.channels:
            if other.node == node:
                other.node = None
                other.close("it has connected again")
        channel.node = node
        self.gone.pop(node, None)
        self.closed_at.pop(node, None)
        address = plain(channel.writer.get_extra_info("sockname")[0])
        self.reached_at[address] = self.reached_at.get(address, 0) + 1
        self.queue(channel, [name for name, record in self.table.items() if concerns(node, name, record)])

    def refuse_lost(self, channel: Channel, node: int) -> None:
        """Raise `PeerDisconnected` when the gang goes on without *node*: what it says does not count any more."""
        if os.path.exists(os.path.join(self.directory, f"node-{node}", "lost.json")):
            channel.send({"refused": "it goes on without this node"})
            raise PeerDisconnected("it was given up")

    def on_record(self, channel: Channel, name: str, record: Any) -> None:
        """Keep it, and pass it on."""
        if channel.node is None or not may_send(channel.node, name):
            raise PeerDisconnected(f"it may not send {name}")
        self.refuse_lost(channel, channel.node)
        if name.startswith("stop-") and name in self.table:
            return  # the first one counts
        if self.accept_record(name, record):
            self.publish(name, record, channel)

    def publish(self, name: str, record: dict[str, Any], origin: Channel | None = None) -> None:
        """Pass it on to all whom it concerns, but for where it came from."""
        if origin is not None and OWN.fullmatch(name):  # node 0 alone needs those of a client
            self.of_clients.add(name)
            return
        self.table[name] = record
        for channel in self.channels:
            if channel is not origin and channel.node is not None and concerns(channel.node, name, record):
                self.queue(channel, [name])

    def on_disconnected(self, channel: Channel, why: str, by_peer: bool) -> None:
        """Give a node whose host closes its connection `GONE_S` to come back."""
        if channel.node is not None and by_peer:
            self.closed_at[channel.node] = time.monotonic()

    def check(self, now: float) -> None:
        """Note who has not come back."""
        super().check(now)
        for node, at in list(self.closed_at.items()):
            if now - at > self.gone_s:
                del self.closed_at[node]
                if f"node-{node}/exit.json" not in self.of_clients:
                    self.gone[node] = "its agent has closed the connection and not come back"

    def place(self) -> dict[str, Any]:
        """Return the address by which most have come."""
        if not self.reached_at:
            return {"address": None, "interface": None}
        address = max(self.reached_at, key=lambda known: self.reached_at[known])
        if address not in self.interfaces:
            self.interfaces[address] = interface_of(address)
        return {"address": address, "interface": self.interfaces[address]}
