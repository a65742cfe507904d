"""The side of every other node: connected to node 0, or trying to be."""

from __future__ import annotations

import errno
import os
import selectors
import socket
import time

from orc.launchers.agent.errors import log_stderr
from orc.launchers.agent.link.channel import VERSION, Channel, PeerDisconnected, nonce_in
from orc.launchers.agent.link.endpoint import LinkEndpoint
from orc.launchers.agent.link.records import CALL, RENDEZVOUS, may_send
from orc.launchers.agent.network import interface_of, plain

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any


CONNECT_S = 2.0
STAGGER_S = 0.05  # between the addresses of node 0, in their order
BACKOFF_S = (0.05, 1.0)


class Joiner(LinkEndpoint):
    """The side of every other node: connected to node 0, or trying to be."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        super().__init__(settings)
        hub = settings["hub"]
        self.port = int(hub["port"])
        self.addresses = [str(address) for address in hub["addresses"]]
        self.tries: dict[Channel, str] = {}  # connections that are being made -> address
        self.queue = [(self.begun + STAGGER_S * n, address) for n, address in enumerate(self.addresses)]
        self.speaking: Channel | None = None  # one at a time says who it is: node 0 takes the last that does
        self.refused = False
        self.pause_s = BACKOFF_S[0]
        self.good: str | None = None  # the address that has worked
        self.joined: Channel | None = None
        self.refused_since: float | None = None
        self.errors: dict[str, str] = {}

    def keep_up(self, now: float) -> None:
        """Connect, and connect again."""
        super().keep_up(now)
        for channel, address in list(self.tries.items()):
            try:
                self.shake_hands(channel)
            except PeerDisconnected as error:
                self.drop(channel, str(error))
                continue
            if now - channel.opened > CONNECT_S:
                self.failed(address, OSError(errno.ETIMEDOUT, f"no answer within {CONNECT_S:g} s"))
                self.drop(channel, f"no answer within {CONNECT_S:g} s")
        # TCP repeats what was lost at growing intervals: after a cut a new connection is there long before the old one
        # has noticed, so it is tried beside the old one.
        silent = self.joined is not None and now - self.joined.heard > 2 * self.heartbeat_s
        if self.joined is not None and not silent:
            self.be_content()
        elif not self.refused:
            for due, address in list(self.queue):
                if now >= due:
                    self.queue.remove((due, address))
                    self.connect(address)
            if not self.tries and not self.queue:
                self.pause_s = min(self.pause_s * 2, BACKOFF_S[1])
                first = [self.good] if self.good else []
                order = first + [address for address in self.addresses if address not in first]
                self.queue = [(now + self.pause_s + STAGGER_S * n, address) for n, address in enumerate(order)]
            if self.refused_since is not None and now - self.refused_since > self.gone_s:
                self.gone[0] = f"its agent has ended: {self.good} refuses connections"
            elif self.good is None and now - self.begun > self.peer_timeout_s:
                self.gone[0] = "it cannot be reached: " + "; ".join(
                    f"{address} port {self.port}: {why}" for address, why in sorted(self.errors.items())
                )

    def is_settled(self) -> bool:
        """Connections are being made as long as there is none."""
        return self.joined is not None

    def be_content(self) -> None:
        """The connection works: no other one is needed."""
        self.queue, self.refused_since = [], None
        for channel in list(self.tries):
            self.drop(channel, "the first connection works again")

    def connect(self, address: str) -> None:
        """Begin to connect to one of node 0's addresses."""
        try:
            found = socket.getaddrinfo(address, self.port, type=socket.SOCK_STREAM)
        except OSError as error:
            self.failed(address, error)
            return
        family, kind, protocol, _, where = found[0]
        sock = socket.socket(family, kind, protocol)
        sock.setblocking(False)
        code = sock.connect_ex(where)
        if code not in (0, errno.EINPROGRESS):
            sock.close()
            self.failed(address, OSError(code, os.strerror(code)))
            return
        self.tries[self.open(sock, selectors.EVENT_READ | selectors.EVENT_WRITE)] = address

    def failed(self, address: str, error: OSError) -> None:
        """An address does not work now."""
        self.errors[address] = error.strerror or str(error)
        if address == self.good:
            refused = error.errno == errno.ECONNREFUSED
            self.refused_since = (self.refused_since or time.monotonic()) if refused else None

    def on_event(self, key: selectors.SelectorKey, events: int) -> None:
        """A connection is made, refused, or speaks."""
        channel: Channel = key.data
        if channel in self.tries and channel.keys is None:
            error = channel.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if error:
                self.failed(self.tries[channel], OSError(error, os.strerror(error)))
                self.drop(channel, os.strerror(error))
                return
        super().on_event(key, events)

    def shake_hands(self, channel: Channel) -> None:
        """Node 0's two frames: its random number, then the proof that it knows the token."""
        if not channel.nonces:
            if self.speaking is not None or (first := channel.greeting(b"")) is None:
                return
            if first.get("orc-link") != VERSION:
                raise PeerDisconnected("it does not speak this protocol")
            self.speaking = channel
            channel.nonces = nonce_in(first)
            nonce = os.urandom(32)
            channel.greet(
                b"join", {"node": self.node, "marker": self.marker, "restart": self.restart, "nonce": nonce.hex()}
            )
            channel.nonces += nonce
            return
        welcome = channel.greeting(b"hub")
        if welcome is None:
            return
        channel.agree(hub=False)
        channel.node = 0
        self.speaking = None
        before, self.joined = self.joined, channel
        self.good = self.tries.pop(channel)
        self.pause_s = BACKOFF_S[0]
        self.gone.pop(0, None)
        self.be_content()
        if before is not None:
            self.drop(before, "a new connection has taken its place")
        channel.pending = {name: None for name, record in self.table.items() if self.is_for_hub(name, record)}

    def is_for_hub(self, name: str, record: Mapping[str, Any]) -> bool:
        """Whether node 0 needs this: own records, and what is for others."""
        if CALL.fullmatch(name):
            return record.get("from" if name.endswith(".done.json") else "node") != self.node
        return may_send(self.node, name)

    def publish(self, name: str, record: dict[str, Any]) -> None:
        """To the hub, now or when there is a connection."""
        if self.is_for_hub(name, record):
            self.table[name] = record
            if self.joined is not None:
                self.joined.pending[name] = None

    def on_record(self, channel: Channel, name: str, record: Any) -> None:
        """Keep it. Where node 0 can be reached depends on who asks."""
        if name.startswith(f"node-{self.node}/"):
            raise PeerDisconnected(f"it may not send {name}")
        if isinstance(record, dict) and RENDEZVOUS.fullmatch(name):
            record = {**record, "addr": self.good}
        if self.accept_record(name, record) and name == "node-0/exit.json":
            self.hub_is_over = True

    def on_refused(self, why: str) -> None:
        """Node 0 goes on without this node."""
        self.refused = True
        self.gone[0] = why

    def on_dropped(self, channel: Channel, why: str, by_peer: bool) -> None:
        """Try again, at once if it had worked."""
        address = self.tries.pop(channel, None)
        if address is not None:
            self.errors[address] = why
        if channel is self.speaking:
            self.speaking = None
        if channel is self.joined:
            self.joined = None
            log_stderr(f"link: the connection to node 0 is lost: {why}")
            self.queue = [(time.monotonic() + self.pause_s, str(self.good))]

    def place(self) -> dict[str, Any]:
        """The two ends of the connection."""
        if self.joined is None:
            return {name: (self.told_state or {}).get(name) for name in ("address", "interface", "hub")}
        address = plain(self.joined.sock.getsockname()[0])
        if self.told_state and self.told_state.get("address") == address:
            return {name: self.told_state[name] for name in ("address", "interface", "hub")}
        return {"address": address, "interface": interface_of(address), "hub": self.good}
