"""Verdict on an attempt from two sources: Slurm's view of the job and the agents' records. Pure.

The agents know which rank failed first and why; Slurm knows what happens to nodes and queues. The records win for what
the program did, Slurm wins for what Slurm did (node failure, preemption, time limit, cancellation), and nothing is
called a failure while either of them may still change its mind.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from orc.launchers.attempts.records import AttemptExit
from orc.launchers.backends.base import Cause, Observation, Phase
from orc.launchers.backends.slurm.queue_rows import JobRow

# A job without any trace is called lost only this long after its submission or its agents' last sign, in seconds:
# accounting lags.
LOST_AFTER_S = 120.0
# Agents show every two seconds that they live; after this long without they do not.
ALIVE_S = 60.0
# How long after the last exit record Slurm usually needs to end the job, in seconds; longer, and something is stuck.
SETTLED_S = 10.0
# How much the clocks of nodes and controller may differ, in seconds.
CLOCK_SKEW_S = 2.0

_SLURM_CAUSES = {
    "TIMEOUT": Cause.TIMEOUT,
    "DEADLINE": Cause.TIMEOUT,
    "CANCELLED": Cause.CANCELLED,
    "REVOKED": Cause.CANCELLED,
    "NODE_FAIL": Cause.NODE_FAILURE,
    "BOOT_FAIL": Cause.NODE_FAILURE,
    "PREEMPTED": Cause.PREEMPTED,
    "OUT_OF_MEMORY": Cause.CRASH,
}
_SLURM_WORDS = {
    "TIMEOUT": "Slurm's time limit was reached",
    "DEADLINE": "Slurm's deadline was reached",
    "CANCELLED": "cancelled in Slurm",
    "REVOKED": "revoked in Slurm",
    "NODE_FAIL": "a node failed",
    "BOOT_FAIL": "a node did not boot",
    "PREEMPTED": "preempted by Slurm",
    "OUT_OF_MEMORY": "out of memory",
}
# Reasons for waiting that do not go away by themselves.
_HOPELESS = {
    "PartitionNodeLimit": "the partition allows fewer nodes or less per node",
    "PartitionTimeLimit": "the partition allows less time",
    "PartitionConfig": "the partition can never run this",
    "BadConstraints": "no node has what `constraint` asks for",
    "DependencyNeverSatisfied": "the dependency can never be satisfied",
    "AccountNotAllowed": "the partition does not allow this account",
    "QOSNotAllowed": "the partition does not allow this QOS",
    "JobHeldUser": "held; `scontrol release` lets it start",
    "JobHeldAdmin": "held by an administrator",
    "launch_failed_requeued_held": "held after failing to start; `scontrol release` lets it start",
    "AssocMaxWallDurationPerJobLimit": "the account allows less time",
    "QOSMaxWallDurationPerJobLimit": "the QOS allows less time",
    "QOSMaxNodePerJobLimit": "the QOS allows fewer nodes",
    "QOSMaxCpuPerJobLimit": "the QOS allows fewer cores",
}


@dataclass(frozen=True)
class AgentEvidence:
    """Agents' side of an attempt, from its directory."""

    exit: AttemptExit | None = None  # of the newest restart
    restarts: int = 0
    hosts: tuple[str, ...] = ()
    started_at: float | None = None
    progress: Mapping[str, Any] = field(default_factory=dict)
    seen: bool = False  # an agent has been there at all
    silent: tuple[str, ...] = ()  # nodes that started and left no exit record
    last_sign: float | None = None  # when an agent last showed that it lives
    cancelled: bool = False  # orc was asked to cancel it


def judge(
    row: JobRow | None,
    evidence: AgentEvidence,
    *,
    submitted_at: float,
    now: float,
    lead_s: float,
    asked_everyone: bool,
    where: str = "",
    lost_after_s: float = LOST_AFTER_S,
) -> Observation:
    """Return the observation of one attempt.

    Parameters
    ----------
    row:
        The job in squeue, else its end in sacct, else `None`.
    lead_s:
        A preemption notice this close (in seconds) to the end of Slurm's time limit was about the limit.
    asked_everyone:
        False when accounting should have been asked and could not be: then "not there" proves nothing.
    where:
        The directory to look at, for messages.
    lost_after_s:
        So long after its last sign a job that Slurm does not know may still come back.
    """
    if _is_final(evidence, now) and not (row is not None and row.ended):
        return _observation(Phase.SUCCEEDED, evidence, None)
    if row is not None and row.waiting:
        runs = evidence.restarts + 1 if evidence.seen else 0
        return _observation(Phase.PENDING, replace(evidence, restarts=runs), row, reason=waiting_reason(row))
    if row is not None and not row.ended:
        reason = "" if row.state in ("RUNNING", "COMPLETING") else row.state.lower().replace("_", " ")
        return _observation(Phase.RUNNING, evidence, row, reason=reason)
    if row is None and evidence.cancelled and not evidence.seen:
        # The batch script ends at once where it finds the request, so nothing will ever run.
        return _observation(Phase.CANCELLED, evidence, None, cause=Cause.CANCELLED, reason="cancelled")
    if row is None and (evidence.exit is None or not evidence.exit.complete):
        sign = evidence.last_sign or 0.0
        if evidence.seen and now - sign < ALIVE_S:
            return _observation(
                Phase.RUNNING, evidence, None, reason="Slurm does not know the job; its agents are alive"
            )
        if not asked_everyone or now - max(submitted_at, sign) < lost_after_s:
            return _observation(Phase.UNKNOWN, evidence, None, reason="Slurm does not know the job (yet)")
        if evidence.exit is None:
            reason = f"Slurm has forgotten the job; no exit record in {where}"
            return _observation(Phase.LOST, evidence, None, cause=Cause.NODE_FAILURE, reason=reason)
    return _ended(row, _current(row, evidence), lead_s, where)


def _is_final(evidence: AgentEvidence, now: float) -> bool:
    """Return whether every node has recorded success: Slurm may not have noticed yet, and a restart changes nothing."""
    record = evidence.exit
    return record is not None and record.succeeded and record.complete and now - (record.ended_at or now) > SETTLED_S


def _current(row: JobRow | None, evidence: AgentEvidence) -> AgentEvidence:
    """Return the evidence without records of an earlier run of the same, requeued job."""
    record = evidence.exit
    if row is None or row.started_at is None or record is None or record.ended_at is None:
        return evidence
    if record.succeeded and record.complete:  # the agents of a later run find that, and do nothing
        return evidence
    if record.ended_at > row.started_at - CLOCK_SKEW_S:
        return evidence
    return replace(evidence, exit=None, seen=False, silent=())


def waiting_reason(row: JobRow) -> str:
    """Return Slurm's reason for a pending job, and its meaning when waiting will not help."""
    name = row.reason.strip("()")
    text = _HOPELESS.get(name)
    if text is None and name.startswith(("ReqNodeNotAvail", "Nodes_required_for_job", "Nodes required for job")):
        text = "nodes it asks for are down, drained or reserved"
    state = "" if row.state == "PENDING" else row.state.lower().replace("_", " ")
    if text:
        return f"{name}: {text}; it may wait for ever" if name in _HOPELESS else f"{name}: {text}"
    return name or state


def _ended(row: JobRow | None, evidence: AgentEvidence, lead_s: float, where: str) -> Observation:
    record = evidence.exit
    # A node without a record was cut off, unless Slurm itself says that all went well.
    whole = record is not None and (record.complete or (row is not None and row.state == "COMPLETED"))
    if record is not None and record.succeeded and whole:
        return _observation(Phase.SUCCEEDED, evidence, row)
    if evidence.cancelled and not (record is not None and whole and record.cause in (Cause.CRASH, Cause.LAUNCH)):
        reason = record.reason if record is not None and record.cause is Cause.CANCELLED else "cancelled"
        return _observation(Phase.CANCELLED, evidence, row, cause=Cause.CANCELLED, reason=reason)
    if row is None:
        return _from_record(record, evidence, None, lead_s)
    if row.state == "COMPLETED" and record is None:
        return _observation(Phase.SUCCEEDED, evidence, row, reason=f"no exit record in {where}")
    if row.state in _SLURM_CAUSES:
        program = record is not None and whole and record.cause in (Cause.CRASH, Cause.LAUNCH)
        # What the program did before Slurm stepped in counts, except where its end was bound to follow from that.
        if not (program and row.state in ("TIMEOUT", "DEADLINE", "CANCELLED")) and not (
            record is not None and record.cause in (Cause.CANCELLED, Cause.TIMEOUT)
        ):
            return _from_state(row, evidence)
    if record is None:
        return _without_record(row, evidence, where)
    return _from_record(record, evidence, row, lead_s)


def _from_state(row: JobRow, evidence: AgentEvidence) -> Observation:
    cause = _SLURM_CAUSES[row.state]
    words = _SLURM_WORDS[row.state]
    if row.state == "NODE_FAIL":
        failed = row.failed_node or ", ".join(evidence.silent)
        words = f"NODE_FAIL: {failed} failed" if failed else f"NODE_FAIL: {words} (one of {', '.join(row.nodes)})"
    elif row.state == "CANCELLED" and row.reason.strip("()") == "DependencyNeverSatisfied":
        words = f"never started: {_HOPELESS['DependencyNeverSatisfied']}"
    elif row.state == "CANCELLED" and row.by:
        words += f" by user {row.by}"
    phase = Phase.CANCELLED if cause is Cause.CANCELLED else Phase.FAILED
    return _observation(phase, evidence, row, cause=cause, reason=words)


def _without_record(row: JobRow, evidence: AgentEvidence, where: str) -> Observation:
    """Return the observation of a job that is FAILED without any agent's record."""
    code = f"exit code {row.exit_code}" if row.exit_code else "a failure"
    if evidence.seen:
        who = "agent on" if len(evidence.silent) < 2 else "agents on"
        reason = (
            f"the {who} {', '.join(evidence.silent) or 'a node'} left no exit record; Slurm says {row.state} ({code})"
        )
        return _observation(Phase.FAILED, evidence, row, cause=Cause.NODE_FAILURE, reason=reason)
    reason = f"the batch script ended with {code} before an agent started; see {where}/logs/launcher.log"
    return _observation(Phase.FAILED, evidence, row, cause=Cause.LAUNCH, reason=reason)


def _from_record(record: AttemptExit | None, evidence: AgentEvidence, row: JobRow | None, lead_s: float) -> Observation:
    assert record is not None
    if record.cause is Cause.CANCELLED:
        return _observation(Phase.CANCELLED, evidence, row, cause=Cause.CANCELLED, reason=record.reason)
    cause, reason = record.cause or Cause.NODE_FAILURE, record.reason
    # The ranks that lose their peer crash before anybody notices that its node is gone, or srun ends their agents with
    # the signal of a preemption; had Slurm preempted the job, it would say so.
    follows = cause is Cause.CRASH or (cause is Cause.PREEMPTED and row is not None and row.state == "FAILED")
    if record.succeeded or (follows and not record.complete and evidence.silent):
        cause = Cause.NODE_FAILURE
        reason = "; ".join(filter(None, (f"no exit record from {', '.join(evidence.silent) or 'a node'}", reason)))
    elif cause is Cause.PREEMPTED and row is not None and _near_limit(row, record, lead_s):
        cause, reason = Cause.TIMEOUT, "Slurm's time limit was near; the ranks were told to save and end"
    return _observation(Phase.FAILED, evidence, row, cause=cause, reason=reason)


def _near_limit(row: JobRow, record: AttemptExit, lead_s: float) -> bool:
    ended = record.ended_at or row.ended_at
    if row.started_at is None or row.limit_s is None or ended is None:
        return False
    return row.started_at + row.limit_s - ended <= lead_s


def _observation(
    phase: Phase, evidence: AgentEvidence, row: JobRow | None, *, cause: Cause | None = None, reason: str = ""
) -> Observation:
    record = evidence.exit if phase.ended else None
    blamed = _failed_hosts(row, evidence) if phase.ended and cause is Cause.NODE_FAILURE else ()
    ended_at = None
    if phase.ended:
        ended_at = record.ended_at if record else row.ended_at if row else None
    return Observation(
        phase=phase,
        cause=cause,
        reason=reason,
        exit=record,
        hosts=evidence.hosts or (row.nodes if row else ()),
        started_at=evidence.started_at or (row.started_at if row else None),
        ended_at=ended_at,
        restarts=evidence.restarts,
        progress=evidence.progress,
        failed_hosts=blamed,
    )


def _failed_hosts(row: JobRow | None, evidence: AgentEvidence) -> tuple[str, ...]:
    """Return the nodes to blame for a node failure: Slurm's, else those that other nodes lost.

    Where all have fallen silent, something that they share has ended them (srun, the batch script, the file system).
    """
    if row is not None and row.failed_node:
        return (row.failed_node,)
    if row is not None and row.state in ("NODE_FAIL", "BOOT_FAIL") and len(row.nodes) == 1:
        return row.nodes
    lost = evidence.exit.lost_nodes if evidence.exit else ()
    silent = [evidence.hosts[node] for node in lost if node < len(evidence.hosts)]
    if not silent and len(evidence.silent) < len(evidence.hosts):
        silent = list(evidence.silent)
    # The agents know host names. Where Slurm calls the nodes something else, they are no good to it.
    return tuple(host for host in silent if row is None or not row.nodes or host in row.nodes)
