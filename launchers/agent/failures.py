"""Reasons why a node's part ends: a rank fails, also below a launcher, a peer fails or falls silent. The verdicts."""

from __future__ import annotations

import os
import signal
import time

from orc.launchers.agent.errors import EXIT_PREEMPTED
from orc.launchers.agent.processes import decode_wait_status, describe_exit, shell_exit_status, signal_process
from orc.launchers.agent.procfs import process_start
from orc.launchers.agent.records import log_tail, read_json, write_json
from orc.launchers.agent.state import FAILURE_GRACE_S, NodeState, Rank, StopRequest

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

EXPLAIN_S = 2.0  # how long a launcher's own failure waits for the node whose rank has failed
CALL_PATIENCE_S = 10.0  # for a launcher that does not notice that a node could not start what it asked for


def on_failure(node: NodeState, failure: dict[str, Any]) -> None:
    """Stop the others because of this first failure."""
    who = f"rank {failure['rank']}" if failure["rank"] is not None else "the launcher"
    reason = f"{who} {describe_exit(failure['exit_code'], failure['signal'])}"
    if failure["stall"]:
        node.answer_stack_requests()  # before the others are told to end
        reason += f"; {failure['stall']}"
    status = shell_exit_status(failure["exit_code"], failure["signal"]) or 1
    grace = min(node.grace_s, FAILURE_GRACE_S)
    node.request_stop(StopRequest("crash", reason, grace, failure=failure, exit_status=status))


def on_service_end(node: NodeState, service: Rank) -> None:
    """Stop because a service has ended before the program: this node cannot do its part any more, or never could.

    The end of the program on node 0 ends the services there, and often what is connected to them elsewhere.
    """
    first = (node.peer_record(0, "heartbeat.json") or {}).get("state")
    if node.follows and (first == "stopping" or node.peer_record(0, "exit.json")):
        return
    how = f"the {service.role} of node {node.node} {describe_exit(*decode_wait_status(service.status or 0))}"
    failure = failure_of(node, service)
    if not node.ranks and first != "running":
        reason = f"{how}\n{failure['log_tail']}".rstrip()
        node.request_stop(StopRequest("launch", reason, 0.0))
        return
    reason, grace = f"{how} (node failure; {node.me['host']})", min(node.grace_s, FAILURE_GRACE_S)
    node.request_stop(StopRequest("node_failure", reason, grace, failure=failure, lost_node=node.node))


def failure_of(node: NodeState, rank: Rank | None) -> dict[str, Any]:
    """The first failure among the ranks of this node, given the process that has ended, if it was the agent's."""
    if rank is None:
        rank = node.ranks[0] if node.ranks else Rank(None, None, 0, "", 0)
    code, name = decode_wait_status(rank.status or 0)
    number, local_rank, at, log, start = rank.rank, rank.local_rank, rank.at, rank.log, rank.log_start
    if rank.rank is None and (first := first_rank_failure(node)):
        number, local_rank, at = first["rank"], first["local_rank"], first["at"]
        code, name = first["exit_code"], first["signal"]
        log, start = os.path.join(node.logs, f"rank-{number}.log"), first.get("log_start", 0)
    return {
        "rank": number,
        "local_rank": local_rank,
        "node": node.node,
        "host": node.me["host"],
        "exit_code": code,
        "signal": name,
        "at": at,
        "log_tail": log_tail(log, start, list(node.secrets.values())),
        "stall": node.stall(number),
    }


def first_rank_failure(node: NodeState) -> dict[str, Any] | None:
    """The earliest failure that the shims have seen in the launcher's last round.

    A launcher tells the others to end after the first failure, so the end of one that was told counts last.
    """
    failed = [r for r in node.shim_records().values() if r["exit_code"] != 0]
    last = max((r["round"] for r in failed), default=0)
    failed = [r for r in failed if r["round"] == last]
    return min(failed, key=lambda r: (bool(r["told"]), r["at"]), default=None)


def started_again(node: NodeState, failure: dict[str, Any]) -> bool:
    """Return whether the launcher has started ranks after that failure."""
    running = node.shim_records(running=True).values()
    # A launcher that re-forms its gang without the ranks of a lost node stays in its round. With the others, a rank
    # that began later is one that was slow to start.
    stays = node.min_nodes < node.nnodes
    return any(r["round"] > failure["round"] or (stays and r.get("began", 0.0) > failure["at"]) for r in running)


def launcher_preempted(node: NodeState) -> bool:
    """Return whether a rank of the launcher has left with the exit code of a preemption, and request a stop then."""
    records = [r for r in node.shim_records().values() if r["exit_code"] == node.preempt_exit]
    if not records:
        return False
    on_preempted(node, min(records, key=lambda r: r["at"])["rank"])
    return True


def on_preempted(node: NodeState, rank: int) -> None:
    """Stop because a rank has left with the exit code of a preemption."""
    reason = f"rank {rank} asked to be run again (exit code {node.preempt_exit})"
    node.request_stop(StopRequest("preempted", reason, node.grace_s, forward=False))


def check_rank_records(node: NodeState) -> None:
    """Judge by the ranks' own records: some launchers exit with 0 although a rank has failed."""
    first = first_rank_failure(node)
    if first is not None and not started_again(node, first) and not launcher_preempted(node):
        on_failure(node, failure_of(node, None))


def check_launcher(node: NodeState) -> None:
    """Cut short a launcher that waits for ranks which hang because another one has failed."""
    if node.stop or node.unexplained or not (node.calls or any(rank.rank is None for rank in node.ranks)):
        return
    first = first_rank_failure(node)
    if first is not None and node.calls and not first["told"]:  # such launchers do not start ranks again
        if not launcher_preempted(node):
            on_failure(node, failure_of(node, None))
        return
    if node.calls and (failure := node.calls.failure(CALL_PATIENCE_S)):
        reason = f"node {node.node} could not start what the launcher asked for (exit status {failure['exit_code']})"
        node.request_stop(StopRequest("crash", reason, 0.0, failure=failure, exit_status=failure["exit_code"]))
        return
    settle = float(node.config.command.get("settle_s") or FAILURE_GRACE_S)
    if first is None or time.time() - first["at"] < settle:
        return
    if not started_again(node, first) and not launcher_preempted(node):
        on_failure(node, failure_of(node, None))


def verdict(node: NodeState, stop: StopRequest) -> dict[str, Any]:
    """Return the verdict to record, given why the ranks were stopped and how they ended."""
    records = node.rank_records()
    codes = [record["exit_code"] for record in records.values()]
    clean = bool(codes) and len(codes) == node.local_ranks and all(code in (0, node.preempt_exit) for code in codes)
    if stop.outcome == "preempted":
        if clean and not any(codes):
            return make_verdict("succeeded", "", 0)
        reason = stop.reason
        if node.ranks and not clean:
            bad = next(
                (f"rank {r} {describe_exit(v['exit_code'], v['signal'])}" for r, v in records.items()
                 if v["exit_code"] not in (0, node.preempt_exit)),
                "not all ranks reported",
            )  # fmt: skip
            reason += f"; not saved: {bad}"
        return make_verdict("preempted", reason, EXIT_PREEMPTED)
    ending = make_verdict(stop.outcome, stop.reason, stop.exit_status)
    if stop.outcome == "node_failure":
        ending.update(outcome="peer")
    if stop.lost:
        ending["peer_lost"] = True
    if stop.lost_node is not None:
        ending["lost_node"] = stop.lost_node
    if stop.failure:
        ending["first_failure"] = stop.failure
    return ending


def make_verdict(outcome: str, reason: str, exit_status: int) -> dict[str, Any]:
    """Return the verdict part of an exit record."""
    return {"outcome": outcome, "reason": reason, "exit_status": exit_status, "first_failure": None}


STARTUP_TIMEOUT_S = 300.0
JOIN_TIMEOUT_S = 120.0  # where no scheduler stands between: the same program starts them all, one after the other


def watch_peers(node: NodeState, now: float, slept: bool) -> None:
    """Stop, or go on without a peer, when a peer has failed, was cut off or is silent; *slept*: so was this process."""
    gone = node.link.gone() if node.link else {}
    for peer in list(node.watch):
        over = node.peer_record(peer, "exit.json")
        # Node 0 stays until all nodes have ended: a node that does not hear of it is cut off, and counted as lost.
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
