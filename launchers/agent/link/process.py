"""The link's process, which keeps the records in step with other hosts, as its agent sees it.

Loaded only where the hosts of an attempt share no file system; docs/explanation/agent.md says how it works.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import time

from orc.launchers.agent.errors import LaunchFailure
from orc.launchers.agent.network import Port, reachable_addresses, towards
from orc.launchers.agent.processes import ENDING, PR_SET_PDEATHSIG, background, next_signal, prctl, signal_process
from orc.launchers.agent.procfs import process_start
from orc.launchers.agent.records import read_json, remove
from orc.launchers.agent.state import FAILURE_GRACE_S, FAST_POLL_S, NodeState

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any


CLOSE_S = 10.0  # for the process to finish what it is just writing, on a disk that is slow


class Link:
    """The link of an agent: its process, and the state that it reports."""

    def __init__(self, node: NodeState) -> None:
        self.node = node
        self.path = os.path.join(node.private, "link.json")
        given = read_json(self.path)
        if given is None or not given.get("token"):
            raise LaunchFailure(f"{self.path} is missing: nodes on several hosts need it to know each other")
        self.server = given.get("hub") or node.config.hub
        if node.node and not self.server:
            raise LaunchFailure(f"{self.path} does not say where node 0 is")
        self.given = given
        self.listener: socket.socket | None = None
        self.port: Any = None
        self.pid = 0
        self.started = 0.0
        self.waker = -1  # of the process

    def listen(self) -> dict[str, Any]:
        """Open the port of node 0, the one that the others were given or any; returns ``{"port", "addresses"}``."""
        if self.server:
            number = int(self.server["port"])
        else:
            self.port = Port()
            number = int(self.port.number)
        try:
            self.listener = _listener(number)
        except OSError as error:
            raise LaunchFailure(f"cannot listen on port {number} of this host: {error.strerror}") from None
        return {"port": number, "addresses": reachable_addresses()}

    def start(self) -> None:
        """Fork the process that does the work; it dies with the agent."""
        node = self.node
        if not node.node and self.listener is None:
            self.listen()
        settings = {
            "node": node.node,
            "nnodes": node.nnodes,
            "restart": node.restart,
            "marker": node.config.marker,
            "attempt_dir": node.attempt_dir,
            "heartbeat_s": node.heartbeat_s,
            "peer_timeout_s": node.peer_timeout_s,
            "token": self.given["token"],
            "hub": self.server,
            "hurry": node.remote_shell,  # its launcher's calls are files that others write
        }
        listener = self.listener
        remove(os.path.join(node.dir, "link.json"))
        self.started = time.monotonic()
        woken, waker = os.pipe()
        for end in (woken, waker):
            os.set_blocking(end, False)

        def work() -> None:
            os.close(waker)
            # Not SIGKILL: what it is just writing is finished or taken back.
            signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
            prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
            if node.slots:
                node.slots.close()  # the agent's copy counts
            try:
                if listener is not None:
                    from orc.launchers.agent.link.server import LinkServer  # asyncio: in this process alone

                    LinkServer(settings, listener).run(woken)
                else:
                    from orc.launchers.agent.link.client import LinkClient

                    LinkClient(settings).run(woken)
            except SystemExit:
                os._exit(0)

        try:
            self.pid = background(work, node.log_fd)
        finally:
            os.close(woken)
            if self.waker >= 0:  # of one that has ended
                os.close(self.waker)
            self.waker = waker

    def wake(self) -> None:
        """Wake the process: there is a new record here."""
        try:
            os.write(self.waker, b"x")
        except OSError:
            pass  # it has been told already, or has just ended, and its successor looks at everything

    def on_end(self) -> None:
        """Start the process again: it never ends by itself, and the next one takes everything from the files."""
        self.node.log("the link's process has ended; starting it again")
        if time.monotonic() - self.started < 1.0:
            time.sleep(0.2)
        self.start()

    def state(self) -> dict[str, Any]:
        """Return the state that the process has reported last."""
        return read_json(os.path.join(self.node.dir, "link.json")) or {}

    def gone(self) -> dict[str, str]:
        """Peers whose agents are known to have ended, and how."""
        found = self.state().get("gone") or {}
        return {str(node): str(why) for node, why in found.items()}

    def token_of_ranks(self, rendezvous_id: str) -> str:
        """Return the key of the ranks of one incarnation, made from the attempt's token, so that it need not travel."""
        import hashlib
        import hmac

        key, label = str(self.given["token"]).encode(), b"ranks " + rendezvous_id.encode()
        return hmac.new(key, label, hashlib.sha256).hexdigest()

    def variables(self) -> dict[str, str]:
        """Return the variables that name the interface which leads to the other hosts."""
        return towards(self.state().get("interface"))

    def await_delivery(self, others_go_on: bool) -> None:
        """Stay until the other side has what this one has recorded, as far as it can be reached.

        Node 0 stays for the others, whose way to each other it is, until each has ended or is lost. *others_go_on*:
        they may have ranks that still have something to do.
        """
        if not self.pid:
            return  # it could not be started
        node = self.node
        lost = node.stop is not None and node.stop.lost
        patience = 1.0 if lost and node.node else node.peer_timeout_s + FAILURE_GRACE_S
        deadline = time.monotonic() + patience
        alone_at = float("inf")
        signs: dict[int, tuple[object, float]] = {}
        while os.path.isdir(node.dir):
            now = time.monotonic()
            state = self.state()
            if others_go_on and not node.node and now >= node.next_beat:
                node.write_heartbeat(node.state)  # silence would be taken for a cut, which ends what still runs
            if node.node:
                over = bool(state.get("delivered")) and bool(state.get("connected"))
                over = over or bool(state.get("handed_over"))
                over = over or now > deadline or "0" in (state.get("gone") or {})
            else:
                waiting = [peer for peer in range(1, node.nnodes) if not self._is_over(peer, state, signs, now)]
                alone_at = alone_at if waiting else min(alone_at, now)
                over = not waiting and (bool(state.get("delivered")) or now > alone_at + FAILURE_GRACE_S)
            if over:
                return
            received = next_signal(FAST_POLL_S)
            if received is not None and received.si_signo in ENDING:
                return
            node.reap()

    def _is_over(self, peer: int, state: Mapping[str, Any], signs: dict[int, tuple[object, float]], now: float) -> bool:
        """Return whether nothing more is to be waited for from *peer*."""
        node = self.node
        if peer in node.lost or str(peer) in (state.get("gone") or {}):
            return True
        if node.peer_record(peer, "exit.json") is not None:
            return True
        beat = (node.peer_record(peer, "heartbeat.json") or {}).get("at")
        if peer not in signs or signs[peer][0] != beat:
            signs[peer] = (beat, now)
        return now - signs[peer][1] > node.peer_timeout_s

    def close(self) -> None:
        """No link any more."""
        pid, self.pid = self.pid, 0
        deadline = time.monotonic() + CLOSE_S
        if pid and signal_process(pid, signal.SIGTERM):
            while process_start(pid) and time.monotonic() < deadline:
                time.sleep(0.002)
            signal_process(pid, signal.SIGKILL)
        if self.port:
            self.port.close()


def _listener(port: int) -> socket.socket:
    """Return a socket that listens on *port* of every address of this host."""
    try:
        listener = socket.socket(socket.AF_INET6, socket.SOCK_STREAM)
        listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # old connections' ends are not in the way
        listener.bind(("::", port))
    except OSError:  # no IPv6 here
        listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("", port))
    listener.listen(512)
    return listener
