"""Verdict on an attempt from two sources: Slurm's view of the job and the agents' records. Pure.

The agents know which rank failed first and why; Slurm knows what happens to nodes and queues. The records win for what
the program did, Slurm wins for what Slurm did (node failure, preemption, time limit, cancellation), and nothing is
called a failure while either of them may still change its mind.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from orc.launchers.backends.base import Cause, Observation, Phase, QueuedJob

if TYPE_CHECKING:
    from orc.launchers.attempts.reader import AttemptRecords
    from orc.launchers.attempts.records import AttemptExit
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

_SLURM_ENDS = {
    "TIMEOUT": (Cause.TIMEOUT, "Slurm's time limit was reached"),
    "DEADLINE": (Cause.TIMEOUT, "Slurm's deadline was reached"),
    "CANCELLED": (Cause.CANCELLED, "cancelled in Slurm"),
    "REVOKED": (Cause.CANCELLED, "revoked in Slurm"),
    "NODE_FAIL": (Cause.NODE_FAILURE, "a node failed"),
    "BOOT_FAIL": (Cause.NODE_FAILURE, "a node did not boot"),
    "PREEMPTED": (Cause.PREEMPTED, "preempted by Slurm"),
    "OUT_OF_MEMORY": (Cause.CRASH, "out of memory"),
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


def judge(
    row: JobRow | None,
    records: AttemptRecords,
    *,
    submitted_at: float,
    now: float,
    lead_s: float,
    asked_everyone: bool,
    lost_after_s: float = LOST_AFTER_S,
) -> Observation:
    """Return the observation of one attempt.

    *row* is the job in squeue, else its end in sacct, else `None`. A preemption notice within *lead_s* of the end of
    Slurm's time limit was about the limit. Without *asked_everyone*, accounting could not be asked, and "not there"
    proves nothing. Until *lost_after_s* after its last sign a job that Slurm does not know may come back.
    """
    if _is_final(records, now) and not (row is not None and row.ended):
        return _observation(Phase.SUCCEEDED, records, None)
    if row is not None and row.waiting:
        seen = _observation(Phase.PENDING, records, row, reason=waiting_reason(row))
        return replace(seen, restarts=records.restart + 1 if records.leases else 0)
    if row is not None and not row.ended:
        reason = "" if row.state in ("RUNNING", "COMPLETING") else row.state.lower().replace("_", " ")
        return _observation(Phase.RUNNING, records, row, reason=reason)
    if row is None and records.cancel is not None and not records.leases:
        # The batch script ends at once where it finds the request, so nothing will ever run.
        return _observation(Phase.CANCELLED, records, None, cause=Cause.CANCELLED, reason="cancelled")
    if row is None and (records.verdict is None or not records.verdict.complete):
        sign = records.last_sign or 0.0
        if records.leases and now - sign < ALIVE_S:
            return _observation(
                Phase.RUNNING, records, None, reason="Slurm does not know the job; its agents are alive"
            )
        if not asked_everyone or now - max(submitted_at, sign) < lost_after_s:
            return _observation(Phase.UNKNOWN, records, None, reason="Slurm does not know the job (yet)")
        if records.verdict is None:
            reason = f"Slurm has forgotten the job; no exit record in {records.directory}"
            return _observation(Phase.LOST, records, None, cause=Cause.NODE_FAILURE, reason=reason)
    return _ended(row, _current(row, records), lead_s)


def _is_final(records: AttemptRecords, now: float) -> bool:
    """Return whether every node has recorded success: Slurm may not have noticed yet, and a restart changes nothing."""
    record = records.verdict
    return record is not None and record.succeeded and record.complete and now - (record.ended_at or now) > SETTLED_S


def _current(row: JobRow | None, records: AttemptRecords) -> AttemptRecords:
    """Return *records* without what an earlier run of the same, requeued job has left."""
    record = records.verdict
    if row is None or row.started_at is None or record is None or record.ended_at is None:
        return records
    if record.succeeded and record.complete:  # the agents of a later run find that, and do nothing
        return records
    if record.ended_at > row.started_at - CLOCK_SKEW_S:
        return records
    return replace(records, leases={}, exits={}, stop=None)


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


def queued_job(marker: str, row: JobRow) -> QueuedJob:
    """Return the report of an attempt that waits or runs."""
    reason = waiting_reason(row) if row.waiting else ""
    starts_at = row.started_at or row.starts_at
    return QueuedJob(marker, row.job_id, row.state, row.partition, row.wanted, reason, starts_at)


def _ended(row: JobRow | None, records: AttemptRecords, lead_s: float) -> Observation:
    record = records.verdict
    # A node without a record was cut off, unless Slurm itself says that all went well.
    whole = record is not None and (record.complete or (row is not None and row.state == "COMPLETED"))
    if record is not None and record.succeeded and whole:
        return _observation(Phase.SUCCEEDED, records, row)
    program = record is not None and whole and record.cause in (Cause.CRASH, Cause.LAUNCH)
    if records.cancel is not None and not program:
        reason = record.reason if record is not None and record.cause is Cause.CANCELLED else "cancelled"
        return _observation(Phase.CANCELLED, records, row, cause=Cause.CANCELLED, reason=reason)
    if row is None:
        return _from_record(record, records, None, lead_s)
    if row.state == "COMPLETED" and record is None:
        return _observation(Phase.SUCCEEDED, records, row, reason=f"no exit record in {records.directory}")
    # What the program did before Slurm stepped in counts, except where its end was bound to follow from that.
    kept = program and row.state in ("TIMEOUT", "DEADLINE", "CANCELLED")
    stopped = record is not None and record.cause in (Cause.CANCELLED, Cause.TIMEOUT)
    if row.state in _SLURM_ENDS and not kept and not stopped:
        return _from_state(row, records)
    if record is None:
        return _without_record(row, records)
    return _from_record(record, records, row, lead_s)


def _from_state(row: JobRow, records: AttemptRecords) -> Observation:
    cause, words = _SLURM_ENDS[row.state]
    if row.state == "NODE_FAIL":
        failed = row.failed_node or ", ".join(records.silent)
        words = f"NODE_FAIL: {failed} failed" if failed else f"NODE_FAIL: {words} (one of {', '.join(row.nodes)})"
    elif row.state == "CANCELLED" and row.reason.strip("()") == "DependencyNeverSatisfied":
        words = f"never started: {_HOPELESS['DependencyNeverSatisfied']}"
    elif row.state == "CANCELLED" and row.by:
        words += f" by user {row.by}"
    phase = Phase.CANCELLED if cause is Cause.CANCELLED else Phase.FAILED
    return _observation(phase, records, row, cause=cause, reason=words)


def _without_record(row: JobRow, records: AttemptRecords) -> Observation:
    """Return the observation of a job that is FAILED without any agent's record."""
    code = f"exit code {row.exit_code}" if row.exit_code else "a failure"
    if records.leases:
        who = "agent on" if len(records.silent) < 2 else "agents on"
        silent = ", ".join(records.silent) or "a node"
        reason = f"the {who} {silent} left no exit record; Slurm says {row.state} ({code})"
        return _observation(Phase.FAILED, records, row, cause=Cause.NODE_FAILURE, reason=reason)
    reason = f"the batch script ended with {code} before an agent started; see {records.directory}/logs/launcher.log"
    return _observation(Phase.FAILED, records, row, cause=Cause.LAUNCH, reason=reason)


def _from_record(record: AttemptExit | None, records: AttemptRecords, row: JobRow | None, lead_s: float) -> Observation:
    assert record is not None
    if record.cause is Cause.CANCELLED:
        return _observation(Phase.CANCELLED, records, row, cause=Cause.CANCELLED, reason=record.reason)
    cause, reason = record.cause or Cause.NODE_FAILURE, record.reason
    # The ranks that lose their peer crash before anybody notices that its node is gone, or srun ends their agents with
    # the signal of a preemption; had Slurm preempted the job, it would say so.
    follows = cause is Cause.CRASH or (cause is Cause.PREEMPTED and row is not None and row.state == "FAILED")
    if record.succeeded or (follows and not record.complete and records.silent):
        cause = Cause.NODE_FAILURE
        reason = "; ".join(filter(None, (f"no exit record from {', '.join(records.silent) or 'a node'}", reason)))
    elif cause is Cause.PREEMPTED and row is not None and _near_limit(row, record, lead_s):
        cause, reason = Cause.TIMEOUT, "Slurm's time limit was near; the ranks were told to save and end"
    return _observation(Phase.FAILED, records, row, cause=cause, reason=reason)


def _near_limit(row: JobRow, record: AttemptExit, lead_s: float) -> bool:
    ended = record.ended_at or row.ended_at
    if row.started_at is None or row.limit_s is None or ended is None:
        return False
    return row.started_at + row.limit_s - ended <= lead_s


def _observation(
    phase: Phase, records: AttemptRecords, row: JobRow | None, *, cause: Cause | None = None, reason: str = ""
) -> Observation:
    record = records.verdict if phase.ended else None
    told_by = record or row  # the agents, or Slurm
    end = told_by.ended_at if told_by and phase.ended else None
    return Observation(
        phase,
        cause,
        reason,
        exit=record,
        hosts=records.hosts or (row.nodes if row else ()),
        started_at=records.started_at or (row.started_at if row else None),
        ended_at=end,
        restarts=records.restart,
        failed_hosts=_failed_hosts(row, records) if phase.ended and cause is Cause.NODE_FAILURE else (),
        progress=records.progress,
    )


def _failed_hosts(row: JobRow | None, records: AttemptRecords) -> tuple[str, ...]:
    """Return the nodes to blame for a node failure: Slurm's, else those that other nodes lost.

    Where all have fallen silent, something that they share has ended them (srun, the batch script, the file system).
    """
    if row is not None and row.failed_node:
        return (row.failed_node,)
    if row is not None and row.state in ("NODE_FAIL", "BOOT_FAIL") and len(row.nodes) == 1:
        return row.nodes
    lost = records.verdict.lost_nodes if records.verdict else ()
    silent = [records.hosts[node] for node in lost if node < len(records.hosts)]
    if not silent and len(records.silent) < len(records.hosts):
        silent = list(records.silent)
    # The agents know host names. Where Slurm calls the nodes something else, they are no good to it.
    return tuple(host for host in silent if row is None or not row.nodes or host in row.nodes)
