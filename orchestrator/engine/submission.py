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
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

from orc.launchers.errors import AmbiguousSubmit, BackendUnreachable, LaunchError, NoRoom, SpecError
from orc.launchers.ids import AttemptId
from orc.launchers.secrets import redact, resolve_secrets
from orc.orchestrator.engine import claims, job_files, job_secrets, late_copies
from orc.orchestrator.engine.admission import Admission
from orc.orchestrator.engine.deadlines import deadline_at
from orc.orchestrator.engine.fault_points import fault_point
from orc.orchestrator.engine.placement import PlacementPlanner, PreparedAttempt, Progress
from orc.orchestrator.engine.queueing import room_backoff
from orc.orchestrator.engine.updates import JobUpdate, update_for_early_cancel, update_for_rejection
from orc.orchestrator.engine.writing import apply
from orc.orchestrator.ledger import groups
from orc.orchestrator.ledger.errors import Conflict, LedgerError
from orc.orchestrator.ledger.lifecycle import AttemptState, Event, JobState, Kind
from orc.orchestrator.ledger.records import JobRecord, NewJob
from orc.orchestrator.workspace import Workspace

if TYPE_CHECKING:
    from orc.launchers.backends.base import Backend, Handle, Placement, Snapshot, SupportsArrays
    from orc.launchers.plan import Plan
    from orc.launchers.spec import JobSpec
    from orc.orchestrator.ledger.groups import GroupRecord
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
            _abandon(ws, prepared.job)
        elif isinstance(error, LaunchError):
            reject(ws, prepared.job, redact(error.what, secrets.values()))
        ws.give_back(new.id)
        raise
    fault_point("claim-released")
    return record


def start_array(
    ws: Workspace,
    jobs: Sequence[JobSpec],
    snapshot: Snapshot,
    *,
    source: str,
    at_once: int | None = None,
    given: Mapping[str, str] | None = None,
    group: GroupRecord | None = None,
    numbers: Sequence[int] | None = None,
) -> list[JobRecord]:
    """Submit new jobs with the same resources as one array of which *at_once* run at a time.

    *group* is a new group that they belong to, *numbers* are their indices there. The cluster is one that
    `SupportsArrays`. Each job is as durable, and as sure to run once, as one that `start` submits; attempts that follow
    a failure are submitted by themselves. Raises what `start` raises.
    """
    from orc.launchers.backends.base import SupportsArrays

    backend = ws.backend_of_user(jobs[0].cluster, ws.user)
    if not isinstance(backend, SupportsArrays):
        raise TypeError(f"{backend.kind} has no arrays")
    secrets = resolve_secrets(jobs[0].secrets, {**os.environ, **(given or {})})
    planners = [PlacementPlanner(ws, job, snapshot, AttemptId(ws.new_job_id(job.name), 1)) for job in jobs]
    plans = [planner.render(None) for planner in planners]
    planners[0].check(plans[0], None)
    new = [new_job(ws, planner.spec, snapshot, planner.attempt, source) for planner in planners]
    if group is not None:
        pairs = zip(new, numbers or range(len(new)), strict=True)
        new = [replace(job, group_id=group.id, group_index=number) for job, number in pairs]
    with job_secrets.until_recorded(ws, *(job.id for job in new)):
        for job in new:
            job_secrets.keep_for(ws, job.id, secrets)
        with ws.ledger.transaction() as tx:
            if group is not None:
                groups.create(tx.connection, group)
            expires = tx.now + claims.TTL_S
            records = [
                tx.create(job, plan.marker, plan.digest, ws.owner, expires)
                for job, plan in zip(new, plans, strict=True)
            ]
    fault_point("prepared")
    for job, record in zip(new, records, strict=True):
        job_files.keep(ws.state_dir, job, record.created_at)
    ws.on_live_job()
    try:
        _deliver_array(ws, backend, records, plans, snapshot, secrets, at_once)
        records_now = {record.id: record for record in ws.ledger.jobs([job.id for job in new])}
        return [records_now[job.id] for job in new]
    except LedgerError as error:
        raise LedgerError(
            f"{error.what}; the jobs {', '.join(job.id for job in new)} are recorded, and run or will run",
            where=error.where,
            hint="do not submit them again; `orc list` shows them",
        ) from error
    except KeyboardInterrupt:
        for record in records:
            _abandon(ws, record)
        raise
    finally:
        for job in new:
            with suppress(LedgerError):  # claims expire by themselves
                ws.give_back(job.id)


def _deliver_array(
    ws: Workspace,
    backend: SupportsArrays,
    jobs: list[JobRecord],
    plans: Sequence[Plan],
    snapshot: Snapshot,
    secrets: Mapping[str, str],
    at_once: int | None,
) -> None:
    is_submitting = _attempt_is(AttemptState.SUBMITTING)
    try:
        ws.backend_of_user(jobs[0].cluster, jobs[0].owner).stage(snapshot, plans[0])
        fault_point("staged")
        begun = [(_begin(ws, job, plan), plan) for job, plan in zip(jobs, plans, strict=True)]
        begun = [(job, plan) for job, plan in begun if is_submitting(job)]  # others were cancelled meanwhile
        if not begun:
            return
        fault_point("submitting")
        handles = backend.submit_array([plan for _, plan in begun], secrets, at_once=at_once)
    except LedgerError:
        raise  # says nothing about the backend; what was durable stays true
    except AmbiguousSubmit as error:
        for job in jobs:
            _mark_ambiguous(ws, job, redact(error.what, secrets.values()))
        return
    except LaunchError as error:
        for job in jobs:
            reject(ws, job, redact(error.what, secrets.values()))
        raise
    fault_point("submitted")
    for (job, _), handle in zip(begun, handles, strict=True):
        _accept(ws, job, handle)


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
        return wait_for_room(ws, prepared.job, planner.waiting_reason(error))
    except Conflict:  # somebody asked to cancel it just now; the next pass sees that
        return ws.ledger.jobs([prepared.job.id])[0]
    fault_point("examined")
    return send(ws, planner, prepared, secrets, progress=progress)


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


def _abandon(ws: Workspace, job: JobRecord) -> None:
    """The user stopped the submission by hand. What may be at the backend is found and cancelled."""

    def change(current: JobRecord, now: float) -> JobUpdate:
        if _attempt_is(AttemptState.PREPARED)(current):
            return update_for_early_cancel(current, now)
        wish = Event(Kind.CANCEL_REQUESTED, None, {"grace_s": 0.0})
        return JobUpdate((wish,), {"cancel_requested_at": now, "cancel_grace_s": 0.0})

    left = apply(ws, job, lambda current: not current.state.terminal, change)
    if left.state.terminal:
        job_secrets.remove(ws.state_dir, job.id)


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
                refused = reject(ws, job, redact(refusal.error.what, secrets.values()))
                if patient:
                    return refused
                raise refusal.error from None
        job = ws.ledger.jobs([job.id])[0]
        if not found or job.state is not JobState.PREPARED or job.claim_owner != ws.owner:
            return job
        try:
            prepared = planner.prepare(job)
        except NoRoom as error:
            return wait_for_room(ws, job, planner.waiting_reason(error))
        except BackendUnreachable as error:
            return _wait_for_host(ws, job, error, patient)
        except Conflict:  # somebody asked to cancel it just now; the next pass sees that
            return ws.ledger.jobs([job.id])[0]


def _wait_for_host(ws: Workspace, job: JobRecord, error: BackendUnreachable, patient: bool) -> JobRecord:
    """There is no way around a host that is away. While the job waits for it, others may use the rest."""
    waiting = wait_for_room(ws, job, waiting_for_host(error, job.cluster))
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
        begun = _begin(ws, job, plan)
        if begun.attempt is None or begun.attempt.state is not AttemptState.SUBMITTING:
            return begun
        fault_point("submitting")
        handle = backend.submit(plan, secrets)
    except LedgerError:
        raise  # says nothing about the backend; what was durable stays true
    except NoRoom as error:
        _release_hosts(ws, job, redact(error.what, secrets.values()), error.holders)
        raise
    except AmbiguousSubmit as error:
        return _mark_ambiguous(ws, job, redact(error.what, secrets.values()))
    except BackendUnreachable as error:
        _release_attempt(ws, job, redact(error.what, secrets.values()))
        raise
    except LaunchError as error:
        if plain is not None:
            waiting_reason = f"refused without the hosts that failed before: {redact(error.what, secrets.values())}"
            job = _release_attempt(ws, job, waiting_reason)
            if job.state is JobState.PREPARED:
                return deliver(ws, job, plain(), snapshot, secrets, progress=progress, patient=patient)
        refused = reject(ws, job, redact(error.what, secrets.values()))
        if patient:
            return refused
        raise
    fault_point("submitted")
    job = _accept(ws, job, handle)
    fault_point("handle-stored")
    if job.cancel_requested_at is not None and job.state in (JobState.PENDING, JobState.RUNNING):
        job = send_cancel(ws, job, handle)
    return job


def send_cancel(ws: Workspace, job: JobRecord, handle: Handle) -> JobRecord:
    """Pass a durable request to cancel on to the backend, and remember that it was passed on."""
    ws.backend_of_user(job.cluster, job.owner).cancel([handle], timedelta(seconds=job.cancel_grace_s or 0.0))
    return apply(
        ws,
        job,
        lambda now: now.attempt is not None and now.attempt.state in (AttemptState.PENDING, AttemptState.RUNNING),
        lambda _, at: JobUpdate((Event(Kind.CANCEL_SENT, job.number),), {}, {"cancel_sent_at": at}),
    )


def reject(ws: Workspace, job: JobRecord, reason: str) -> JobRecord:
    """Record that the newest attempt could not be started."""
    refused = apply(
        ws,
        job,
        _attempt_is(AttemptState.PREPARED, AttemptState.SUBMITTING),
        lambda j, at: update_for_rejection(j, reason, at),
    )
    if refused.state.terminal:
        job_secrets.remove(ws.state_dir, job.id)
    return refused


def _attempt_is(*states: AttemptState) -> Callable[[JobRecord], bool]:
    return lambda job: job.attempt is not None and job.attempt.state in states


def _begin(ws: Workspace, job: JobRecord, plan: Plan) -> JobRecord:
    """SUBMITTING, unless the job was cancelled meanwhile or the claim was lost."""

    def change(current: JobRecord, now: float) -> JobUpdate:
        if current.cancel_requested_at is not None:
            return update_for_early_cancel(current, now)
        return JobUpdate(
            (Event(Kind.SUBMITTING, current.number, {"plan": plan.digest}),),
            {"claim_expires_at": now + claims.TTL_S, "reason": ""},
            # Now and not when the backend has answered: the job may have started by then.
            {"plan_digest": plan.digest, "first_negative_at": None, "submitted_at": now},
        )

    begun = apply(
        ws,
        job,
        lambda current: current.claim_owner == ws.owner and _attempt_is(AttemptState.PREPARED)(current),
        change,
    )
    if begun.state.terminal:
        job_secrets.remove(ws.state_dir, job.id)
    return begun


def _mark_ambiguous(ws: Workspace, job: JobRecord, reason: str) -> JobRecord:
    return apply(ws, job, _attempt_is(AttemptState.SUBMITTING), lambda j, _: ambiguous_update(j, reason))


def ambiguous_update(job: JobRecord, reason: str) -> JobUpdate:
    """Return the change that makes a submission ambiguous: the backend may have the attempt or not."""
    ambiguous = Event(Kind.AMBIGUOUS, job.number, {"reason": reason})
    return JobUpdate((ambiguous,), {"reason": reason}, {"reason": reason, "first_negative_at": None})


def _release_attempt(ws: Workspace, job: JobRecord, reason: str) -> JobRecord:
    def change(current: JobRecord, _: float) -> JobUpdate:
        return JobUpdate(
            (Event(Kind.RELEASED, current.number, {"reason": reason}),), {"reason": reason}, {"submitted_at": None}
        )

    return apply(ws, job, _attempt_is(AttemptState.SUBMITTING), change)


def wait_for_room(ws: Workspace, job: JobRecord, reason: str) -> JobRecord:
    """Record that the job waits, without hosts, for *reason*."""

    def change(current: JobRecord, _: float) -> JobUpdate:
        if current.reason == reason:
            return JobUpdate()
        waiting = Event(Kind.WAITING, None, {"reason": reason})
        return JobUpdate((waiting,), {"reason": reason}, vacate=current.state is JobState.PREPARED)

    return apply(ws, job, lambda j: j.state in (JobState.QUEUED, JobState.PREPARED), change)


def _release_hosts(ws: Workspace, job: JobRecord, reason: str, holders: Sequence[str]) -> JobRecord:
    """Hosts that the ledger thought free are not: jobs of another ledger are there. Give them back, try again later."""
    held = f" (held by {', '.join(holders)})" if holders else ""
    waiting_reason = reason if reason.startswith("waiting") else f"waiting for room: {reason}{held}"

    def change(current: JobRecord, now: float) -> JobUpdate:
        attempt = current.attempt
        waited = now - attempt.prepared_at if attempt else 0.0
        return JobUpdate(
            (Event(Kind.RELEASED, current.number, {"reason": waiting_reason}),),
            {"reason": waiting_reason, "next_attempt_at": now + room_backoff(waited, current.id)},
            {"reason": waiting_reason, "submitted_at": None},
            vacate=True,
        )

    return apply(ws, job, _attempt_is(AttemptState.SUBMITTING), change)


def _accept(ws: Workspace, job: JobRecord, handle: Handle) -> JobRecord:
    """Store the handle. Another process may have been faster; that is recorded, not repaired, because
    the agents' lease lets only one copy run. Where the attempt was given up meanwhile, this copy is told to end."""

    def change(current: JobRecord, now: float) -> JobUpdate:
        attempt = current.attempt
        if attempt is not None and attempt.state in (AttemptState.SUBMITTING, AttemptState.AMBIGUOUS):
            return accepted(Kind.ACCEPTED, current, handle, now)
        if attempt is not None and attempt.handle and attempt.handle["native_id"] == handle.native_id:
            return JobUpdate()
        if attempt is not None and late_copies.is_given_up(attempt):
            return JobUpdate()
        return JobUpdate((Event(Kind.DUPLICATE, job.number, {"native_id": handle.native_id}),))

    stored = apply(ws, job, lambda _: True, change)
    late_copies.end_if_given_up(ws, stored, handle)
    return stored


def accepted(kind: Kind, job: JobRecord, handle: Handle, now: float) -> JobUpdate:
    """Return the update of a job that its backend has accepted. Gives the claim back."""
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
        },
    )
