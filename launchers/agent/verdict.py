"""Verdict of a node: the outcome that goes into its exit record."""

from __future__ import annotations

from orc.launchers.agent.errors import EXIT_PREEMPTED
from orc.launchers.agent.processes import describe_exit
from orc.launchers.agent.state import NodeState
from orc.launchers.agent.stop import StopRequest

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


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
