"""Reconciler: a stateless pass that brings every live job a step further. Any `orc` command may run it.

Two passes at once are safe: side effects need the job's claim, and every write names the revision of the job that it
was decided on. No transaction holds I/O. A backend that cannot be asked never makes a job fail.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING

from orc.launchers.errors import BackendUnreachable, LaunchError, NoRoom, PartlyUnreachable
from orc.launchers.ids import AttemptId
from orc.orchestrator.engine import admission, claims, dependencies, job_secrets, submission
from orc.orchestrator.engine.attempt_inputs import InputsUnavailable, attempt_inputs
from orc.orchestrator.engine.fault_points import fault_point
from orc.orchestrator.engine.placement import PlacementPlanner
from orc.orchestrator.engine.retry import retry_cause
from orc.orchestrator.engine.updates import JobUpdate, retry_policy, update_for_early_cancel, update_from_observation
from orc.orchestrator.ledger.errors import Conflict, LedgerError
from orc.orchestrator.ledger.lifecycle import AttemptState, Event, JobState, Kind
from orc.orchestrator.ledger.records import JobRecord
from orc.orchestrator.workspace import Workspace

if TYPE_CHECKING:
    from orc.launchers.backends.base import Backend, Handle, Observation

POLL_ERROR_EVENT_S = 300.0  # a longer outage is one event each five minutes, not one each pass
SEEN_EVERY_S = 10.0  # so often the ledger is told that a job was seen although nothing about it has changed
_JOBS_PER_TRANSACTION = 200
_STEPS = 5  # of one attempt in one pass, while its machines are being made


@dataclass
class PassReport:
    """Report of one pass: the clusters that it could not reach."""

    unreachable: dict[str, str] = field(default_factory=dict)  # cluster -> why nothing can be said about its jobs


def reconcile(ws: Workspace, job_ids: Sequence[str] | None = None, *, patience_s: float = 0.0) -> PassReport:
    """Run one pass over the live jobs (of *job_ids*, if given): every step that is due is taken.

    For *patience_s* a step is left to the job's own agents, where its cluster drives itself. While the ledger cannot be
    written, the pass only looks and cancels: nothing is started that would be forgotten. Raises `LedgerError` only.
    """
    report = PassReport()
    if ws.ledger.volatile:
        _poll_all(ws, ws.ledger.active(job_ids), report)
        return report
    if job_ids is not None:
        job_ids = dependencies.with_relatives(ws, job_ids)
    jobs = _live(ws, job_ids)
    held = _hold(ws, jobs)

    def is_due(job: JobRecord) -> bool:
        if job.id in held:
            return False
        return _needs_driving(job, ws.clock()) and not (patience_s and _is_left_to_agents(ws, job, patience_s))

    due = [job for job in jobs if is_due(job)]
    crowded = {job.cluster for job in due if _places(ws, job.cluster)}
    if crowded and job_ids is not None:
        # Who waits for hosts has to know who has left them, and to let older jobs go first.
        job_ids = [job.id for job in ws.ledger.active() if job.id in set(job_ids) or job.cluster in crowded]
    for job in due:
        if job.cluster not in crowded:
            _drive(ws, job, report)
    if due:
        jobs = ws.ledger.active(job_ids)
    _poll_all(ws, jobs, report)
    # Those whose hosts have just become free or whose attempt has just ended, and those that were left for that.
    driven = {job.id for job in due if job.cluster not in crowded}
    jobs = _live(ws, job_ids)
    held = _hold(ws, jobs)
    for job in jobs:
        if job.id not in driven and is_due(job):
            _drive(ws, job, report)
    job_secrets.sweep(ws.state_dir, lambda job_id: _is_active(ws, job_id))
    return report


def _live(ws: Workspace, job_ids: Sequence[str] | None) -> list[JobRecord]:
    """Return the jobs that have not ended, without those that can no longer start, which are cancelled now."""
    jobs = ws.ledger.active(job_ids)
    return ws.ledger.active(job_ids) if dependencies.cancel_impossible(ws, jobs) else jobs


def _hold(ws: Workspace, jobs: Sequence[JobRecord]) -> Mapping[str, admission.Hold]:
    """Return why queued jobs are not sent now, after it was recorded."""
    held = admission.holds(ws, jobs)
    by_id = {job.id: job for job in jobs}
    told = []
    for job_id, hold in held.items():
        if by_id[job_id].reason != hold.reason:
            waiting = Event(Kind.WAITING, None, {"reason": hold.reason})
            told.append((by_id[job_id], JobUpdate((waiting,), {"reason": hold.reason})))
    _write_all(ws, told)
    return held


def _places(ws: Workspace, cluster: str) -> bool:
    from orc.launchers.backends.base import SupportsPlacement

    try:
        return isinstance(ws.backend(cluster), SupportsPlacement)
    except LaunchError:
        return False  # its jobs' turn says what is wrong with the cluster


def _poll_all(ws: Workspace, jobs: Iterable[JobRecord], report: PassReport) -> None:
    by_cluster: dict[str, list[JobRecord]] = defaultdict(list)
    for job in jobs:
        if job.attempt is not None and job.attempt.handle and not job.attempt.state.terminal:
            by_cluster[job.cluster].append(job)
    for cluster, there in by_cluster.items():
        _poll_cluster(ws, cluster, there, report)


def _is_active(ws: Workspace, job_id: str) -> bool | None:
    job = ws.ledger.job(job_id)
    return None if job is None else not job.state.terminal


# -- before the backend has the attempt


def _needs_driving(job: JobRecord, now: float) -> bool:
    if job.state in (JobState.QUEUED, JobState.PREPARED):
        return job.cancel_requested_at is not None or (job.next_attempt_at or 0.0) <= now
    return job.state is JobState.SUBMITTING


def _is_left_to_agents(ws: Workspace, job: JobRecord, patience_s: float) -> bool:
    """Return True while the agents of *job*, which have its submission's environment, may still run it again."""
    if job.state is not JobState.QUEUED or not job.number:
        return False
    try:
        own = ws.backend(job.cluster).self_driving
    except LaunchError:
        return False  # its turn says what is wrong with the cluster
    return own and ws.clock() < max(job.next_attempt_at or 0.0, job.updated_at) + patience_s


def _drive(ws: Workspace, job: JobRecord, report: PassReport) -> None:
    """Finish an interrupted submission, or make the next attempt."""
    if not claims.is_free(job.claim_owner, job.claim_expires_at, ws.clock(), claims.owner_is_gone):
        return
    if not ws.ledger.claim(job, ws.owner, claims.TTL_S):
        return
    try:
        # What was read before the claim may be old; what is read now stays, but for a request to cancel.
        current = ws.ledger.job(job.id)
        if current is not None and current.revision == job.revision:
            _drive_claimed(ws, current)
    except LedgerError:
        raise
    except Conflict:
        return  # somebody asked to cancel it just now; the next pass sees that
    except InputsUnavailable as error:
        submission.wait_for_room(ws, job, error.what)
    except LaunchError as error:
        _note_unreachable(ws, job.cluster, [job], error.what, report)
    except Exception as error:  # noqa: BLE001 - one backend's defect must not keep the others' jobs waiting
        _note_unreachable(ws, job.cluster, [job], f"{type(error).__name__}: {error}", report)
    finally:
        ws.ledger.release(job.id, ws.owner)


def _drive_claimed(ws: Workspace, job: JobRecord) -> None:
    attempt = job.attempt
    if attempt is not None and attempt.state is AttemptState.SUBMITTING:
        reason = "the submission was cut off before its result was stored"
        job = submission.apply(ws, job, lambda _: True, lambda j, _: submission.ambiguous_update(j, reason))
        attempt = job.attempt
    if attempt is not None and attempt.state is AttemptState.AMBIGUOUS:
        job = _resolve(ws, job)
    if job.state not in (JobState.QUEUED, JobState.PREPARED):
        return
    if job.cancel_requested_at is not None:
        _cancel_unsent(ws, job)
        return
    _send(ws, job)


def _send(ws: Workspace, job: JobRecord) -> None:
    """Make the next attempt of a QUEUED job, or take up the one of a PREPARED job, and send it."""
    try:
        spec, snapshot, secrets = attempt_inputs(ws, job)
        if job.state is JobState.QUEUED:
            _reap(ws.backend(job.cluster), job)
        number = job.number + 1 if job.state is JobState.QUEUED else job.number
        planner = PlacementPlanner(ws, spec, snapshot, AttemptId(job.id, number))
        prepared = planner.prepare(job)
    except NoRoom as error:
        submission.wait_for_room(ws, job, planner.waiting_reason(error))
        return
    except admission.Held as held:  # somebody else has just taken the last place
        submission.wait_for_room(ws, job, held.what)
        return
    except BackendUnreachable as error:
        if ws.ledger.reservations(job_id=job.id):  # while it waits for one host, others may use the rest
            submission.wait_for_room(ws, job, submission.waiting_for_host(error, job.cluster))
        raise
    except (LedgerError, InputsUnavailable):
        raise
    except LaunchError as error:
        where = f"{error.where}: " if error.where else ""
        _give_up(ws, job, f"cannot be started{' again' if job.number else ''}: {where}{error.what}")
        return
    fault_point("prepared")
    submission.send(ws, planner, prepared, secrets, progress=submission.silent, patient=True)


def _reap(backend: Backend, job: JobRecord) -> None:
    """Let the backend end what the previous attempt may have left running, so that two attempts never overlap."""
    from orc.launchers.backends.base import Handle

    if job.attempt is not None and job.attempt.handle:
        backend.reap(Handle.from_dict(job.attempt.handle))


def _resolve(ws: Workspace, job: JobRecord) -> JobRecord:
    """Adopt what a cut-off submission left behind; let go of it once it is certainly not there."""
    if job.attempt is None:
        raise ValueError(f"{job.id} has no attempt to look for")
    backend = ws.backend(job.cluster)
    given = [reservation.host for reservation in ws.ledger.reservations(job_id=job.id)]
    handle = backend.find(job.attempt.marker, given, complete=job.cancel_requested_at is None)
    visibility_s = backend.visibility_s

    def change(current: JobRecord, now: float) -> JobUpdate:
        attempt = current.attempt
        if handle is not None:
            return submission.accepted(Kind.ADOPTED, current, handle, now)
        first = attempt.first_negative_at if attempt else None
        if visibility_s > 0 and first is None:
            looked = Event(Kind.NOT_FOUND, current.number, {"look_again_for_s": visibility_s})
            return JobUpdate((looked,), {}, {"first_negative_at": now})
        if first is not None and now - first < visibility_s:
            return JobUpdate()
        waiting_reason = "the cut-off submission left nothing behind"
        released = Event(Kind.RELEASED, current.number, {"reason": waiting_reason})
        return JobUpdate((released,), {"reason": ""}, {"reason": "", "submitted_at": None})

    def is_doubtful(current: JobRecord) -> bool:
        return current.attempt is not None and current.attempt.state is AttemptState.AMBIGUOUS

    return submission.apply(ws, job, is_doubtful, change)


def _cancel_unsent(ws: Workspace, job: JobRecord) -> None:
    ended = submission.apply(
        ws, job, lambda j: j.state in (JobState.QUEUED, JobState.PREPARED), update_for_early_cancel
    )
    if ended.state.terminal:
        job_secrets.remove(ws.state_dir, job.id)


def _give_up(ws: Workspace, job: JobRecord, reason: str) -> None:
    """There will be no further attempt, because it cannot even be prepared."""
    if job.state is JobState.PREPARED:
        submission.reject(ws, job, reason)
        return

    def change(_: JobRecord, now: float) -> JobUpdate:
        failed = Event(Kind.JOB_FAILED, None, {"cause": "launch", "reason": reason})
        return JobUpdate((failed,), {"reason": reason, "ended_at": now, "next_attempt_at": None})

    if submission.apply(ws, job, lambda j: j.state is JobState.QUEUED, change).state.terminal:
        job_secrets.remove(ws.state_dir, job.id)


# -- while the backend has the attempt


def _poll_cluster(ws: Workspace, cluster: str, jobs: list[JobRecord], report: PassReport) -> None:
    """Send cancellations, poll the cluster once for all its jobs, and store the observations."""
    from orc.launchers.backends.base import Handle

    handles = {job.id: Handle.from_dict(job.attempt.handle) for job in jobs if job.attempt and job.attempt.handle}
    try:
        backend = ws.backend(cluster)
        jobs = _cancel(ws, backend, jobs, handles, report)
        seen = backend.poll([handles[job.id] for job in jobs])
    except LedgerError:
        raise
    except LaunchError as error:
        _note_unreachable(ws, cluster, jobs, error.what, report)
        return
    except Exception as error:  # noqa: BLE001 - one backend's defect must not keep the others' jobs waiting
        _note_unreachable(ws, cluster, jobs, f"{type(error).__name__}: {error}", report)
        return
    answers = [(job, seen[handles[job.id]]) for job in jobs if handles[job.id] in seen]
    all_lost = _write(ws, answers)
    if ws.ledger.volatile:
        return
    _note_seen(ws, answers)
    for lost in all_lost:
        _end_leftovers(ws, backend, lost, report)
    for job, answer in answers:
        if answer.due:
            _advance(ws, backend, job.id, handles[job.id], report)


def _note_seen(ws: Workspace, answers: Sequence[tuple[JobRecord, Observation]]) -> None:
    from orc.launchers.backends.base import Phase

    now = ws.clock()
    due = [
        job.id
        for job, seen in answers
        if seen.phase is not Phase.UNKNOWN and not seen.phase.ended and now - ws.noted.get(job.id, 0.0) >= SEEN_EVERY_S
    ]
    if due:
        ws.ledger.note_seen(due)
        ws.noted.update(dict.fromkeys(due, now))


def _cancel(
    ws: Workspace, backend: Backend, jobs: list[JobRecord], handles: Mapping[str, Handle], report: PassReport
) -> list[JobRecord]:
    due: dict[float, list[JobRecord]] = defaultdict(list)
    for job in jobs:
        if job.cancel_requested_at is not None and job.attempt and job.attempt.cancel_sent_at is None:
            due[job.cancel_grace_s or 0.0].append(job)
    sent: dict[str, JobRecord] = {}
    for grace_s, group in due.items():
        try:
            backend.cancel([handles[job.id] for job in group], timedelta(seconds=grace_s))
        except PartlyUnreachable as error:  # it is tried again with every pass, and keeps nobody else waiting
            untold = [job for job in group if handles[job.id].marker in error.markers]
            _note_unreachable(ws, group[0].cluster, untold, error.what, report)
            group = [job for job in group if job not in untold]
        at = ws.clock()
        passed_on = [
            (job, JobUpdate((Event(Kind.CANCEL_SENT, job.number),), {}, {"cancel_sent_at": at})) for job in group
        ]
        sent.update(_write_all(ws, passed_on))
    return [sent.get(job.id, job) for job in jobs]


def _write(ws: Workspace, answers: Iterable[tuple[JobRecord, Observation]]) -> list[JobRecord]:
    """Write what was seen. Returns the jobs whose attempt is lost."""
    written = _write_all(ws, [(job, _update_from(ws, job, seen)) for job, seen in answers])
    for job in written.values():
        if job.state.terminal and not ws.ledger.volatile:
            job_secrets.remove(ws.state_dir, job.id)
    return [job for job in written.values() if job.attempt and job.attempt.state is AttemptState.LOST]


def _update_from(ws: Workspace, job: JobRecord, seen: Observation) -> JobUpdate:
    if not seen.phase.ended:
        return update_from_observation(job, seen, ws.clock())
    policy = retry_policy(ws.ledger.spec(job.id))
    attempts = [attempt for attempt in ws.ledger.attempts(job.id) if attempt.number < job.number]
    earlier = [retry_cause(a.cause or "", (a.exit or {}).get("ranks", {})) for a in attempts]
    change = update_from_observation(job, seen, ws.clock(), policy=policy, earlier=earlier)
    clean = partial(job_secrets.without_values, ws.state_dir, job.id)
    events = tuple(replace(event, data=clean(event.data)) for event in change.events)
    return replace(change, events=events, job_set=clean(change.job_set), attempt_set=clean(change.attempt_set))


def _write_all(ws: Workspace, changes: Iterable[tuple[JobRecord, JobUpdate]]) -> dict[str, JobRecord]:
    """Write many changes in few transactions; jobs that were changed meanwhile are left out."""
    wanted = [(job, change) for job, change in changes if change]
    written: dict[str, JobRecord] = {}
    for start in range(0, len(wanted), _JOBS_PER_TRANSACTION):
        done: dict[str, JobRecord] = {}
        with ws.ledger.transaction(durable=False) as tx:
            for job, made in wanted[start : start + _JOBS_PER_TRANSACTION]:
                try:
                    done[job.id] = submission.write(tx, job, made)
                except Conflict:
                    continue
        written.update(done)
    return written


def _advance(ws: Workspace, backend: Backend, job_id: str, handle: Handle, report: PassReport) -> None:
    """Let the backend take the next step of an attempt whose machines are being made, and write down what it saw."""
    from orc.launchers.backends.base import SupportsProvisioning

    job = ws.ledger.job(job_id)
    if job is None or job.attempt is None or job.attempt.state.terminal or job.attempt.marker != handle.marker:
        return
    if job.cancel_requested_at is not None or not isinstance(backend, SupportsProvisioning):
        return
    if not claims.is_free(job.claim_owner, job.claim_expires_at, ws.clock(), claims.owner_is_gone):
        return
    if not ws.ledger.claim(job, ws.owner, claims.TTL_S):
        return
    try:
        spec, snapshot, secrets = attempt_inputs(ws, job)
        plan = PlacementPlanner(ws, spec, snapshot, AttemptId(job.id, job.number)).render(None)
        told = ""
        for _ in range(_STEPS):
            fault_point("advancing")
            seen = backend.advance(handle, plan, secrets)
            fault_point("advanced")
            if current := ws.ledger.job(job_id):
                for lost in _write(ws, [(current, seen)]):
                    _end_leftovers(ws, backend, lost, report)
            if not seen.due or seen.reason == told:  # what has to be waited for says the same again
                break
            told = seen.reason
    except LedgerError:
        raise
    except LaunchError as error:
        _note_unreachable(ws, job.cluster, [job], error.what, report)
    except Exception as error:  # noqa: BLE001 - one backend's defect must not keep the others' jobs waiting
        _note_unreachable(ws, job.cluster, [job], f"{type(error).__name__}: {error}", report)
    finally:
        ws.ledger.release(job_id, ws.owner)


def _end_leftovers(ws: Workspace, backend: Backend, job: JobRecord, report: PassReport) -> None:
    try:
        _reap(backend, job)
    except LaunchError as error:
        # It is tried again before the next attempt, if there is one.
        report.unreachable.setdefault(job.cluster, error.what)


def _note_unreachable(ws: Workspace, cluster: str, jobs: Sequence[JobRecord], what: str, report: PassReport) -> None:
    report.unreachable[cluster] = what
    now, reason = ws.clock(), f"cannot reach {cluster}: {what}"
    changes = []
    for job in ws.ledger.active([job.id for job in jobs]):
        if job.poll_error_at is None or now - job.poll_error_at >= POLL_ERROR_EVENT_S:
            event = Event(Kind.POLL_ERROR, None, {"reason": what})
            changes.append((job, JobUpdate((event,), {"reason": reason, "poll_error_at": now})))
        elif job.reason != reason:
            changes.append((job, JobUpdate(job_set={"reason": reason})))
    _write_all(ws, changes)
