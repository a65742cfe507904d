"""Termination of a node's processes: SIGTERM, the grace period, SIGKILL."""

from __future__ import annotations

import signal
import time

from orc.launchers.agent.procfs import process_start
from orc.launchers.agent.signals import signal_group, signal_process
from orc.launchers.agent.state import FAILURE_GRACE_S, FAST_POLL_S, NodeState
from orc.launchers.agent.supervision import Supervisor

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable


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
