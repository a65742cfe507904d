"""Exactly-once submission: the intent is durable before the side effect, and a cut-off is resolved by looking.

The steps, each durable before the next begins (docs/explanation/exactly-once.md):

1. PREPARED: job, attempt and marker. From here on the job will run, whoever has to finish the work.
2. The preflight, which may find that it cannot: then it is FAILED.
3. The snapshot is staged; doing that twice is harmless.
4. SUBMITTING: from here on nobody knows whether the backend has the job until it is looked for by its marker.
5. `Backend.submit`, outside any transaction.
6. PENDING, with the handle.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from orc.launchers.errors import LaunchError, NoRoom, SpecError
from orc.launchers.ids import AttemptId
from orc.launchers.secrets import redact, resolve_secrets
from orc.orchestrator.engine import claims, delivery, job_files, job_secrets
from orc.orchestrator.engine import submission_steps as steps
from orc.orchestrator.engine.admission import Admission
from orc.orchestrator.engine.deadlines import deadline_at
from orc.orchestrator.engine.fault_points import fault_point
from orc.orchestrator.engine.placement import PlacementPlanner, PreparedAttempt, Progress
from orc.orchestrator.ledger.errors import Conflict, LedgerError
from orc.orchestrator.ledger.lifecycle import Event, Kind
from orc.orchestrator.ledger.records import JobRecord, NewJob
from orc.orchestrator.workspace import Workspace

if TYPE_CHECKING:
    from orc.launchers.backends.base import Placement, Snapshot
    from orc.launchers.plan import Plan
    from orc.launchers.spec import JobSpec
    from orc.orchestrator.ledger.transaction import Transaction

_UNCLAIMED = {"claim_owner": None, "claim_expires_at": None}


def silent(_stage: str, _data: Mapping[str, Any]) -> None:
    """Show no progress."""


def start(
    ws: Workspace,
    job: JobSpec,
    snapshot: Snapshot,
    *,
    source: str,
    progress: Progress = silent,
    given: Mapping[str, str] | None = None,
) -> JobRecord:
    """Submit a new job made from *job* and *snapshot*, which is in the local store; *given* are values of its secrets.

    Raises `LaunchError` when the job certainly does not run. What no cluster has to be asked for leaves no record; from
    the preflight on, the job is in the ledger as FAILED then. A submission that was cut off raises nothing: the job
    will be found or sent. Where there is no room for it, the job is QUEUED, and passes send it once there is.
    """
    ws.backend(job.cluster)  # one that is not configured is the cheapest mistake
    if job.sweep is not None or job.array is not None:
        raise SpecError("describes several jobs, and one is submitted", where=job.name, hint="submit it as a group")
    secrets = resolve_secrets(job.secrets, {**os.environ, **(given or {})})
    attempt = AttemptId(ws.new_job_id(job.name), 1)
    planner = PlacementPlanner(ws, job, snapshot, attempt, progress=progress)
    new = new_job(ws, job, snapshot, attempt, source)
    with job_secrets.until_recorded(ws, new.id):
        prepared = _record(ws, new, planner, secrets)
    fault_point("prepared")
    recorded = prepared.job if isinstance(prepared, PreparedAttempt) else prepared
    job_files.keep(ws.state_dir, new, recorded.created_at)
    ws.on_live_job()
    if not isinstance(prepared, PreparedAttempt):
        return prepared
    try:
        record = _examine_and_send(ws, planner, prepared, secrets, progress)
        ws.give_back(new.id)
    except LedgerError as error:
        with suppress(LedgerError):
            ws.give_back(new.id)  # the next pass goes on with it
        # Too late to undo: the intent is durable, and whoever submits again would have two jobs.
        raise LedgerError(
            f"{error.what}; the job {new.id} is recorded, and runs or will run",
            where=error.where,
            hint="; then ".join(filter(None, [error.hint, f"`orc status {new.id}`; do not submit it again"])),
        ) from error
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            steps.abandon(ws, prepared.job)
        elif isinstance(error, LaunchError):
            steps.reject(ws, prepared.job, redact(error.what, secrets.values()))
        ws.give_back(new.id)
        raise
    fault_point("claim-released")
    return record


def new_job(ws: Workspace, job: JobSpec, snapshot: Snapshot, attempt: AttemptId, source: str) -> NewJob:
    """Return the row of a job that is submitted."""
    return NewJob(
        id=attempt.job,
        name=job.name,
        cluster=job.cluster,
        backend=ws.backend(job.cluster).kind,
        source=source,
        spec=ws.subscribed(job).model_dump(mode="json"),
        digests=snapshot.digests,
        tags=job.tags,
        origin=ws.origin,
        owner=ws.user,
        project=job.project or "",
        priority=job.priority,
        deadline_at=deadline_at(job.deadline, ws.clock()),
    )


def _examine_and_send(
    ws: Workspace, planner: PlacementPlanner, prepared: PreparedAttempt, secrets: Mapping[str, str], progress: Progress
) -> JobRecord:
    """Return the preflight, on other hosts where it finds bad ones, then `send`."""
    try:
        prepared = planner.examine(prepared)
    except NoRoom as error:
        return steps.wait_for_room(ws, prepared.job, planner.waiting_reason(error))
    except Conflict:  # somebody asked to cancel it just now; the next pass sees that
        return ws.ledger.jobs([prepared.job.id])[0]
    fault_point("examined")
    return delivery.send(ws, planner, prepared, secrets, progress=progress)


def _record(
    ws: Workspace, new: NewJob, planner: PlacementPlanner, secrets: Mapping[str, str]
) -> PreparedAttempt | JobRecord:
    """Make the job durable: with its first attempt, or without one while there is no room."""
    marker = planner.attempt.marker
    while True:
        try:
            plan, placement = planner.choose(examine=False)
        except NoRoom as error:
            planner.render(None)  # what can never be sent is refused now
            fault_point("snapshot-taken")
            job_secrets.keep_for(ws, new.id, secrets)
            fault_point("secrets-kept")
            reason = planner.waiting_reason(error)
            with ws.ledger.transaction() as tx:
                return tx.enqueue(new, reason)
        fault_point("snapshot-taken")
        job_secrets.keep_for(ws, new.id, secrets)
        fault_point("secrets-kept")

        def write(tx: Transaction, plan: Plan = plan, placement: Placement | None = placement) -> JobRecord:
            queued = tx.enqueue(new, owner=ws.owner, claim_expires_at=tx.now + claims.TTL_S)
            if hold := Admission(ws, tx, [queued]).hold(queued):
                waiting = Event(Kind.WAITING, None, {"reason": hold.reason})
                return tx.record(queued, waiting, job_set={"reason": hold.reason, **_UNCLAIMED})
            return tx.prepare(queued, marker, plan.digest, placement)

        try:
            record = planner.commit(placement, write)
        except NoRoom:
            continue  # somebody was faster; the next look says who
        if record is not None:
            return PreparedAttempt(record, plan, placement) if record.attempt else record
