"""Delivery of attempts to their backend: staged, announced in the ledger, sent, and written down as what came of it.

Where the hosts of one turn out to be in use or away, others are tried. Each step that the ledger has (what is written
before and after each call of the backend) is one transaction that looks at the job again; one that another process has
taken meanwhile is left alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING

from orc.launchers.errors import AmbiguousSubmit, BackendUnreachable, LaunchError, NoRoom
from orc.launchers.secrets import redact
from orc.orchestrator.engine import orphans
from orc.orchestrator.engine.placement import PlacementPlanner, PreparedAttempt, room_backoff
from orc.orchestrator.engine.steps import Progress, apply, apply_all, fault_point, silent
from orc.orchestrator.engine.updates import update_for_early_cancel, update_for_rejection
from orc.orchestrator.ledger import leases
from orc.orchestrator.ledger.database import Conflict, LedgerError
from orc.orchestrator.ledger.lifecycle import AttemptState, Event, JobState, Kind
from orc.orchestrator.ledger.records import JobRecord, JobUpdate
from orc.orchestrator.workspace import Workspace

if TYPE_CHECKING:
    from orc.launchers.backends.base import Backend, Handle, Snapshot
    from orc.launchers.plan import Plan
    from orc.orchestrator.ledger.records import AttemptRecord, Destination

UNSENT = {"submitted_at": None, "sent_to": None}  # of an attempt that its backend certainly has not got


def abandon(ws: Workspace, job: JobRecord) -> None:
    """The user stopped the submission by hand. What may be at the backend is found and cancelled."""

    def change(current: JobRecord, now: float) -> JobUpdate:
        if current.state in (JobState.QUEUED, JobState.PREPARED):
            return update_for_early_cancel(current, now)
        wish = Event(Kind.CANCEL_REQUESTED, None, {"grace_s": 0.0})
        return JobUpdate((wish,), {"cancel_requested_at": now, "cancel_grace_s": 0.0})

    apply(ws, job, lambda current: not current.state.terminal, change)


def reject(ws: Workspace, job: JobRecord, reason: str) -> JobRecord:
    """Record that the newest attempt could not be started, or the next one of a QUEUED *job* not be made."""
    unsent = attempt_is(AttemptState.PREPARED, AttemptState.SUBMITTING)
    allowed = (lambda current: current.state is JobState.QUEUED) if job.state is JobState.QUEUED else unsent
    return apply(ws, job, allowed, lambda current, now: update_for_rejection(current, reason, now))


def attempt_is(*states: AttemptState) -> Callable[[JobRecord], bool]:
    """Return the check that the newest attempt of a job is in one of *states*."""
    return lambda job: job.attempt is not None and job.attempt.state in states


def begin(ws: Workspace, attempts: Sequence[tuple[JobRecord, Plan]]) -> list[JobRecord]:
    """SUBMITTING, with where they go, unless jobs were cancelled meanwhile or their claims lost."""
    plans = {job.id: plan for job, plan in attempts}
    jobs = [job for job, _ in attempts]
    sent_to = {j.id: ws.destination(j.cluster, j.owner, j.attempt.hosts if j.attempt else ()) for j in jobs}

    def change(current: JobRecord, now: float) -> JobUpdate:
        if current.cancel_requested_at is not None:
            return update_for_early_cancel(current, now)
        digest = plans[current.id].digest
        return JobUpdate(
            (Event(Kind.SUBMITTING, current.number, {"plan": digest}),),
            {"claim_expires_at": now + leases.CLAIM_S, "reason": ""},
            # Now and not when the backend has answered: the job may have started by then.
            {
                "plan_digest": digest,
                "first_negative_at": None,
                "submitted_at": now,
                "sent_to": sent_to[current.id].to_dict(),
            },
        )

    def is_ours(current: JobRecord) -> bool:
        return current.claim_owner == ws.owner and attempt_is(AttemptState.PREPARED)(current)

    return apply_all(ws, jobs, is_ours, change)


def mark_ambiguous(ws: Workspace, job: JobRecord, reason: str) -> JobRecord:
    """Record that it is unknown whether the backend has the newest attempt."""
    return apply(ws, job, attempt_is(AttemptState.SUBMITTING), lambda j, _: ambiguous_update(j, reason))


def ambiguous_update(job: JobRecord, reason: str) -> JobUpdate:
    """Return the change that makes a submission ambiguous: the backend may have the attempt or not."""
    ambiguous = Event(Kind.AMBIGUOUS, job.number, {"reason": reason})
    return JobUpdate((ambiguous,), {"reason": reason}, {"reason": reason, "first_negative_at": None})


def release_attempt(ws: Workspace, job: JobRecord, reason: str) -> JobRecord:
    """Record that the backend certainly has not got the newest attempt: it may be sent again."""

    def change(current: JobRecord, _: float) -> JobUpdate:
        return JobUpdate((Event(Kind.RELEASED, current.number, {"reason": reason}),), {"reason": reason}, dict(UNSENT))

    return apply(ws, job, attempt_is(AttemptState.SUBMITTING), change)


def wait_for_room(ws: Workspace, job: JobRecord, reason: str) -> JobRecord:
    """Record that the job waits, without hosts, for *reason*. Gives the claim back."""

    def change(current: JobRecord, _: float) -> JobUpdate:
        if current.reason == reason:
            return JobUpdate()
        waiting = Event(Kind.WAITING, None, {"reason": reason})
        claim = {"claim_owner": None, "claim_expires_at": None} if current.claim_owner == ws.owner else {}
        return JobUpdate((waiting,), {"reason": reason, **claim}, vacate=current.state is JobState.PREPARED)

    return apply(ws, job, lambda j: j.state in (JobState.QUEUED, JobState.PREPARED), change)


def release_hosts(ws: Workspace, job: JobRecord, reason: str, holders: Sequence[str]) -> JobRecord:
    """Hosts that the ledger thought free are not: jobs of another ledger are there. Give them back, try again later."""
    held = f" (held by {', '.join(holders)})" if holders else ""
    waiting_reason = reason if reason.startswith("waiting") else f"waiting for room: {reason}{held}"

    def change(current: JobRecord, now: float) -> JobUpdate:
        attempt = current.attempt
        waited = now - attempt.prepared_at if attempt else 0.0
        return JobUpdate(
            (Event(Kind.RELEASED, current.number, {"reason": waiting_reason}),),
            {"reason": waiting_reason, "next_attempt_at": now + room_backoff(waited, current.id)},
            {"reason": waiting_reason, **UNSENT},
            vacate=True,
        )

    return apply(ws, job, attempt_is(AttemptState.SUBMITTING), change)


def accept(ws: Workspace, begun: Sequence[JobRecord], handles: Sequence[Handle]) -> list[JobRecord]:
    """Store the handles of the attempts that *begun* have, as they were sent. Another process may have been faster;
    that is recorded. The agents' lease lets only one copy run where both are at one place; this one is told to end
    where it is at another one, or where the attempt was given up meanwhile."""
    places = [job.attempt.sent_to if job.attempt else None for job in begun]
    sent = {job.id: (handle, place) for job, handle, place in zip(begun, handles, places, strict=True)}

    def change(current: JobRecord, now: float) -> JobUpdate:
        attempt, (handle, sent_to) = current.attempt, sent[current.id]
        if attempt is not None and attempt.state in (AttemptState.SUBMITTING, AttemptState.AMBIGUOUS):
            return accepted(Kind.ACCEPTED, current, handle, now, sent_to)
        if attempt is not None and (orphans.is_given_up(attempt) or _is(attempt, handle, sent_to)):
            return JobUpdate()
        return JobUpdate((Event(Kind.DUPLICATE, current.number, {"native_id": handle.native_id}),))

    stored = apply_all(ws, begun, lambda _: True, change)
    for job in stored:
        orphans.end_if_orphaned(ws, job, *sent[job.id])
    return stored


def _is(attempt: AttemptRecord, handle: Handle, sent_to: Destination | None) -> bool:
    """Return True where *attempt* is known as what *handle* names at *sent_to*."""
    same = bool(attempt.handle) and (attempt.handle or {})["native_id"] == handle.native_id
    return same and not orphans.is_outside_lease(attempt, sent_to, handle.hosts)


def accepted(kind: Kind, job: JobRecord, handle: Handle, now: float, sent_to: Destination | None) -> JobUpdate:
    """Return the update of a job that its backend has accepted at *sent_to*. Gives the claim back."""
    event = Event(kind, job.number, {"native_id": handle.native_id})
    begun = job.attempt.submitted_at if job.attempt else None
    return JobUpdate(
        (event,),
        {"claim_owner": None, "claim_expires_at": None, "reason": "", "poll_error_at": None},
        {
            "handle": handle.to_dict(),
            "submitted_at": min(at for at in (handle.submitted_at, begun, now) if at),
            "reason": "",
            "first_negative_at": None,
            "sent_to": sent_to.to_dict() if sent_to is not None else None,
        },
    )


class _Stopped(Exception):
    """A delivery that does not go on; *error* says why."""

    def __init__(self, error: LaunchError) -> None:
        super().__init__(error.what)
        self.error = error


class Rejected(_Stopped):
    """Jobs have ended because they certainly cannot run."""


class HostAway(_Stopped):
    """A job waits, without its hosts, for one of them that is away, as no others will do."""


class _StagingFailed(_Stopped):
    """A host cannot take the snapshot (its disk is full, its directory is not ours): others may."""


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
                reject(ws, job, redact(refusal.error.what, secrets.values()))
                raise Rejected(refusal.error) from None
        job = ws.ledger.jobs([job.id])[0]
        if not found or job.state is not JobState.PREPARED or job.claim_owner != ws.owner:
            return
        try:
            prepared = planner.prepare(job)
        except NoRoom as error:
            wait_for_room(ws, job, planner.waiting_reason(error))
            return
        except BackendUnreachable as error:
            raise _wait_for_host(ws, job, error) from error
        except Conflict:  # it was cancelled just now; the next pass sees that
            return


def _wait_for_host(ws: Workspace, job: JobRecord, error: BackendUnreachable) -> HostAway:
    """There is no way around a host that is away. While the job waits for it, others may use the rest."""
    wait_for_room(ws, job, waiting_for_host(error, job.cluster))
    return HostAway(error)


def waiting_for_host(error: BackendUnreachable, cluster: str) -> str:
    """Return the reason of a job that waits for a host."""
    return f"waiting for {error.host or error.where or cluster}: {error.what}"


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
        begun = begin(ws, [(attempt.job, attempt.plan) for attempt in attempts])
        plans = [attempt.plan for attempt in attempts]
        is_begun = attempt_is(AttemptState.SUBMITTING)
        sent = [(job, plan) for job, plan in zip(begun, plans, strict=True) if is_begun(job)]
        if not sent:  # they were cancelled meanwhile, or others have taken them
            return
        fault_point("submitting")
        handles = _submit(backend, [plan for _, plan in sent], secrets, at_once)
    except LedgerError:
        raise  # says nothing about the backend; what was durable stays true
    except NoRoom as error:
        each(release_hosts, error, error.holders)
        raise
    except AmbiguousSubmit as error:
        each(mark_ambiguous, error)
        return
    except BackendUnreachable as error:
        each(release_attempt, error)
        raise
    except LaunchError as error:
        if plain is not None:
            waiting_reason = f"refused without the hosts that failed before: {redact(error.what, secrets.values())}"
            job = release_attempt(ws, jobs[0], waiting_reason)
            if job.state is JobState.PREPARED:
                deliver(ws, [PreparedAttempt(plain(None), None, job)], snapshot, secrets, progress=progress)
                return
        each(reject, error)
        raise Rejected(error) from error
    fault_point("submitted")
    accepted = accept(ws, [job for job, _ in sent], handles)
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
