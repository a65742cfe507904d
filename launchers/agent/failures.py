"""First failures: the rank whose end is the reason of an attempt's end, below a launcher too; verdicts of nodes."""

from __future__ import annotations

import os
import time

from orc.launchers.agent.errors import EXIT_LAUNCH, EXIT_PREEMPTED
from orc.launchers.agent.processes import decode_wait_status, describe_exit, shell_exit_status
from orc.launchers.agent.records import log_tail
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
        node.request_stop(StopRequest("launch", reason, 0.0, exit_status=EXIT_LAUNCH))
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
    first = min(records, key=lambda r: r["at"])
    reason = f"rank {first['rank']} asked to be run again (exit code {node.preempt_exit})"
    node.request_stop(StopRequest("preempted", reason, node.grace_s, forward=False, exit_status=EXIT_PREEMPTED))
    return True


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
