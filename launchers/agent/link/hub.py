"""Node 0's side of the link: whom everybody is connected to, and who passes on what concerns others."""

from __future__ import annotations

import os
import selectors
import socket
import time

from orc.launchers.agent.link.channel import VERSION, Channel, PeerDisconnected, nonce_in
from orc.launchers.agent.link.endpoint import LinkEndpoint
from orc.launchers.agent.link.records import concerns, may_send
from orc.launchers.agent.network import interface_of, plain

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any


STRANGERS = 512  # connections that have not said who they are


class Hub(LinkEndpoint):
    """Node 0's side: whom everybody is connected to."""

    def __init__(self, settings: Mapping[str, Any], listener: socket.socket) -> None:
        super().__init__(settings)
        self.listener = listener
        self.nnodes = int(settings["nnodes"])
        self.closed_at: dict[int, float] = {}  # peers that have closed their connection and not come back yet
        self.reached_at: dict[str, int] = {}  # own address -> how many have come by it
        self.interfaces: dict[str, str | None] = {}
        listener.setblocking(False)
        self.selector.register(listener, selectors.EVENT_READ)

    def on_event(self, key: selectors.SelectorKey, events: int) -> None:
        """Somebody knocks, or speaks."""
        if key.fileobj is not self.listener:
            super().on_event(key, events)
            return
        for _ in range(64):
            try:
                sock, _ = self.listener.accept()
            except OSError:
                return
            strangers = [channel for channel in self.channels if channel.keys is None]
            if len(strangers) >= STRANGERS:  # who belongs here has said so long before it is the oldest
                self.drop(strangers[0], "too many others wait to say who they are")
            channel = self.open(sock)
            nonce = os.urandom(32)
            # The restart is for who does not know its own: see the entry of SageMaker.
            channel.greet(b"", {"orc-link": VERSION, "nonce": nonce.hex(), "restart": self.restart})
            channel.nonces = nonce

    def shake_hands(self, channel: Channel) -> None:
        """The joiner's answer: who it is, proved with the token."""
        hello = channel.greeting(b"join")
        if hello is None:
            return
        node = hello.get("node")
        if hello.get("marker") != self.marker or hello.get("restart") != self.restart:
            raise PeerDisconnected("it belongs to another attempt")
        if not isinstance(node, int) or not 0 < node < self.nnodes:
            raise PeerDisconnected(f"there is no node {node!r}")
        channel.nonces += nonce_in(hello)
        channel.greet(b"hub", {"welcome": node})
        channel.agree(hub=True)
        self.refuse_lost(channel, node)
        for other in list(self.channels):
            if other.node == node:
                self.drop(other, "it has connected again")
        channel.node = node
        self.gone.pop(node, None)
        self.closed_at.pop(node, None)
        address = plain(channel.sock.getsockname()[0])
        self.reached_at[address] = self.reached_at.get(address, 0) + 1
        channel.pending = {name: None for name, record in self.table.items() if concerns(node, name, record)}

    def refuse_lost(self, channel: Channel, node: int) -> None:
        """Raises `PeerDisconnected` when the gang goes on without *node*: what it says does not count any more."""
        if os.path.exists(os.path.join(self.directory, f"node-{node}", "lost.json")):
            channel.send({"refused": "it goes on without this node"})
            channel.flush()
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
        """To all whom it concerns, but for where it came from."""
        self.table[name] = record
        for channel in self.channels:
            if channel is not origin and channel.node is not None and concerns(channel.node, name, record):
                channel.pending[name] = None

    def on_dropped(self, channel: Channel, why: str, by_peer: bool) -> None:
        """A node whose host closes its connection has `GONE_S` to come back."""
        if channel.node is not None and by_peer:
            self.closed_at[channel.node] = time.monotonic()

    def keep_up(self, now: float) -> None:
        """Who has not come back?"""
        super().keep_up(now)
        for node, at in list(self.closed_at.items()):
            if now - at > self.gone_s:
                del self.closed_at[node]
                if f"node-{node}/exit.json" in self.table:
                    continue
                self.gone[node] = "its agent has closed the connection and not come back"

    def place(self) -> dict[str, Any]:
        """The address by which most have come."""
        if not self.reached_at:
            return {"address": None, "interface": None}
        address = max(self.reached_at, key=lambda known: self.reached_at[known])
        if address not in self.interfaces:
            self.interfaces[address] = interface_of(address)
        return {"address": address, "interface": self.interfaces[address]}
