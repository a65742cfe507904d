"""Node 0's side of the link: whom everybody is connected to, and who passes on what concerns others.

Shipped as ``orc_agent_hub.py`` beside the agent: standard library only, Python >= 3.9.
"""

from __future__ import annotations

import os
import selectors
import socket
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

    from orc.launchers import agent
    from orc.launchers import agent_channel as channels
    from orc.launchers import agent_exchange as exchange
    from orc.launchers import agent_network as network
    from orc.launchers import agent_shared as shared
else:
    try:
        import orc_agent as agent
    except ImportError:  # not on a node
        from orc.launchers import agent
    channels, exchange, network, shared = (
        agent.beside("channel"),
        agent.beside("exchange"),
        agent.beside("network"),
        agent.beside("shared"),
    )

STRANGERS = 512  # connections that have not said who they are


class Hub(exchange.Side):
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
            # The restart is for who does not know its own: see `orc_sagemaker_entry`.
            channel.greet(b"", {"orc-link": channels.VERSION, "nonce": nonce.hex(), "restart": self.restart})
            channel.nonces = nonce

    def shake_hands(self, channel: channels.Channel) -> None:
        """The joiner's answer: who it is, proved with the token."""
        hello = channel.greeting(b"join")
        if hello is None:
            return
        node = hello.get("node")
        if hello.get("marker") != self.marker or hello.get("restart") != self.restart:
            raise channels.Broken("it belongs to another attempt")
        if not isinstance(node, int) or not 0 < node < self.nnodes:
            raise channels.Broken(f"there is no node {node!r}")
        channel.nonces += channels.nonce_in(hello)
        channel.greet(b"hub", {"welcome": node})
        channel.agree(hub=True)
        self.refuse_lost(channel, node)
        for other in list(self.channels):
            if other.node == node:
                self.drop(other, "it has connected again")
        channel.node = node
        self.gone.pop(node, None)
        self.closed_at.pop(node, None)
        address = network.plain(channel.sock.getsockname()[0])
        self.reached_at[address] = self.reached_at.get(address, 0) + 1
        channel.pending = {name: None for name, record in self.table.items() if shared.concerns(node, name, record)}

    def refuse_lost(self, channel: channels.Channel, node: int) -> None:
        """Raises `Broken` when the gang goes on without *node*: what it says does not count any more."""
        if os.path.exists(os.path.join(self.directory, f"node-{node}", "lost.json")):
            channel.send({"refused": "it goes on without this node"})
            channel.flush()
            raise channels.Broken("it was given up")

    def on_record(self, channel: channels.Channel, name: str, record: Any) -> None:
        """Keep it, and pass it on."""
        if channel.node is None or not shared.may_send(channel.node, name):
            raise channels.Broken(f"it may not send {name}")
        self.refuse_lost(channel, channel.node)
        if name.startswith("stop-") and name in self.table:
            return  # the first one counts
        if self.accept_record(name, record):
            self.publish(name, record, channel)

    def publish(self, name: str, record: dict[str, Any], origin: channels.Channel | None = None) -> None:
        """To all whom it concerns, but for where it came from."""
        self.table[name] = record
        for channel in self.channels:
            if channel is not origin and channel.node is not None and shared.concerns(channel.node, name, record):
                channel.pending[name] = None

    def on_dropped(self, channel: channels.Channel, why: str, by_peer: bool) -> None:
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
            self.interfaces[address] = network.interface_of(address)
        return {"address": address, "interface": self.interfaces[address]}
