"""Reconciler: a stateless pass that brings every live job a step further. Any `orc` command may run it.

Two passes at once are safe: side effects need the job's claim, and every write names the revision of the job that it
was decided on. No transaction holds I/O. A backend that cannot be asked never makes a job fail.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from orc.launchers.errors import BackendUnreachable, LaunchError, NoRoom
from orc.launchers.ids import AttemptId
from orc.orchestrator.engine import (
    admission,
    claims,
    deadlines,
    delivery,
    dependencies,
    job_files,
    job_secrets,
    late_copies,
    schedules,
)
from orc.orchestrator.engine import submission_steps as steps
from orc.orchestrator.engine.attempt_inputs import InputsUnavailable, attempt_inputs
from orc.orchestrator.engine.fair_share import read_head_starts
from orc.orchestrator.engine.fault_points import fault_point
from orc.orchestrator.engine.observing import Urgency, poll_all, reap
from orc.orchestrator.engine.pass_report import PassReport, note_unreachable, write_all
from orc.orchestrator.engine.placement import PlacementPlanner
from orc.orchestrator.engine.stored_spec import stored_spec
from orc.orchestrator.engine.turns import turn
from orc.orchestrator.engine.updates import JobUpdate, update_for_early_cancel
from orc.orchestrator.engine.writing import apply
from orc.orchestrator.ledger.errors import Conflict, LedgerError
from orc.orchestrator.ledger.lifecycle import AttemptState, Event, JobState, Kind
from orc.orchestrator.ledger.records import JobRecord
from orc.orchestrator.ledger.transaction import Transaction
from orc.orchestrator.workspace import OutOfReach, Workspace


def reconcile(
    ws: Workspace,
    job_ids: Sequence[str] | None = None,
    *,
    cluster: str | None = None,
    patience_s: float = 0.0,
    max_age_s: float | None = 0.0,
) -> PassReport:
    """Run one pass over the live jobs (of *job_ids* or of *cluster*, if given): every step that is due is taken.

    For *patience_s* a step is left to the job's own agents, where its cluster drives itself. A cluster that is asked
    over a network is not asked again while its last answer is younger than *max_age_s*; with `None` it is asked when
    its interval has passed. While the ledger cannot be written, the pass only looks and cancels: nothing is started
    that would be forgotten. Raises `LedgerError` only.
    """
    report = PassReport()
    urgency = Urgency(max_age_s, some_jobs=job_ids is not None)

    def live() -> list[JobRecord]:
        """Return the jobs that have not ended; those that can no longer start are cancelled now."""
        found = of_cluster(ws.ledger.active(job_ids))
        changed = not ws.ledger.volatile and dependencies.cancel_impossible(ws, found)
        return of_cluster(ws.ledger.active(job_ids)) if changed else found

    def of_cluster(jobs: list[JobRecord]) -> list[JobRecord]:
        return jobs if cluster is None else [job for job in jobs if job.cluster == cluster]

    if ws.ledger.volatile:
        poll_all(ws, live(), report, urgency)
        return report
    if job_ids is not None:
        job_ids = dependencies.with_relatives(ws, job_ids)
    else:
        schedules.fire_due(ws)
    jobs = live()
    if _cancel_overdue(ws, jobs):
        jobs = live()

    def is_due(job: JobRecord) -> bool:
        return _needs_driving(job, ws.clock()) and not (patience_s and _is_left_to_agents(ws, job, patience_s))

    due = [job for job in jobs if is_due(job)]
    crowded = {job.cluster for job in due if _places(ws, job.cluster) or ws.limits(job.cluster) is not None}
    if crowded and job_ids is not None:
        # Who waits for room has to know who has left it, and to let others go first whose turn it is.
        job_ids = [job.id for job in ws.ledger.active() if job.id in set(job_ids) or job.cluster in crowded]
    held = _drive_in_turn(ws, [job for job in due if job.cluster not in crowded], report)
    if due:
        jobs = live()
    poll_all(ws, jobs, report, urgency)
    # Those whose hosts have just become free or whose attempt has just ended, and those that were left for that.
    driven = {job.id for job in due if job.cluster not in crowded} - held
    _drive_in_turn(ws, [job for job in live() if job.id not in driven and is_due(job)], report)
    if job_ids is None:
        late_copies.end_due(ws, report, cluster)
    job_secrets.sweep(ws.state_dir, lambda job_id: _is_active(ws, job_id))
    return report


def _cancel_overdue(ws: Workspace, jobs: Sequence[JobRecord]) -> bool:
    """Request the cancellation of jobs whose deadline has passed; True if there are some."""
    now = ws.clock()
    overdue = [job for job in jobs if deadlines.has_passed(job, now)]
    changes = []
    for job in overdue:
        grace_s = float(ws.ledger.spec(job.id)["grace"])
        asked = Event(Kind.CANCEL_REQUESTED, None, {"grace_s": grace_s, "reason": "deadline"})
        wish = {"cancel_requested_at": now, "cancel_grace_s": grace_s}
        changes.append((job, JobUpdate((asked,), wish, {"cancel_sent_at": None})))
    for job_id in write_all(ws, changes):
        job_files.note_cancelled(ws.state_dir, job_id)
    return bool(overdue)


def _places(ws: Workspace, cluster: str) -> bool:
    from orc.launchers.backends.base import SupportsPlacement

    try:
        return isinstance(ws.backend(cluster), SupportsPlacement)
    except LaunchError:
        return False  # its jobs' turn says what is wrong with the cluster


def _is_active(ws: Workspace, job_id: str) -> bool | None:
    job = ws.ledger.job(job_id)
    if job is None:
        return True if schedules.is_kept(ws, job_id) else None
    return not job.state.terminal


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


def _drive_in_turn(ws: Workspace, jobs: Sequence[JobRecord], report: PassReport) -> set[str]:
    """Drive those of *jobs* that are not held back, the earliest turn first; note what the others wait for.

    One that could not be sent although it may be (its snapshot is elsewhere, there is no room) stops nobody: those that
    were held back while it was before them are looked at again. Returns the ids of those that are held back at the end.
    """
    tried: set[str] = set()
    held: list[tuple[JobRecord, str]] = []
    behind: list[tuple[JobRecord, str]] = []
    closed: dict[str, dict[str, str]] = {}  # by cluster, hosts for which a job waits, and which
    left = list(jobs)
    while left:
        admitted, held = _admit(ws, left, tried)
        for job in admitted:
            older = _in_the_way(ws, job, closed)
            if older:
                if not job.reason.startswith("waiting for"):
                    behind.append((job, f"waiting for room: {older} is older and waits for the same hosts"))
            elif _drive(ws, job, report):
                closed.setdefault(job.cluster, {}).update(dict.fromkeys(_candidates(ws, job), job.id))
        if not admitted or not held:
            break
        tried.update(job.id for job in admitted)
        left = [job for job, _ in held]
    changes = []
    for job, reason in (*held, *behind):
        if job.reason != reason:
            # Who is before it changes often; that it waits is told once.
            again = all(text.startswith("waiting for its turn: ") for text in (job.reason, reason))
            told = () if again else (Event(Kind.WAITING, None, {"reason": reason}),)
            changes.append((job, JobUpdate(told, {"reason": reason})))
    write_all(ws, changes)
    return {job.id for job, _ in held}


def _in_the_way(ws: Workspace, job: JobRecord, closed: Mapping[str, Mapping[str, str]]) -> str:
    """Return a job that waits for all hosts that the queued *job* could run on, and whose turn is before it."""
    waited_for = closed.get(job.cluster)
    if not waited_for or not _asks_to_be_sent(job):
        return ""
    hosts = _candidates(ws, job)
    return waited_for[next(iter(hosts))] if hosts and hosts <= waited_for.keys() else ""


def _candidates(ws: Workspace, job: JobRecord) -> frozenset[str]:
    """Return the hosts that *job* could run on, were it alone; empty where they cannot be determined."""
    from orc.launchers.backends.base import SupportsPlacement

    if job.id not in ws.candidates:
        try:
            backend = ws.backend(job.cluster)
            hosts = backend.candidates(stored_spec(ws, job.id)) if isinstance(backend, SupportsPlacement) else ()
            ws.candidates[job.id] = frozenset(hosts)
        except LaunchError:
            return frozenset()  # its own turn says so
    return ws.candidates[job.id]


def _admit(
    ws: Workspace, jobs: Sequence[JobRecord], besides: Collection[str]
) -> tuple[list[JobRecord], list[tuple[JobRecord, str]]]:
    """Return the jobs that may go on, in turn, and those that may not, with the reasons."""
    if not any(_asks_to_be_sent(job) for job in jobs):
        return list(jobs), []
    admitted, held = [], []
    with ws.ledger.database.read() as connection:
        tx = Transaction(connection, ws.clock())
        starts = {name: read_head_starts(ws, tx, name) for name in {job.cluster for job in jobs} if _places(ws, name)}

        def turn_of(job: JobRecord) -> tuple[float, float, str]:
            head_start_s = starts.get(job.cluster, {}).get(job.owner, 0.0)
            return turn(job.created_at, job.priority, job.id, head_start_s=head_start_s)

        look = admission.Admission(ws, tx, [job for job in jobs if _asks_to_be_sent(job)], besides)
        for job in sorted(jobs, key=turn_of):
            if _asks_to_be_sent(job) and (hold := look.hold(job)):
                held.append((job, hold.reason))
            else:
                admitted.append(job)
    return admitted, held


def _asks_to_be_sent(job: JobRecord) -> bool:
    return job.state is JobState.QUEUED and job.cancel_requested_at is None


def _drive(ws: Workspace, job: JobRecord, report: PassReport) -> bool:
    """Finish an interrupted submission, or make the next attempt. True where the job waits for hosts."""
    if not claims.is_free(job.claim_owner, job.claim_expires_at, ws.clock(), claims.owner_is_gone):
        return False
    if not ws.ledger.claim(job, ws.owner, claims.TTL_S):
        return False
    try:
        # What was read before the claim may be old; what is read now stays, but for a request to cancel.
        current = ws.ledger.job(job.id)
        if current is not None and current.revision == job.revision:
            return _drive_claimed(ws, current)
    except LedgerError:
        raise
    except Conflict:
        pass  # somebody asked to cancel it just now; the next pass sees that
    except InputsUnavailable as error:
        steps.wait_for_room(ws, job, error.what)
    except LaunchError as error:
        what = error.reason if isinstance(error, OutOfReach) else error.what
        note_unreachable(ws, job.cluster, [job], what, report)
    except Exception as error:  # noqa: BLE001 - one backend's defect must not keep the others' jobs waiting
        note_unreachable(ws, job.cluster, [job], f"{type(error).__name__}: {error}", report)
    finally:
        ws.give_back(job.id)
    return False


def _drive_claimed(ws: Workspace, job: JobRecord) -> bool:
    attempt = job.attempt
    if attempt is not None and attempt.state is AttemptState.SUBMITTING:
        reason = "the submission was cut off before its result was stored"
        job = apply(ws, job, lambda _: True, lambda j, _: steps.ambiguous_update(j, reason))
        attempt = job.attempt
    if attempt is not None and attempt.state is AttemptState.AMBIGUOUS:
        job = _resolve(ws, job)
    if job.state not in (JobState.QUEUED, JobState.PREPARED):
        return False
    if job.cancel_requested_at is not None:
        _cancel_unsent(ws, job)
        return False
    return _send(ws, job)


def _send(ws: Workspace, job: JobRecord) -> bool:
    """Make the next attempt of a QUEUED job, or take up the one of a PREPARED job, and send it.

    True where it waits for hosts that others have, and not for those that cannot be used.
    """
    try:
        spec, snapshot, secrets = attempt_inputs(ws, job)
        if job.state is JobState.QUEUED and job.attempt is not None and job.attempt.handle:
            reap(ws.backend_of_attempt(job.cluster, job.owner, job.attempt), job)
        number = job.number + 1 if job.state is JobState.QUEUED else job.number
        planner = PlacementPlanner(ws, spec, snapshot, AttemptId(job.id, number), owner=job.owner)
        prepared = planner.prepare(job)
    except NoRoom as error:
        steps.wait_for_room(ws, job, planner.waiting_reason(error))
        return not planner.unusable
    except admission.Held as held:  # somebody else has just taken the last place
        steps.wait_for_room(ws, job, held.what)
        return False
    except BackendUnreachable as error:
        if ws.ledger.reservations(job_id=job.id):  # while it waits for one host, others may use the rest
            steps.wait_for_room(ws, job, delivery.waiting_for_host(error, job.cluster))
        raise
    except (LedgerError, InputsUnavailable):
        raise
    except OutOfReach as error:
        steps.wait_for_room(ws, job, f"{error.reason}, or `orc cancel` ends it")
        return False
    except LaunchError as error:
        where = f"{error.where}: " if error.where else ""
        _give_up(ws, job, f"cannot be started{' again' if job.number else ''}: {where}{error.what}")
        return False
    fault_point("prepared")
    delivery.send(ws, planner, prepared, secrets, progress=lambda _stage, _data: None, patient=True)
    return False


def _resolve(ws: Workspace, job: JobRecord) -> JobRecord:
    """Adopt what a cut-off submission left behind; let go of it once it is certainly not there."""
    if job.attempt is None:
        raise ValueError(f"{job.id} has no attempt to look for")
    backend = ws.backend_of_attempt(job.cluster, job.owner, job.attempt)
    given = [reservation.host for reservation in ws.ledger.reservations(job_id=job.id)]
    handle = backend.find(job.attempt.marker, given, complete=job.cancel_requested_at is None)
    visibility_s = backend.visibility_s
    sent_to = job.attempt.sent_to or ws.destination(job.cluster, job.owner, given)
    if handle is None and (visibility_s <= 0 or job.attempt.first_negative_at is not None):
        late_copies.expect(ws, job, given)  # before it is given up, so that nothing can come unexpected

    def change(current: JobRecord, now: float) -> JobUpdate:
        attempt = current.attempt
        if handle is not None:
            return steps.accepted(Kind.ADOPTED, current, handle, now, sent_to)
        first = attempt.first_negative_at if attempt else None
        if visibility_s > 0 and first is None:
            looked = Event(Kind.NOT_FOUND, current.number, {"look_again_for_s": visibility_s})
            return JobUpdate((looked,), {}, {"first_negative_at": now})
        if first is not None and now - first < visibility_s:
            return JobUpdate()
        waiting_reason = "the cut-off submission left nothing behind"
        released = Event(Kind.RELEASED, current.number, {"reason": waiting_reason})
        return JobUpdate((released,), {"reason": ""}, {"reason": "", **steps.UNSENT})

    def is_doubtful(current: JobRecord) -> bool:
        return current.attempt is not None and current.attempt.state is AttemptState.AMBIGUOUS

    return apply(ws, job, is_doubtful, change)


def _cancel_unsent(ws: Workspace, job: JobRecord) -> None:
    ended = apply(ws, job, lambda j: j.state in (JobState.QUEUED, JobState.PREPARED), update_for_early_cancel)
    if ended.state.terminal:
        job_secrets.remove(ws.state_dir, job.id)


def _give_up(ws: Workspace, job: JobRecord, reason: str) -> None:
    """There will be no further attempt, because it cannot even be prepared."""
    if job.state is JobState.PREPARED:
        steps.reject(ws, job, reason)
        return

    def change(_: JobRecord, now: float) -> JobUpdate:
        failed = Event(Kind.JOB_FAILED, None, {"cause": "launch", "reason": reason})
        return JobUpdate((failed,), {"reason": reason, "ended_at": now, "next_attempt_at": None})

    if apply(ws, job, lambda j: j.state is JobState.QUEUED, change).state.terminal:
        job_secrets.remove(ws.state_dir, job.id)
