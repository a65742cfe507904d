"""Delivery of attempts to their backend: staged, announced in the ledger, sent, and written down as what came of it.

Where the hosts of one turn out to be in use or away, others are tried.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING

from orc.launchers.errors import AmbiguousSubmit, BackendUnreachable, LaunchError, NoRoom
from orc.launchers.secrets import redact
from orc.orchestrator.engine import submission_steps as steps
from orc.orchestrator.engine.fault_points import fault_point
from orc.orchestrator.engine.placement import PlacementPlanner, PreparedAttempt
from orc.orchestrator.engine.progress import Progress, silent
from orc.orchestrator.engine.writing import apply
from orc.orchestrator.ledger.errors import Conflict, LedgerError
from orc.orchestrator.ledger.lifecycle import AttemptState, Event, JobState, Kind
from orc.orchestrator.ledger.records import JobRecord, JobUpdate
from orc.orchestrator.workspace import Workspace

if TYPE_CHECKING:
    from orc.launchers.backends.base import Backend, Handle, Snapshot
    from orc.launchers.plan import Plan


class Rejected(Exception):
    """Jobs have ended because they certainly cannot run; *error* says why."""

    def __init__(self, error: LaunchError) -> None:
        super().__init__(error.what)
        self.error = error


class HostAway(Exception):
    """A job waits, without its hosts, for one of them that is away, as no others will do."""

    def __init__(self, error: BackendUnreachable) -> None:
        super().__init__(error.what)
        self.error = error


def send(ws: Workspace, planner: PlacementPlanner, prepared: PreparedAttempt, secrets: Mapping[str, str]) -> None:
    """`deliver`, again on other hosts when a host turns out to be in use or away.

    Raises `HostAway` where none will do, and what `deliver` raises.
    """
    while True:
        job, placement = prepared.job, prepared.placement
        plain = planner.render if placement and placement.avoid else None
        try:
            deliver(ws, [prepared], planner.snapshot, secrets, progress=planner.progress, plain=plain)
            return
        except NoRoom as error:
            found = planner.exclude_host(placement, error)
        except BackendUnreachable as error:
            found = planner.exclude_host(placement, error)
            if not found:
                if placement is None or error.host not in placement.hosts:
                    raise
                raise _wait_for_host(ws, job, error) from error
        except _StagingFailed as refusal:
            found = planner.exclude_host(placement, refusal.error)
            if not found:
                steps.reject(ws, job, redact(refusal.error.what, secrets.values()))
                raise Rejected(refusal.error) from None
        job = ws.ledger.jobs([job.id])[0]
        if not found or job.state is not JobState.PREPARED or job.claim_owner != ws.owner:
            return
        try:
            prepared = planner.prepare(job)
        except NoRoom as error:
            steps.wait_for_room(ws, job, planner.waiting_reason(error))
            return
        except BackendUnreachable as error:
            raise _wait_for_host(ws, job, error) from error
        except Conflict:  # it was cancelled just now; the next pass sees that
            return


def _wait_for_host(ws: Workspace, job: JobRecord, error: BackendUnreachable) -> HostAway:
    """There is no way around a host that is away. While the job waits for it, others may use the rest."""
    steps.wait_for_room(ws, job, waiting_for_host(error, job.cluster))
    return HostAway(error)


def waiting_for_host(error: BackendUnreachable, cluster: str) -> str:
    """Return the reason of a job that waits for a host."""
    return f"waiting for {error.host or error.where or cluster}: {error.what}"


class _StagingFailed(Exception):
    """A host cannot take the snapshot (its disk is full, its directory is not ours): others may."""

    def __init__(self, error: LaunchError) -> None:
        super().__init__(error.what)
        self.error = error


def _stage(backend: Backend, snapshot: Snapshot, attempt: PreparedAttempt) -> None:
    try:
        backend.stage(snapshot, attempt.plan)
    except BackendUnreachable:
        raise
    except LaunchError as error:
        if not error.host or attempt.placement is None:
            raise
        raise _StagingFailed(error) from error


def _submit(backend: Backend, plans: Sequence[Plan], secrets: Mapping[str, str], at_once: int | None) -> list[Handle]:
    """Return the handles of *plans*, which are one array where there are several."""
    from orc.launchers.backends.base import SupportsArrays

    if len(plans) == 1:
        return [backend.submit(plans[0], secrets)]
    if not isinstance(backend, SupportsArrays):
        raise TypeError(f"{backend.kind} has no arrays")
    return backend.submit_array(plans, secrets, at_once=at_once)


def deliver(
    ws: Workspace,
    attempts: Sequence[PreparedAttempt],
    snapshot: Snapshot,
    secrets: Mapping[str, str],
    *,
    at_once: int | None = None,
    progress: Progress = silent,
    plain: Callable[[None], Plan] | None = None,
) -> None:
    """Bring PREPARED attempts, which the caller has claimed, to their backend: one, or several as one array.

    An unreachable backend and hosts in use are raised and leave the attempts PREPARED, to be tried again. A refusal is
    the end of the jobs: `Rejected`. Of an array *at_once* run at a time. *plain* makes a plan that keeps away from no
    host; it is sent instead when the backend refuses that of a single attempt.
    """
    jobs = [attempt.job for attempt in attempts]
    backend = ws.backend_of_user(jobs[0].cluster, jobs[0].owner)

    def each(step: Callable[..., object], error: LaunchError, *also: object) -> None:
        for job in jobs:
            step(ws, job, redact(error.what, secrets.values()), *also)

    try:
        progress("stage", {})
        _stage(backend, snapshot, attempts[0])
        fault_point("staged")
        progress("submit", {})
        begun = steps.begin(ws, [(attempt.job, attempt.plan) for attempt in attempts])
        plans = [attempt.plan for attempt in attempts]
        is_begun = steps.attempt_is(AttemptState.SUBMITTING)
        sent = [(job, plan) for job, plan in zip(begun, plans, strict=True) if is_begun(job)]
        if not sent:  # they were cancelled meanwhile, or others have taken them
            return
        fault_point("submitting")
        handles = _submit(backend, [plan for _, plan in sent], secrets, at_once)
    except LedgerError:
        raise  # says nothing about the backend; what was durable stays true
    except NoRoom as error:
        each(steps.release_hosts, error, error.holders)
        raise
    except AmbiguousSubmit as error:
        each(steps.mark_ambiguous, error)
        return
    except BackendUnreachable as error:
        each(steps.release_attempt, error)
        raise
    except LaunchError as error:
        if plain is not None:
            waiting_reason = f"refused without the hosts that failed before: {redact(error.what, secrets.values())}"
            job = steps.release_attempt(ws, jobs[0], waiting_reason)
            if job.state is JobState.PREPARED:
                deliver(ws, [PreparedAttempt(plain(None), None, job)], snapshot, secrets, progress=progress)
                return
        each(steps.reject, error)
        raise Rejected(error) from error
    fault_point("submitted")
    accepted = steps.accept(ws, [job for job, _ in sent], handles)
    fault_point("handle-stored")
    for job in accepted:
        if job.cancel_requested_at is not None and job.state in (JobState.PENDING, JobState.RUNNING):
            send_cancel(ws, job)


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
