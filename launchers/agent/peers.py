"""Peers: watching the other nodes of an attempt by their records, and going on without them or not."""

from __future__ import annotations

import os
import signal
import time

from orc.launchers.agent.failures import failure_of, first_rank_failure, on_failure
from orc.launchers.agent.procfs import process_start
from orc.launchers.agent.records import read_json, write_json
from orc.launchers.agent.signals import signal_process
from orc.launchers.agent.state import FAILURE_GRACE_S, NodeState, StopRequest

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

STARTUP_TIMEOUT_S = 300.0
JOIN_TIMEOUT_S = 120.0  # where no scheduler stands between: the same program starts them all, one after the other


def watch_peers(node: NodeState, now: float, slept: bool) -> None:
    """Stop, or go on without a peer, when a peer has failed, was cut off or is silent; *slept*: so was this process."""
    gone = node.link.gone() if node.link else {}
    for peer in list(node.watch):
        over = node.peer_record(peer, "exit.json")
        # Node 0 stays until all have ended: whoever does not hear of it is cut off, and counted as lost.
        needed = over is None or (node.link is not None and peer == 0)
        if over is not None and over.get("peer_lost") and drop_peer(node, peer, "it was cut off"):
            continue
        if over is not None and over.get("exit_status"):  # its disk had no room for more
            on_peer_stop(node, {"grace_s": min(node.grace_s, FAILURE_GRACE_S), **over})
            return
        if needed and str(peer) in gone:
            if drop_peer(node, peer, gone[str(peer)]):
                continue
            on_lost_peer(node, peer, f"node {peer} is lost: {gone[str(peer)]}")
            return
        beat = node.heartbeat_of(peer)
        if beat is None:
            continue
        last = node.seen.get(peer)
        if last is None or last[0] != beat.get("at") or slept:
            node.seen[peer] = (beat.get("at"), now)
        elif now - last[1] > node.peer_timeout_s and needed:
            how = f"has been silent for {node.peer_timeout_s:g} s"
            if not drop_peer(node, peer, how):
                on_lost_peer(node, peer, f"node {peer} {how}")
                return


def drop_peer(node: NodeState, peer: int, how: str) -> bool:
    """Go on without a lost *peer*, where the launcher re-forms its gang (and does not live on that node)."""
    left = node.nnodes - len(node.lost) - 1
    if not node.ranks or node.node or left < node.min_nodes:
        return False
    path = os.path.join(node.attempt_dir, f"node-{peer}", "lost.json")
    try:
        write_json(path, {"reason": how, "at": time.time()})
    except OSError as error:  # what it says would still count
        node.log(f"cannot write {path}: {error}")
        return False
    node.log(f"node {peer} is lost ({how}); going on with {left} nodes, {node.min_nodes} are enough")
    node.lost.add(peer)
    node.watch.remove(peer)
    # They wait for the lost ranks, for as long as their process group does. When these are gone, their launcher
    # starts them anew, and those of the other nodes see that it wants to meet.
    for record in node.shim_records(running=True).values():
        program = record.get("program") or {}
        if program and process_start(program["pid"]) == program["start"]:
            signal_process(program["pid"], signal.SIGKILL)
    return True


def on_lost_peer(node: NodeState, peer: int, reason: str) -> None:
    """Stop because a peer is lost."""
    lease = read_json(os.path.join(node.attempt_dir, f"node-{peer}", "lease.json")) or {}
    reason += f" (node failure; {lease['host']})" if lease.get("host") else " (node failure)"
    stop = StopRequest(
        "node_failure",
        reason,
        min(node.grace_s, FAILURE_GRACE_S),
        exit_status=1,
        lost=True,
        lost_node=peer,
        announced=bool(node.node) and node.min_nodes < node.nnodes,  # the others may go on without this one
    )
    node.request_stop(stop)


def on_peer_stop(node: NodeState, stop_record: dict[str, Any]) -> None:
    """Stop because another node has stopped."""
    outcome = str(stop_record.get("outcome"))
    if node.calls and outcome == "crash" and (first := first_rank_failure(node)) and not first["told"]:
        on_failure(node, failure_of(node, None))  # the launcher's node saw no more than that it ended
        return
    reason = f"node {stop_record.get('node')} ({stop_record.get('host')}): {stop_record.get('reason')}"
    own = outcome in ("preempted", "cancelled", "timeout")
    node.request_stop(
        StopRequest(
            outcome if own else "peer",
            str(stop_record.get("reason")) if own else f"stopped because of {reason}",
            float(stop_record.get("grace_s") or 0.0),
            forward=bool(stop_record.get("forward", True)),
            exit_status=int(stop_record.get("exit_status") or 1),
            lost=outcome == "node_failure",
            lost_node=stop_record.get("lost_node"),
            announced=True,
        )
    )


def start_timed_out(node: NodeState, peer: int) -> bool:
    """Return whether a stop has been requested, also because the start of *peer* has taken too long."""
    limit = float(node.config.startup_timeout_s or (JOIN_TIMEOUT_S if node.linked else STARTUP_TIMEOUT_S))
    if peer not in node.seen and time.monotonic() - node.begun > limit:
        alternative = " or cannot reach this one" if node.linked else ""
        on_lost_peer(node, peer, f"node {peer} did not start within {limit:g} s{alternative}")
    return node.stop is not None


def is_ready(node: NodeState, peer: int) -> bool:
    """Return whether *peer* has finished its setup."""
    beat = node.peer_record(peer, "heartbeat.json")
    if beat is None:
        start_timed_out(node, peer)
    return beat is not None and beat.get("state") != "setup"
