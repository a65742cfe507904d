"""Client of the link: the endpoint of every other node, connected to node 0, or trying to be."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import time

from orc.launchers.agent.errors import log_stderr
from orc.launchers.agent.link.channel import CALL, RENDEZVOUS, VERSION, Channel, PeerDisconnected, may_send, tls_context
from orc.launchers.agent.link.endpoint import SCAN_S, LinkEndpoint
from orc.launchers.agent.network import interface_of, plain

TYPE_CHECKING = False

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any


CONNECT_S = 2.0
STAGGER_S = 0.05  # between the addresses of node 0, in their order
BACKOFF_S = (0.05, 1.0)


class LinkClient(LinkEndpoint):
    """The endpoint of every node but node 0."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        super().__init__(settings)
        server = settings["hub"]
        self.context = tls_context(self.token, server=False)
        self.port = int(server["port"])
        self.addresses = [str(address) for address in server["addresses"]]
        self.refused = False
        self.good: str | None = None  # the address that has worked
        self.joined: Channel | None = None
        self.welcomed: Channel | None = None  # by node 0, of the connections that are being tried
        self.refused_since: float | None = None
        self.errors: dict[str, str] = {}

    async def connect(self) -> None:
        """Connect, and connect again.

        TCP repeats what was lost at growing intervals: after a cut a new connection is there long before the old one
        has noticed, so it is tried beside the old one.
        """
        self.one_shakes_hands = asyncio.Lock()  # node 0 takes the last that says who it is
        serving: set[asyncio.Future[None]] = set()
        pause_s = 0.0
        while not self.refused:
            if self.is_joined():
                self.refused_since, pause_s = None, BACKOFF_S[0]
                await asyncio.sleep(SCAN_S)
                continue
            await asyncio.sleep(pause_s)
            pause_s = min(max(2 * pause_s, BACKOFF_S[0]), BACKOFF_S[1])
            channel = await self.first_connection()
            if channel is not None:
                before, self.joined = self.joined, channel
                self.gone.pop(0, None)
                if before is not None:
                    before.close("a new connection has taken its place")
                self.queue(channel, [name for name, record in self.table.items() if self.is_for_server(name, record)])
                serving = {task for task in serving if not task.done()} | {asyncio.ensure_future(self.serve(channel))}

    def is_joined(self) -> bool:
        """Return whether there is a connection, and a sign of life over it."""
        return self.joined is not None and time.monotonic() - self.joined.heard <= 2 * self.heartbeat_s

    async def first_connection(self) -> Channel | None:
        """Return the first connection that works, of those to all addresses; `None` when none does."""
        self.welcomed = None
        order = [self.good] if self.good else []
        order += [address for address in self.addresses if address != self.good]
        tries = [asyncio.ensure_future(self.try_address(address, n * STAGGER_S)) for n, address in enumerate(order)]
        found = None
        try:
            for done in asyncio.as_completed(tries):
                found = found or await done
                if found or self.is_joined():
                    return found
        finally:
            for task in tries:
                task.cancel()
            for made in await asyncio.gather(*tries, return_exceptions=True):
                if isinstance(made, Channel) and made is not found:
                    made.close("another connection works")
        return None

    async def try_address(self, address: str, delay_s: float) -> Channel | None:
        """Return a connection to node 0 at *address*, with the handshake done; `None` when there is none."""
        await asyncio.sleep(delay_s)
        writer, patience = None, CONNECT_S * self.slowness
        async with self.one_shakes_hands:  # a busy node 0 is not called again because it is slow to answer
            if self.welcomed is not None:
                return None
        try:
            found = await asyncio.get_running_loop().getaddrinfo(address, self.port, type=socket.SOCK_STREAM)
            opened = Channel.connected(str(found[0][4][0]), self.port, self.context)
            channel = await asyncio.wait_for(opened, patience)
            writer = channel.writer
            async with self.one_shakes_hands:
                if self.welcomed is None:
                    await asyncio.wait_for(self.shake_hands(channel), patience)
                    self.welcomed = channel
            if self.welcomed is not channel:
                return None
        except asyncio.TimeoutError:
            self.failed(address, OSError(errno.ETIMEDOUT, f"no answer within {patience:g} s"))
        except PeerDisconnected as error:
            self.errors[address] = str(error)
        except OSError as error:
            self.failed(address, error)
        else:
            self.good, writer = address, None
            return channel
        finally:
            if writer is not None:
                writer.close()
        return None

    def failed(self, address: str, error: OSError) -> None:
        """Note that an address does not work now, and that node 0's agent has ended when that is certain."""
        now = time.monotonic()
        self.errors[address] = os.strerror(error.errno) if error.errno and error.errno > 0 else str(error)
        if address == self.good:
            refused = error.errno == errno.ECONNREFUSED
            self.refused_since = (self.refused_since or now) if refused else None

    async def shake_hands(self, channel: Channel) -> None:
        """Say who this is, and wait until node 0 has heard it. Raises `PeerDisconnected`."""
        if (await channel.receive()).get("orc-link") != VERSION:
            raise PeerDisconnected("it does not speak this protocol")
        channel.send({"node": self.node, "marker": self.marker, "restart": self.restart})
        await channel.receive()
        channel.node = 0

    def check(self, now: float) -> None:
        """Note that node 0 has ended, or cannot be reached."""
        super().check(now)
        if self.joined is not None or self.refused:
            return
        if self.refused_since is not None and now - self.refused_since > self.gone_s:
            self.gone[0] = f"its agent has ended: {self.good} refuses connections"
        elif self.good is None and now - self.begun > self.peer_timeout_s:
            self.gone[0] = "it cannot be reached: " + "; ".join(
                f"{address} port {self.port}: {why}" for address, why in sorted(self.errors.items())
            )

    def is_settled(self) -> bool:
        """Return whether there is a connection."""
        return self.joined is not None

    def is_for_server(self, name: str, record: Mapping[str, Any]) -> bool:
        """Return whether node 0 needs this: own records, and what is for others."""
        if CALL.fullmatch(name):
            return record.get("from" if name.endswith(".done.json") else "node") != self.node
        return may_send(self.node, name)

    def publish(self, name: str, record: dict[str, Any]) -> None:
        """Pass it on to the server, now or when there is a connection."""
        if self.is_for_server(name, record):
            self.table[name] = record
            if self.joined is not None:
                self.queue(self.joined, [name])

    def on_record(self, channel: Channel, name: str, record: Any) -> None:
        """Keep the record. The address of node 0 depends on the node that connects to it."""
        if name.startswith(f"node-{self.node}/"):
            raise PeerDisconnected(f"it may not send {name}")
        if isinstance(record, dict) and RENDEZVOUS.fullmatch(name):
            record = {**record, "addr": self.good}
        if self.accept_record(name, record) and name == "node-0/exit.json":
            self.server_is_over = True

    def on_refused(self, why: str) -> None:
        """Node 0 goes on without this node."""
        self.refused = True
        self.gone[0] = why

    def on_disconnected(self, channel: Channel, why: str, by_peer: bool) -> None:
        """Let `connect` try again, where this was the connection in use."""
        if channel is self.joined:
            self.joined = None
            log_stderr(f"link: the connection to node 0 is lost: {why}")

    def place(self) -> dict[str, Any]:
        """Return the two ends of the connection."""
        state = self.written_state or {}
        if self.joined is None:
            return {name: state.get(name) for name in ("address", "interface", "hub")}
        address = plain(self.joined.writer.get_extra_info("sockname")[0])
        interface = state["interface"] if state.get("address") == address else interface_of(address)
        return {"address": address, "interface": interface, "hub": self.good}
