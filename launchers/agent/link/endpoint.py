"""Endpoint of the link: keeps the records of an attempt in step between hosts without a shared file system.

A process of its own that knows no more of the agent than the files of the attempt directory. Node 0's is the *server*,
the others *join* it. Each side sends the newest content of the files that the other one needs, and after a cut all of
them again: a record that arrives twice changes nothing, and what waits to be sent is a set of names, however long the
cut.
"""

from __future__ import annotations

import asyncio
import os
import time
from abc import ABC, abstractmethod

from orc.launchers.agent.errors import log_stderr
from orc.launchers.agent.link.channel import HEARTBEAT, MESSAGE_BYTES, Channel, Files, PeerDisconnected, is_record
from orc.launchers.agent.messages import encode_message
from orc.launchers.agent.processes import NEWS, signal_process
from orc.launchers.agent.records import refresh_json
from orc.launchers.agent.state import FAST_POLL_S

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

SCAN_S = 0.1  # how often the own files are looked at; the agent says when it has written one
FAST_FOR_S = 20.0  # at first more often, where others than the agent write them
HANDSHAKE_S = 5.0  # for that of TLS, and as long for the first messages
_ATTENTIVE = 256  # nodes that meet as fast as a few
GONE_S = 6.0  # a closed or refused connection that stays so is an agent that has ended


class LinkEndpoint(ABC):
    """The part that the server and a client have in common: one event loop, one look at the files every `SCAN_S`."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self.node = int(settings["node"])
        self.restart = int(settings["restart"])
        self.marker = str(settings["marker"])
        self.token = str(settings["token"])
        self.nnodes = int(settings["nnodes"])
        self.slowness = max(1.0, self.nnodes / _ATTENTIVE)  # of a node 0 that all the others call at once
        self.heartbeat_s = float(settings["heartbeat_s"])
        self.peer_timeout_s = float(settings["peer_timeout_s"])
        # No sign for so long: the connection is dead, and a new one is tried.
        self.dead_s = max(3 * self.heartbeat_s, self.peer_timeout_s / 3)
        self.gone_s = min(GONE_S, self.peer_timeout_s)
        self.directory = str(settings["attempt_dir"])
        self.files = Files(self.directory, self.node, self.restart)
        self.table: dict[str, dict[str, Any]] = {}
        self.fast_for_s = FAST_FOR_S if settings.get("hurry") else 0.0
        self.agent = os.getppid()
        self.begun = time.monotonic()
        self.channels: list[Channel] = []  # after the handshake
        self.states: dict[str, Any] = {}  # that heartbeats have told; the agent looks at those in its own time
        self.gone: dict[int, str] = {}  # peers whose agents have ended without a word, and how that is known
        self.handed_over = False  # a connection has ended after it had carried this node's exit record
        self.server_is_over = False  # node 0's exit record has come
        self.written_state: dict[str, Any] | None = None
        self.write_at = 0.0

    def run(self, woken: int) -> None:
        """Run until this process is killed: it dies with its agent, which writes to *woken* when something is new."""
        # Not `asyncio.run`: on SIGTERM it would wait for tasks to be cancelled, and `wait_for` may miss that it was.
        asyncio.new_event_loop().run_until_complete(self._run(woken))

    async def _run(self, woken: int) -> None:
        self.wake = asyncio.Event()

        def on_woken() -> None:
            if not os.read(woken, 4096):  # the agent has just died
                asyncio.get_running_loop().remove_reader(woken)
            self.wake.set()

        asyncio.get_running_loop().add_reader(woken, on_woken)
        await asyncio.gather(self.connect(), self.scan())

    async def scan(self) -> None:
        """Publish what is new in the own files, and check the connections."""
        while True:
            now = time.monotonic()
            for name, record in self.files.changed().items():
                self.publish(name, record)
            self.check(now)
            self.write_state()
            fast = now - self.begun < self.fast_for_s or not self.is_settled()
            try:
                await asyncio.wait_for(self.wake.wait(), FAST_POLL_S if fast else SCAN_S)
            except asyncio.TimeoutError:
                continue
            self.wake.clear()
            await asyncio.sleep(0)  # what is woken all the time lets others go on

    async def serve(self, channel: Channel) -> None:
        """Exchange records over a connection whose handshake is over, until it ends."""
        self.channels.append(channel)
        self.write_state()  # the ranks need it, and a record that comes now may let them start
        sender = asyncio.ensure_future(self.send_records(channel))
        why, by_peer = "", False
        try:
            while True:
                message = await channel.receive()
                if "name" in message:
                    channel.received += 1
                    self.on_record(channel, str(message["name"]), message.get("record"))
                    if not HEARTBEAT.fullmatch(str(message["name"])):  # those are confirmed with the next record
                        channel.due.set()
                elif "stored" in message:
                    channel.acknowledged = int(message["stored"])
                    if f"node-{self.node}/exit.json" in self.table:  # a node that ends waits for its delivery
                        self.wake.set()
                elif "refused" in message:
                    self.on_refused(str(message["refused"]))
        except PeerDisconnected as error:
            why, by_peer = channel.closed_because or str(error), error.closed
        finally:
            sender.cancel()
            self.channels.remove(channel)
            channel.writer.close()
            # The other side may go as soon as it has this one's last record, confirmed or not.
            over = channel.delivered or (by_peer and self.server_is_over)
            if f"node-{self.node}/exit.json" in self.table and over:
                self.handed_over = True
            self.on_disconnected(channel, why, by_peer)
            self.wake.set()

    async def send_records(self, channel: Channel) -> None:
        """Send what is due, and what has been stored; *stored* again in silence, as a sign of life."""
        try:
            while True:
                quiet = time.monotonic() - channel.spoke >= self.heartbeat_s
                if quiet or channel.confirmed != channel.received:
                    channel.confirmed = channel.received
                    channel.send({"stored": channel.confirmed})
                while channel.pending:
                    name = next(iter(channel.pending))
                    del channel.pending[name]
                    self.send_record(channel, name)
                    await channel.drain()
                await channel.drain()  # raises when the connection is gone
                try:
                    silence_s = channel.spoke + self.heartbeat_s - time.monotonic()
                    await asyncio.wait_for(channel.due.wait(), max(silence_s, 0.01))
                except asyncio.TimeoutError:
                    continue
                channel.due.clear()
        except PeerDisconnected as error:
            if not error.closed:  # else the receiving side sees it, after what has still come
                channel.close(str(error))

    def send_record(self, channel: Channel, name: str) -> None:
        """Send the newest content of one file."""
        record = self.table[name]
        if len(encode_message(record)) > MESSAGE_BYTES - 4096:
            log_stderr(f"link: {name} is too large to be passed on")
            return
        channel.sent += 1
        channel.send({"name": name, "record": record})

    def queue(self, channel: Channel, names: list[str]) -> None:
        """Have records sent after those before them."""
        channel.pending.update(dict.fromkeys(names))
        channel.due.set()

    def accept_record(self, name: str, record: Any) -> bool:
        """Store a record from the other side; False for what cannot be one."""
        stored = is_record(name) and isinstance(record, dict) and self.files.store(name, record)
        if stored and not (HEARTBEAT.fullmatch(name) and self.states.get(name) == record.get("state")):
            self.notify_agent()
        if stored and HEARTBEAT.fullmatch(name):
            self.states[name] = record.get("state")
        return stored

    def notify_agent(self) -> None:
        """Have it look at the records."""
        if os.getppid() == self.agent:
            signal_process(self.agent, NEWS)

    def check(self, now: float) -> None:
        """End connections over which nothing has come for too long."""
        for channel in self.channels:
            if now - channel.heard > self.dead_s:
                channel.close(f"nothing was heard for {self.dead_s:g} s")

    def state(self) -> dict[str, Any]:
        """Return the content of ``node-<n>/link.json``, which the agent reads."""
        own_exit = self.table.get(f"node-{self.node}/exit.json")
        return {
            "restart": self.restart,
            "connected": sorted(channel.node for channel in self.channels if channel.node is not None),
            "gone": {str(node): why for node, why in sorted(self.gone.items())},
            "delivered": own_exit is not None and all(channel.delivered for channel in self.channels),
            "handed_over": self.handed_over,
            **self.place(),
        }

    def write_state(self) -> None:
        """Write the state down when it has changed."""
        now = time.monotonic()
        if now < self.write_at or (state := self.state()) == self.written_state:
            return
        path = os.path.join(self.directory, f"node-{self.node}", "link.json")
        try:
            refresh_json(path, state)
        except OSError as error:  # a full disk; the directory was removed
            if os.path.isdir(self.directory):
                log_stderr(f"link: cannot write {path}: {error}")
            self.write_at = now + 1.0
            return
        self.written_state = state
        self.notify_agent()

    # the differences

    @abstractmethod
    async def connect(self) -> None:
        """Make or take connections, and `serve` them."""

    def is_settled(self) -> bool:
        """Return whether nothing is to be expected soon."""
        return True

    @abstractmethod
    def publish(self, name: str, record: dict[str, Any]) -> None:
        """Pass on a record that has changed on this host."""

    @abstractmethod
    def on_record(self, channel: Channel, name: str, record: Any) -> None:
        """Take a record that has come. Raises `PeerDisconnected` for one that the other side may not send."""

    @abstractmethod
    def on_disconnected(self, channel: Channel, why: str, by_peer: bool) -> None:
        """React to the end of a connection."""

    def on_refused(self, why: str) -> None:  # noqa: B027 - no peer refuses the server
        """React to the server going on without this node."""

    @abstractmethod
    def place(self) -> dict[str, Any]:
        """Return the addresses of the connection: ``address`` (own), ``interface``, ``hub``."""
