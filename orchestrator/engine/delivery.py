"""Delivery of an attempt to its backend: staged, announced in the ledger, sent, and written down as what came of it.

Where its hosts turn out to be in use or away, others are tried.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING

from orc.launchers.errors import AmbiguousSubmit, BackendUnreachable, LaunchError, NoRoom
from orc.launchers.secrets import redact
from orc.orchestrator.engine import submission_steps as steps
from orc.orchestrator.engine.fault_points import fault_point
from orc.orchestrator.engine.placement import PlacementPlanner, PreparedAttempt, Progress
from orc.orchestrator.engine.updates import JobUpdate
from orc.orchestrator.engine.writing import apply
from orc.orchestrator.ledger.errors import Conflict, LedgerError
from orc.orchestrator.ledger.lifecycle import AttemptState, Event, JobState, Kind
from orc.orchestrator.ledger.records import JobRecord
from orc.orchestrator.workspace import Workspace

if TYPE_CHECKING:
    from orc.launchers.backends.base import Backend, Snapshot
    from orc.launchers.plan import Plan


def send(
    ws: Workspace,
    planner: PlacementPlanner,
    prepared: PreparedAttempt,
    secrets: Mapping[str, str],
    *,
    progress: Progress,
    patient: bool = False,
) -> JobRecord:
    """`deliver`, again on other hosts when a host turns out to be in use or away; the job as it is afterwards.

    Where it is one of the job's hosts that is away, and no others will do, the job waits for it; with *patient* that
    is raised nevertheless.
    """
    while True:
        job, placement = prepared.job, prepared.placement
        plain = partial(planner.render, None) if placement and placement.avoid else None
        try:
            return deliver(
                ws, job, prepared.plan, planner.snapshot, secrets, progress=progress, patient=patient, plain=plain
            )
        except NoRoom as error:
            found = planner.exclude_host(placement, error)
        except BackendUnreachable as error:
            found = planner.exclude_host(placement, error)
            if not found:
                if placement is None or error.host not in placement.hosts:
                    raise
                return _wait_for_host(ws, job, error, patient)
        except _StagingFailed as refusal:
            found = planner.exclude_host(placement, refusal.error)
            if not found:
                refused = steps.reject(ws, job, redact(refusal.error.what, secrets.values()))
                if patient:
                    return refused
                raise refusal.error from None
        job = ws.ledger.jobs([job.id])[0]
        if not found or job.state is not JobState.PREPARED or job.claim_owner != ws.owner:
            return job
        try:
            prepared = planner.prepare(job)
        except NoRoom as error:
            return steps.wait_for_room(ws, job, planner.waiting_reason(error))
        except BackendUnreachable as error:
            return _wait_for_host(ws, job, error, patient)
        except Conflict:  # somebody asked to cancel it just now; the next pass sees that
            return ws.ledger.jobs([job.id])[0]


def _wait_for_host(ws: Workspace, job: JobRecord, error: BackendUnreachable, patient: bool) -> JobRecord:
    """There is no way around a host that is away. While the job waits for it, others may use the rest."""
    waiting = steps.wait_for_room(ws, job, waiting_for_host(error, job.cluster))
    if patient:
        raise error
    return waiting


def waiting_for_host(error: BackendUnreachable, cluster: str) -> str:
    """Return the reason of a job that waits for a host."""
    return f"waiting for {error.host or error.where or cluster}: {error.what}"


class _StagingFailed(Exception):
    """A host cannot take the snapshot (its disk is full, its directory is not ours): others may."""

    def __init__(self, error: LaunchError) -> None:
        super().__init__(error.what)
        self.error = error


def _stage(backend: Backend, snapshot: Snapshot, plan: Plan) -> None:
    try:
        backend.stage(snapshot, plan)
    except BackendUnreachable:
        raise
    except LaunchError as error:
        if not error.host:
            raise
        raise _StagingFailed(error) from error


def deliver(
    ws: Workspace,
    job: JobRecord,
    plan: Plan,
    snapshot: Snapshot,
    secrets: Mapping[str, str],
    *,
    progress: Progress,
    patient: bool = False,
    plain: Callable[[], Plan] | None = None,
) -> JobRecord:
    """Bring a PREPARED attempt, which the caller has claimed, to its backend; the job as it is afterwards.

    An unreachable backend and hosts in use are raised and leave the attempt PREPARED, to be tried again. A refusal is
    the end of the job, and is raised unless *patient*. *plain* makes a plan that keeps away from no host; it is sent
    instead when the backend refuses *plan*.
    """
    backend = ws.backend_of_user(job.cluster, job.owner)
    try:
        progress("stage", {})
        _stage(backend, snapshot, plan)
        fault_point("staged")
        progress("submit", {})
        begun = steps.begin(ws, job, plan)
        if begun.attempt is None or begun.attempt.state is not AttemptState.SUBMITTING:
            return begun
        fault_point("submitting")
        handle = backend.submit(plan, secrets)
    except LedgerError:
        raise  # says nothing about the backend; what was durable stays true
    except NoRoom as error:
        steps.release_hosts(ws, job, redact(error.what, secrets.values()), error.holders)
        raise
    except AmbiguousSubmit as error:
        return steps.mark_ambiguous(ws, job, redact(error.what, secrets.values()))
    except BackendUnreachable as error:
        steps.release_attempt(ws, job, redact(error.what, secrets.values()))
        raise
    except LaunchError as error:
        if plain is not None:
            waiting_reason = f"refused without the hosts that failed before: {redact(error.what, secrets.values())}"
            job = steps.release_attempt(ws, job, waiting_reason)
            if job.state is JobState.PREPARED:
                return deliver(ws, job, plain(), snapshot, secrets, progress=progress, patient=patient)
        refused = steps.reject(ws, job, redact(error.what, secrets.values()))
        if patient:
            return refused
        raise
    fault_point("submitted")
    job = steps.accept(ws, begun, handle)
    fault_point("handle-stored")
    if job.cancel_requested_at is not None and job.state in (JobState.PENDING, JobState.RUNNING):
        job = send_cancel(ws, job)
    return job


def send_cancel(ws: Workspace, job: JobRecord) -> JobRecord:
    """Pass a durable request to cancel on to the backend, and remember that it was passed on."""
    from orc.launchers.backends.base import Handle

    assert job.attempt is not None
    assert job.attempt.handle is not None
    backend = ws.backend_of_attempt(job.cluster, job.owner, job.attempt)
    backend.cancel([Handle.from_dict(job.attempt.handle)], timedelta(seconds=job.cancel_grace_s or 0.0))
    return apply(
        ws,
        job,
        lambda now: now.attempt is not None and now.attempt.state in (AttemptState.PENDING, AttemptState.RUNNING),
        lambda _, at: JobUpdate((Event(Kind.CANCEL_SENT, job.number),), {}, {"cancel_sent_at": at}),
    )
