"""What both sides of the link do: keep the records of an attempt in step between hosts without a shared file system.

A process of its own that
knows no more of the agent than the files of the attempt directory. Node 0's is the *hub*, the others *join* it. Each
side sends the newest content of the files that the other one needs, and after a cut all of them again: a record that
arrives twice changes nothing, and what waits to be sent is a set of names, however long the cut.
"""

from __future__ import annotations

import json
import os
import selectors
import socket
import time

from orc.launchers.agent.errors import log_stderr
from orc.launchers.agent.link.channel import FRAME_BYTES, Channel, PeerDisconnected
from orc.launchers.agent.link.records import Files, is_record
from orc.launchers.agent.records import refresh_json
from orc.launchers.agent.signals import NEWS, signal_process
from orc.launchers.agent.state import FAST_POLL_S

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any


SCAN_S = 0.1  # how often the own files are looked at; the agent says when it has written one
HURRY_FOR_S = 20.0  # at first more often, where others than the agent write them
OUT_BYTES = 1 << 18  # of one connection; more is taken from the files when this is sent
HANDSHAKE_S = 10.0
GONE_S = 6.0  # a closed or refused connection that stays so is an agent that has ended


class LinkEndpoint:
    """What the hub and a joiner have in common: one thread, one selector, one look at the files every `SCAN_S`."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self.node = int(settings["node"])
        self.restart = int(settings["restart"])
        self.marker = str(settings["marker"])
        self.token = str(settings["token"]).encode()
        self.heartbeat_s = float(settings["heartbeat_s"])
        self.peer_timeout_s = float(settings["peer_timeout_s"])
        # No sign for so long: the connection is dead, and a new one is tried.
        self.dead_s = max(3 * self.heartbeat_s, self.peer_timeout_s / 3)
        self.gone_s = min(GONE_S, self.peer_timeout_s)
        self.directory = str(settings["attempt_dir"])
        self.files = Files(self.directory, self.node, self.restart)
        self.table: dict[str, dict[str, Any]] = {}
        self.hurry = bool(settings.get("hurry"))
        self.agent = os.getppid()
        self.begun = time.monotonic()
        self.selector = selectors.DefaultSelector()
        self.channels: list[Channel] = []
        self.gone: dict[int, str] = {}  # peers whose agents have ended without a word, and how that is known
        self.handed_over = False  # a connection has ended after it had carried this node's exit record
        self.hub_is_over = False  # node 0's exit record has come
        self.told_state: dict[str, Any] | None = None
        self.tell_at = 0.0

    def run(self, woken: int) -> None:
        """Until this process is killed: it dies with its agent, which writes to *woken* when there is something new."""
        self.selector.register(woken, selectors.EVENT_READ)
        last_scan = next_scan = 0.0
        while True:
            now = time.monotonic()
            for key, events in self.selector.select(max(0.0, next_scan - now)):
                if key.fd == woken:
                    if not os.read(woken, 4096):  # the agent has just died
                        self.selector.unregister(woken)
                    next_scan = 0.0
                else:
                    self.on_event(key, events)
                    next_scan = min(next_scan, last_scan + FAST_POLL_S)
            now = time.monotonic()
            if now >= next_scan:
                hurry = (self.hurry and now - self.begun < HURRY_FOR_S) or not self.is_settled()
                last_scan, next_scan = now, now + (FAST_POLL_S if hurry else SCAN_S)
                for name, record in self.files.changed().items():
                    self.publish(name, record)
                self.keep_up(now)
                self.tell_state()
            for channel in list(self.channels):
                self.pump(channel, now)

    def on_event(self, key: selectors.SelectorKey, events: int) -> None:
        """Something can be read from or written to a connection."""
        channel: Channel = key.data
        if channel not in self.channels:
            return
        try:
            if events & selectors.EVENT_WRITE:
                channel.flush()
            if events & selectors.EVENT_READ:
                channel.read()
                self.advance(channel)
        except PeerDisconnected as error:
            self.drop(channel, str(error), error.closed)

    def advance(self, channel: Channel) -> None:
        """Take what has arrived: the rest of the handshake, then messages."""
        if channel.keys is None:
            self.shake_hands(channel)
            if channel.keys is not None:
                self.tell_state()  # the ranks need it, and a record that comes now may let them start
        while (message := channel.receive()) is not None:
            if "name" in message:
                channel.received += 1
                self.on_record(channel, str(message["name"]), message.get("record"))
            elif "stored" in message:
                channel.acknowledged = int(message["stored"])
            elif "refused" in message:
                self.on_refused(str(message["refused"]))

    def pump(self, channel: Channel, now: float) -> None:
        """Send what is due, and say what has been stored."""
        if channel not in self.channels:
            return
        try:
            if channel.keys is not None:
                quiet = now - channel.spoke > self.heartbeat_s and not channel.waiting
                if quiet or channel.confirmed != channel.received:
                    channel.confirmed = channel.received
                    channel.send({"stored": channel.confirmed})
                while channel.pending and channel.waiting < OUT_BYTES:
                    name = next(iter(channel.pending))
                    del channel.pending[name]
                    self.send_record(channel, name)
            channel.flush()
            wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if channel.waiting else 0)
            if self.selector.get_key(channel.sock).events != wanted:
                self.selector.modify(channel.sock, wanted, channel)
        except PeerDisconnected as error:
            self.drop(channel, str(error), error.closed)

    def send_record(self, channel: Channel, name: str) -> None:
        """The newest content of one file."""
        record = self.table[name]
        if len(json.dumps(record, ensure_ascii=False).encode()) > FRAME_BYTES - 4096:
            log_stderr(f"link: {name} is too large to be passed on")
            return
        channel.sent += 1
        channel.send({"name": name, "record": record})

    def accept_record(self, name: str, record: Any) -> bool:
        """Store a record from the other side; False for what cannot be one."""
        stored = is_record(name) and isinstance(record, dict) and self.files.store(name, record)
        if stored:
            self.tell_agent()
        return stored

    def tell_agent(self) -> None:
        """Have it look."""
        if os.getppid() == self.agent:
            signal_process(self.agent, NEWS)

    def open(self, sock: socket.socket, events: int = selectors.EVENT_READ) -> Channel:
        """A new connection, of whom nothing is known yet."""
        channel = Channel(sock, self.token)
        self.channels.append(channel)
        self.selector.register(sock, events, channel)
        return channel

    def drop(self, channel: Channel, why: str, by_peer: bool = False) -> None:
        """Close a connection. *by_peer*: see `PeerDisconnected.closed`."""
        if channel in self.channels:
            self.channels.remove(channel)
            self.selector.unregister(channel.sock)
            channel.sock.close()
            # The other side may go as soon as it has this one's last record, confirmed or not.
            over = channel.delivered or (by_peer and self.hub_is_over)
            if channel.keys is not None and f"node-{self.node}/exit.json" in self.table and over:
                self.handed_over = True
            self.on_dropped(channel, why, by_peer)

    def keep_up(self, now: float) -> None:
        """What has to be done from time to time."""
        for channel in list(self.channels):
            if channel.keys is None and now - channel.opened > HANDSHAKE_S:
                self.drop(channel, "it did not say who it is")
            elif channel.keys is not None and now - channel.heard > self.dead_s:
                self.drop(channel, f"nothing was heard for {self.dead_s:g} s")

    def state(self) -> dict[str, Any]:
        """What the agent is told, in ``node-<n>/link.json``."""
        own_exit = self.table.get(f"node-{self.node}/exit.json")
        joined = [channel for channel in self.channels if channel.keys is not None]
        return {
            "restart": self.restart,
            "connected": sorted(channel.node for channel in joined if channel.node is not None),
            "gone": {str(node): why for node, why in sorted(self.gone.items())},
            "delivered": own_exit is not None and all(channel.delivered for channel in joined),
            "handed_over": self.handed_over,
            **self.place(),
        }

    def tell_state(self) -> None:
        """Write it down when it has changed."""
        now = time.monotonic()
        if now < self.tell_at or (state := self.state()) == self.told_state:
            return
        path = os.path.join(self.directory, f"node-{self.node}", "link.json")
        try:
            refresh_json(path, state)
        except OSError as error:  # a full disk; the directory was removed
            if os.path.isdir(self.directory):
                log_stderr(f"link: cannot write {path}: {error}")
            self.tell_at = now + 1.0
            return
        self.told_state = state
        self.tell_agent()

    # what differs

    def is_settled(self) -> bool:
        """Whether nothing is to be expected soon."""
        return True

    def publish(self, name: str, record: dict[str, Any]) -> None:
        """A record has changed on this host."""
        raise NotImplementedError

    def shake_hands(self, channel: Channel) -> None:
        """Go on with the handshake. Raises `PeerDisconnected`."""
        raise NotImplementedError

    def on_record(self, channel: Channel, name: str, record: Any) -> None:
        """A record has come. Raises `PeerDisconnected` for one that the other side may not send."""
        raise NotImplementedError

    def on_dropped(self, channel: Channel, why: str, by_peer: bool) -> None:
        """A connection is gone."""
        raise NotImplementedError

    def on_refused(self, why: str) -> None:
        """The other side does not want this one any more."""

    def place(self) -> dict[str, Any]:
        """The addresses of the connection: ``address`` (own), ``interface``, ``hub``."""
        raise NotImplementedError
