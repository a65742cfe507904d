"""Supervision: the event loop of an agent, its reactions to signals, ended ranks and records of others, and
the termination of its processes: SIGTERM, the grace period, SIGKILL.
"""

from __future__ import annotations

import os
import signal
import time

from orc.launchers.agent.failures import (
    EXPLAIN_S,
    check_launcher,
    check_rank_records,
    failure_of,
    first_rank_failure,
    launcher_preempted,
    on_failure,
    on_peer_stop,
    on_preempted,
    on_service_end,
    watch_peers,
)
from orc.launchers.agent.processes import ENDING, NEWS, decode_wait_status, next_signal, signal_group, signal_process
from orc.launchers.agent.procfs import process_start
from orc.launchers.agent.records import read_json
from orc.launchers.agent.state import ATTENTIVE, FAILURE_GRACE_S, FAST_POLL_S, POLL_S, NodeState, Rank, StopRequest

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any


class Supervisor(NodeState):
    """The loop of one node's agent, and what it does about signals, ended ranks, and records of others."""

    def tick(self) -> None:
        """Wait for the next thing that happens, and take note of it."""
        now = time.monotonic()
        received = next_signal(min(self.next_beat, self.next_poll) - now)
        if self.fence and self.fence.slept:
            self.fence.yield_to_guard()
            self.write_heartbeat(self.state)  # who else runs comes before everything that has happened meanwhile
        if received is not None:
            if received.si_signo in ENDING:
                self.on_signal(signal.Signals(received.si_signo))
            if received.si_signo == NEWS:  # however many there are, no more than some looks in a second
                self.next_poll = min(self.next_poll, self.last_poll + FAST_POLL_S)
            self.reap(received.si_pid if received.si_signo == signal.SIGCHLD else 0)
        now = time.monotonic()
        if self.calls:
            self.calls.poll()
            self.next_poll = min(self.next_poll, now + self.calls.pace())
        if now >= self.next_beat:
            self.write_heartbeat(self.state)
        if now >= self.next_poll:
            self.poll(now)

    def until(self, done: Callable[[], bool]) -> bool:
        """Tick until *done*; False when a stop came first or with it (the last rank may be the one that failed)."""
        while self.stop is None and not done():
            self.tick()
        return self.stop is None

    def on_signal(self, number: signal.Signals) -> None:
        """React to a signal by which the platform, or a person, ends this node's part."""
        if self.stop:
            return
        cancel = read_json(os.path.join(self.attempt_dir, "cancel.json"))
        # A scheduler that sees one node's agent fail ends the others: their reason is that node's.
        stop_record = read_json(os.path.join(self.attempt_dir, f"stop-r{self.restart}.json"))
        if cancel is not None:
            self.on_cancel(cancel)
        elif stop_record is not None:
            on_peer_stop(self, stop_record)
        elif number == signal.SIGINT:
            self.request_stop(StopRequest("cancelled", "interrupted", self.grace_s))
        else:
            self.request_stop(StopRequest("preempted", f"preempted ({number.name})", self.grace_s))

    def on_cancel(self, cancel: dict[str, Any]) -> None:
        """React to ``cancel.json``."""
        given = cancel.get("grace_s")
        reason, grace = str(cancel.get("reason") or "cancelled"), self.grace_s if given is None else float(given)
        self.request_stop(StopRequest("cancelled", reason, grace, announced=True))  # by the file itself

    def on_rank_end(self, rank: Rank) -> None:
        """React to the end of a rank (or the launcher, or a service), which may be that of the attempt."""
        code, name = decode_wait_status(rank.status or 0)
        if self.stop:
            return
        if rank.role and self.follows and (self.peer_record(0, "heartbeat.json") or {}).get("state") == "running":
            # The program may have ended, and the word of it be on its way. Less than the driver waits for this node.
            self.unexplained = (rank, time.monotonic() + 0.25 * EXPLAIN_S)
            return
        if rank.role:
            on_service_end(self, rank)
            return
        if code == 0 and name is None:
            if rank.rank is None:
                check_rank_records(self)
            return
        if name == "SIGTERM":
            # Schedulers signal every process at once. If our own SIGTERM is on its way, that is what happened.
            deadline = time.monotonic() + 0.5
            while (late := next_signal(deadline - time.monotonic())) is not None:
                if late.si_signo in ENDING:
                    self.on_signal(signal.Signals(late.si_signo))
                    break
            if self.stop:
                return
        if code == self.preempt_exit and rank.rank is not None:
            on_preempted(self, rank.rank)
            return
        if rank.rank is None and launcher_preempted(self):
            return
        if (self.remote_shell and first_rank_failure(self) is None) or (self.services and self.nnodes > 1):
            self.unexplained = (rank, time.monotonic() + EXPLAIN_S)
        else:
            on_failure(self, failure_of(self, rank))

    def poll(self, now: float) -> None:
        """Check the records of others: a cancellation, a stop, silence."""
        asleep = now - self.last_poll if self.last_poll else 0.0
        slept = asleep > 5.0  # this process itself was stopped for a while
        self.last_poll = now
        # The link tells when something comes; files that hosts share do not.
        hurry = self.state == "waiting" and now - self.begun < 10 and not self.link
        pace = max(1.0, self.nnodes / ATTENTIVE)  # each look is one at all of them
        self.next_poll = now + (FAST_POLL_S if hurry else POLL_S * pace)
        deadline = self.config.deadline_s
        if self.stop is None and deadline is not None and now - self.begun >= float(deadline):
            stall = self.stall()
            reason = f"time limit of {float(deadline):g} s reached" + (f"; {stall}" if stall else "")
            self.request_stop(StopRequest("timeout", reason, self.grace_s))
        cancel = read_json(os.path.join(self.attempt_dir, "cancel.json"))
        if cancel is not None and self.stop is None:
            self.on_cancel(cancel)
        elif cancel is not None:  # a later cancellation can only make it shorter
            self.kill_at = min(self.kill_at, now + float(cancel.get("grace_s") or 0.0))
        self.answer_stack_requests()
        for error in self.gpu_errors.poll() if self.gpu_errors else ():
            self.log(f"the kernel says: {error}")
        check_launcher(self)
        if self.nnodes == 1 or self.stop:
            return
        stop_record = read_json(os.path.join(self.attempt_dir, f"stop-r{self.restart}.json"))
        if stop_record is not None:
            on_peer_stop(self, stop_record)
            return
        if self.unexplained and now > self.unexplained[1]:
            ended, self.unexplained = self.unexplained[0], None
            if ended.role:
                on_service_end(self, ended)
            else:
                on_failure(self, failure_of(self, ended))
            return
        if self.link and asleep > self.peer_timeout_s:  # nobody counts on this node any more
            reason = f"node {self.node} was stopped for {asleep:.0f} s (node failure; {self.me['host']})"
            self.request_stop(StopRequest("node_failure", reason, 0.0, lost=True, lost_node=self.node, announced=True))
            return
        watch_peers(self, now, slept)

    def answer_stack_requests(self) -> None:
        """Answer requests for the stacks of the ranks. A rank that stalls causes one for those of all."""
        if not self.stalled and self.state == "running" and (report := self.stall()):
            self.stalled = report
            try:
                from orc.launchers.agent.stacks import ask

                ask(self.attempt_dir, f"stall-r{self.restart}")
            except OSError as error:  # a full disk
                self.log(f"cannot ask for stacks: {error}")
        if self.stacks is None and os.path.isdir(os.path.join(self.attempt_dir, "stacks")):
            from orc.launchers.agent.stacks import StackRequests

            self.stacks = StackRequests(self)
        if self.stacks is not None:
            self.stacks.poll()


def end_processes(node: Supervisor, living: Callable[[], list[int]]) -> None:
    """Send SIGTERM, wait for the grace period, send SIGKILL."""
    grace = node.stop.grace_s if node.stop else 0.0
    node.kill_at = min(node.kill_at, time.monotonic() + grace)
    signalled: set[int] = set()
    while (left := living()) and time.monotonic() < node.kill_at:
        if not may_save_elsewhere(node):
            for pid in left:
                if pid not in signalled:  # a launcher's turn comes when its ranks are gone
                    signal_process(pid, signal.SIGTERM)
            signalled.update(left)
        node.next_poll = min(node.next_poll, node.kill_at)
        node.tick()
    if left:
        node.log("still running at the end of the grace period: killed")
    stop_ranks_now(node)


def stop_ranks_now(node: Supervisor) -> None:
    """Kill every session, and wait until their leaders are gone; services may clean up after the ranks."""
    for rank in node.ranks:
        if rank.pid in node.sessions:
            signal_group(rank.pid, signal.SIGKILL)
    end_services(node)
    deadline = time.monotonic() + 10.0
    kill_sessions(node)
    while node.sessions and time.monotonic() < deadline:
        node.next_poll = time.monotonic() + FAST_POLL_S
        node.tick()


def end_services(node: Supervisor) -> None:
    """SIGTERM what runs beside the program, and wait until it has cleaned up."""
    services, node.services = node.services, []
    deadline = time.monotonic() + FAILURE_GRACE_S
    for service in services:
        if service.status is None:
            signal_process(service.pid, signal.SIGTERM)
    while any(service.pid in node.sessions for service in services) and time.monotonic() < deadline:
        node.next_poll = time.monotonic() + FAST_POLL_S
        node.tick()


def kill_sessions(node: NodeState) -> None:
    """Kill the process groups of everything that was started, leaders already gone included."""
    for pid in (*node.sessions, *(rank.pid for rank in node.ranks)):
        if pid in node.sessions or not process_start(pid):  # the number is not in use by somebody else
            signal_group(pid, signal.SIGKILL)


def rank_processes(node: NodeState) -> list[int]:
    """Return the leading process of each rank. Its workers are its own to end."""
    if node.calls or any(rank.rank is None and rank.status is None for rank in node.ranks):
        shims = [r["pid"] for r in node.shim_records(running=True).values() if process_start(r["pid"]) == r["start"]]
        if shims:
            return shims
    called = list(node.calls.running.values()) if node.calls else []
    return called + [rank.pid for rank in node.ranks if rank.status is None]


def may_save_elsewhere(node: NodeState) -> bool:
    """Return whether a launcher that spans the nodes has lost its ranks here, but may have some elsewhere: it would end
    those at once if it were told to end. It ends by itself after its last rank, or with the grace period.
    """
    if not node.remote_shell:
        return False
    shims = node.shim_records(running=True).values()
    return bool(shims) and not any(process_start(shim["pid"]) == shim["start"] for shim in shims)
