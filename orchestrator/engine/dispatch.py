"""Dispatch: each job that its cluster has not got yet is brought a step further, the first of the queue first.

Nothing else prepares attempts, places them and sends them: neither a first submission nor a retry nor an array. New
jobs of an array go to their cluster together, which runs so many of them at a time; each is as durable, and as sure to
run once, as a job by itself. Attempts that follow a failure are sent by themselves.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from orc.launchers.errors import BackendUnreachable, LaunchError, NoRoom
from orc.launchers.ids import AttemptId
from orc.orchestrator.engine import admission, delivery, job_secrets, orphans
from orc.orchestrator.engine.attempt_inputs import InputsUnavailable, attempt_inputs, stored_spec, stored_specs
from orc.orchestrator.engine.placement import PlacementPlanner, PreparedAttempt, RenderedPlan
from orc.orchestrator.engine.queueing import is_limited, queue_key, read_head_starts
from orc.orchestrator.engine.steps import (
    PassReport,
    Progress,
    apply,
    fault_point,
    note_unreachable,
    silent,
    what_of,
    write_all,
)
from orc.orchestrator.engine.updates import update_for_early_cancel
from orc.orchestrator.ledger import groups, leases
from orc.orchestrator.ledger.database import Conflict, LedgerError, batches
from orc.orchestrator.ledger.lifecycle import AttemptState, Event, JobState, Kind
from orc.orchestrator.ledger.records import JobRecord, JobUpdate
from orc.orchestrator.ledger.transaction import Transaction
from orc.orchestrator.workspace import OutOfReach, Workspace


@dataclass(frozen=True)
class NewJobs:
    """Jobs that this process has just enqueued and claimed: who is told of each step, and their rendered plans."""

    progress: Progress  # told of each step
    rendered: Mapping[str, RenderedPlan]  # by marker of the first attempt


def dispatch(ws: Workspace, jobs: Sequence[JobRecord], report: PassReport, new: NewJobs | None = None) -> set[str]:
    """Dispatch those of *jobs* that are not held back, in the order of the queue; note what the others wait for.

    One that could not be sent although it may be (its snapshot is elsewhere, there is no room) stops nobody: those that
    were held back while it was before them are looked at again. *new* jobs that a cluster which cannot be reached was
    to get have failed: their submitter is told so, and they do not start an hour later.

    Returns the ids of those that are held back at the end. Raises `LedgerError`; of *new* jobs, what a defect raises.
    """
    tried: set[str] = set()
    held: list[tuple[JobRecord, str]] = []
    behind: list[tuple[JobRecord, str]] = []
    closed: dict[str, dict[str, str]] = {}  # by cluster, hosts for which a job waits, and which
    left = list(jobs)
    while left:
        together = of_groups(ws, left)
        admitted, held = _admit(ws, left, tried, together)
        for jobs_at_once in _batches(ws, admitted, together):
            job = jobs_at_once[0]
            older = _in_the_way(ws, job, closed)
            if older:
                if not job.reason.startswith("waiting for"):
                    behind.append((job, f"waiting for room: {older} is older and waits for the same hosts"))
            elif _dispatch_batch(ws, jobs_at_once, report, new):
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
            events = () if again else (Event(Kind.WAITING, None, {"reason": reason}),)
            changes.append((job, JobUpdate(events, {"reason": reason})))
    write_all(ws, changes)
    return {job.id for job, _ in held}


def _batches(
    ws: Workspace, jobs: Sequence[JobRecord], together: Mapping[str, Collection[str]]
) -> Iterator[Sequence[JobRecord]]:
    """Yield *jobs* in their order, those that go *together* at the place of the first of them, as arrays."""
    found: dict[tuple[str, int], list[JobRecord]] = {}
    for job in jobs:
        array = job.group_id if job.group_id and job.id in together.get(job.group_id, ()) else None
        found.setdefault((array or job.id, job.number), []).append(job)
    for some in found.values():
        yield from batches(some, max(1, array_size(ws, some[0].cluster, len(some))) if len(some) > 1 else 1)


def _in_the_way(ws: Workspace, job: JobRecord, closed: Mapping[str, Mapping[str, str]]) -> str:
    """Return a job that waits for all hosts that the queued *job* could run on, and that is before it in the queue."""
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
            return frozenset()  # its own dispatch says so
    return ws.candidates[job.id]


def _admit(
    ws: Workspace, jobs: Sequence[JobRecord], besides: Collection[str], together: Collection[str]
) -> tuple[list[JobRecord], list[tuple[JobRecord, str]]]:
    """Return the jobs that may go on, in the order of the queue, and those that may not, with the reasons."""
    if not any(_asks_to_be_sent(job) for job in jobs):
        return list(jobs), []
    admitted, held = [], []
    with ws.ledger.database.read() as connection:
        tx = Transaction(connection, ws.clock())
        starts = {
            name: read_head_starts(ws, tx, name) for name in {job.cluster for job in jobs} if places_jobs(ws, name)
        }

        def key_of(job: JobRecord) -> tuple[float, float, str]:
            head_start_s = starts.get(job.cluster, {}).get(job.owner, 0.0)
            return queue_key(job.created_at, job.priority, job.id, head_start_s=head_start_s)

        look = admission.Admission(ws, tx, [job for job in jobs if _asks_to_be_sent(job)], besides, together)
        for job in sorted(jobs, key=key_of):
            if _asks_to_be_sent(job) and (hold := look.hold(job)):
                held.append((job, hold))
            else:
                admitted.append(job)
    return admitted, held


def _asks_to_be_sent(job: JobRecord) -> bool:
    return job.state is JobState.QUEUED and job.cancel_requested_at is None


def _dispatch_batch(ws: Workspace, jobs: Sequence[JobRecord], report: PassReport, new: NewJobs | None) -> bool:
    """Finish an interrupted submission, or make the next attempt; of several jobs, as one array.

    True where the job waits for hosts.
    """
    ids, cluster = [job.id for job in jobs], jobs[0].cluster
    if not new and not _claim(ws, jobs):
        return False
    try:
        # What was read before the claim may be old; what is read now stays, but for a request to cancel.
        current = jobs if new else ws.ledger.jobs(ids)
        if {job.id: job.revision for job in current} == {job.id: job.revision for job in jobs}:
            return _dispatch_claimed(ws, current, new or NewJobs(silent, {}))
    except LedgerError:
        raise
    except Conflict:
        pass  # it was cancelled just now; the next pass sees that
    except InputsUnavailable as error:
        for job in jobs:
            delivery.wait_for_room(ws, job, error.what)
    except delivery.Rejected as refusal:
        report.errors.update(dict.fromkeys(ids, refusal.error))
    except delivery.HostAway as away:
        if not new:
            note_unreachable(ws, cluster, jobs, away.error.what, report)
    except Exception as error:
        if not new:
            note_unreachable(ws, cluster, jobs, what_of(error), report)
        elif isinstance(error, LaunchError):
            report.errors.update(dict.fromkeys(ids, error))
            _reject(ws, ws.ledger.jobs(ids), error.what)
        else:
            raise
    finally:
        if not new:
            ws.give_back(*ids)
    return False


def _claim(ws: Workspace, jobs: Sequence[JobRecord]) -> bool:
    """Take all of *jobs*, or none."""
    if not all(leases.is_free(job.claim_owner, job.claim_expires_at, ws.clock()) for job in jobs):
        return False
    return ws.ledger.claim([job.id for job in jobs], ws.owner)


def _reject(ws: Workspace, jobs: Sequence[JobRecord], reason: str) -> None:
    for job in jobs:
        delivery.reject(ws, job, job_secrets.without_values(ws, job.id, reason))


def _dispatch_claimed(ws: Workspace, jobs: Sequence[JobRecord], new: NewJobs) -> bool:
    if len(jobs) > 1:
        return _send(ws, jobs, new)
    job, attempt = jobs[0], jobs[0].attempt
    if attempt is not None and attempt.state is AttemptState.SUBMITTING:
        reason = "the submission was cut off before its result was stored"
        job = apply(ws, job, lambda _: True, lambda j, _: delivery.ambiguous_update(j, reason))
        attempt = job.attempt
    if attempt is not None and attempt.state is AttemptState.AMBIGUOUS:
        job = _resolve(ws, job)
    if job.state not in _UNSENT:
        return False
    if job.cancel_requested_at is not None:
        apply(ws, job, lambda j: j.state in _UNSENT, update_for_early_cancel)
        return False
    if job.state is JobState.PREPARED and (reason := admission.hold_prepared(ws, job)):
        delivery.wait_for_room(ws, job, reason)
        return False
    return _send(ws, [job], new)


def _send(ws: Workspace, jobs: Sequence[JobRecord], new: NewJobs) -> bool:
    """Make the next attempt of a QUEUED job, or take up the one of a PREPARED job, and send it; of several, one array.

    True where it waits for hosts that others have, and not for those that cannot be used.
    """
    job = jobs[0]
    at_once = None
    try:
        spec, snapshot, secrets = attempt_inputs(ws, job)
        if job.state is JobState.QUEUED and job.attempt is not None and job.attempt.handle:
            from orc.orchestrator.engine.observing import reap

            reap(ws.backend_of_attempt(job.cluster, job.owner, job.attempt), job)
        number = job.number + 1 if job.state is JobState.QUEUED else job.number
        attempt = AttemptId(job.id, number)
        planner = PlacementPlanner(ws, spec, snapshot, attempt, job.owner, new.progress, new.rendered)
        if len(jobs) > 1:
            attempts, at_once = prepare(planner, jobs, secrets)
        else:
            attempts = [planner.prepare(job)]
    except NoRoom as error:
        delivery.wait_for_room(ws, job, planner.waiting_reason(error))
        return not planner.unusable
    except admission.Held as held:  # another process has just taken the last place
        for each in jobs:
            delivery.wait_for_room(ws, each, held.what)
        return False
    except BackendUnreachable as error:
        if ws.ledger.reservations(job_id=job.id):  # while it waits for one host, others may use the rest
            delivery.wait_for_room(ws, job, delivery.waiting_for_host(error, job.cluster))
        raise
    except (LedgerError, InputsUnavailable):
        raise
    except OutOfReach as error:
        for each in jobs:
            delivery.wait_for_room(ws, each, f"{error.reason}, or `orc cancel` ends it")
        return False
    except LaunchError as error:
        where = f"{error.where}: " if error.where else ""
        _reject(ws, jobs, f"cannot be started again: {where}{error.what}" if job.number else error.what)
        raise delivery.Rejected(error) from error
    fault_point("prepared")
    if len(attempts) > 1:
        delivery.deliver(ws, attempts, snapshot, secrets, at_once=at_once, progress=new.progress)
    else:
        delivery.send(ws, planner, attempts[0], secrets)
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
        orphans.expect(ws, job, given)  # before it is given up, so that nothing can come unexpected

    def change(current: JobRecord, now: float) -> JobUpdate:
        attempt = current.attempt
        if handle is not None:
            return delivery.accepted(Kind.ADOPTED, current, handle, now, sent_to)
        first = attempt.first_negative_at if attempt else None
        if visibility_s > 0 and first is None:
            looked = Event(Kind.NOT_FOUND, current.number, {"look_again_for_s": visibility_s})
            return JobUpdate((looked,), {}, {"first_negative_at": now})
        if first is not None and now - first < visibility_s:
            return JobUpdate()
        waiting_reason = "the cut-off submission left nothing behind"
        released = Event(Kind.RELEASED, current.number, {"reason": waiting_reason})
        return JobUpdate((released,), {"reason": ""}, {"reason": "", **delivery.UNSENT})

    def is_doubtful(current: JobRecord) -> bool:
        return current.attempt is not None and current.attempt.state is AttemptState.AMBIGUOUS

    return apply(ws, job, is_doubtful, change)


def places_jobs(ws: Workspace, cluster: str) -> bool:
    """Return True where orc chooses the hosts on *cluster*."""
    from orc.launchers.backends.base import SupportsPlacement

    try:
        return isinstance(ws.backend(cluster), SupportsPlacement)
    except LaunchError:
        return False  # the dispatch of its jobs says what is wrong with the cluster


KINDS = ("sweep", "array", "map")  # of groups
_SMALL = 100  # elements: clusters take an array of so many
_UNSENT = (JobState.QUEUED, JobState.PREPARED)  # by the number of the newest attempt
# What the jobs of one array may differ in.
_OF_PROGRAM = frozenset({"name", "script", "module", "command", "args", "env", "tags", "runtime", "checkpoint"})


def of_groups(ws: Workspace, jobs: Sequence[JobRecord]) -> dict[str, list[str]]:
    """Return those of *jobs* that are to be sent together, by group: of one with a limit, all that is left of it.

    They have no attempt yet, or their first one, of an array that could not be sent: not in one array with the others.
    """
    waiting: dict[str, dict[int, list[JobRecord]]] = defaultdict(lambda: defaultdict(list))
    for job in jobs:
        if job.group_id and job.number < 2 and job.state is _UNSENT[job.number] and job.cancel_requested_at is None:
            waiting[job.group_id][job.number].append(job)
    found: dict[str, list[str]] = {}
    for group_id, by_number in waiting.items():
        for members in by_number.values():
            if len(members) > 1 and _are_array(ws, group_id, members):
                found.setdefault(group_id, []).extend(job.id for job in members)
    return found


def _are_array(ws: Workspace, group_id: str, jobs: Sequence[JobRecord]) -> bool:
    first = jobs[0]
    if any((job.cluster, job.owner, job.digests) != (first.cluster, first.owner, first.digests) for job in jobs):
        return False
    size = array_size(ws, first.cluster, len(jobs))
    if size < 2 or not all(_is_to_be_had(ws, job) for job in jobs):
        return False
    ids = [job.id for job in jobs]
    with ws.ledger.database.read() as connection:
        group = groups.find(connection, group_id)
        if group is None or group.kind not in KINDS or groups.dependencies_of(connection, ids):
            return False
        # Each of several arrays would run that many: then orc itself keeps the limit, job by job.
        others = groups.under_way(connection, group_id) - (len(jobs) if first.number else 0)
        if group.max_parallel is not None and (size < len(jobs) or others):
            return False
    return are_alike(spec for _, spec in ws.ledger.specs(ids))


def _is_to_be_had(ws: Workspace, job: JobRecord) -> bool:
    if job.not_before is not None and job.not_before > ws.clock():
        return False
    return job.claim_owner == ws.owner or leases.is_free(job.claim_owner, job.claim_expires_at, ws.clock())


def array_size(ws: Workspace, cluster: str, count: int) -> int:
    """Return how many of *count* jobs *cluster* takes as one array; 0 where each has to be sent by itself."""
    from orc.launchers.backends.base import SupportsArrays

    try:
        backend = ws.backend(cluster)
        if not isinstance(backend, SupportsArrays) or is_limited(ws, cluster):
            return 0
        most = backend.most_elements() if count > _SMALL else None
        return count if most is None else min(count, most)
    except BackendUnreachable:
        return min(count, _SMALL)  # their dispatch says so, once
    except LaunchError:
        return 0  # the dispatch of its jobs says what is wrong with the cluster


def are_alike(specs: Iterable[Mapping[str, Any]]) -> bool:
    """Return True for the specifications of jobs that ask their cluster for the same."""
    asked = ({key: value for key, value in spec.items() if key not in _OF_PROGRAM} for spec in specs)
    first = next(asked)
    return all(other == first for other in asked)


def prepare(
    planner: PlacementPlanner, jobs: Sequence[JobRecord], secrets: Mapping[str, str]
) -> tuple[list[PreparedAttempt], int | None]:
    """Return the PREPARED first attempts of *jobs*, made in one transaction, and how many of them may run at a time.

    *planner* is that of the first one, *secrets* are its. Those that have others are left to the next pass. Raises
    what `PlacementPlanner.prepare` raises.
    """
    ws = planner.ws
    members = [(jobs[0], planner)]
    others = [job for job in jobs[1:] if job_secrets.load_for(ws, job.id, planner.spec.secrets) == secrets]
    firsts = {job.id: AttemptId(job.id, 1) for job in others}
    # Those that this process has rendered need no specification any more.
    specs = stored_specs(ws, [job_id for job_id, first in firsts.items() if first.marker not in planner.rendered])
    members += [(job, replace(planner, spec=specs.get(job.id, planner.spec), attempt=firsts[job.id])) for job in others]
    plans = [each.render(None) for _, each in members]
    planner.check(plans[0], None)
    group_id = str(jobs[0].group_id)
    with ws.ledger.transaction() as tx:
        group = groups.find(tx.connection, group_id)
        prepared = [job for job, _ in members]
        if jobs[0].state is JobState.QUEUED:
            admission.admit(ws, tx, prepared, together=[group_id])
            prepared = tx.prepare_all([(job, p.marker, p.digest) for job, p in zip(prepared, plans, strict=True)])
    attempts = [PreparedAttempt(plan, None, job) for job, plan in zip(prepared, plans, strict=True)]
    return attempts, group.max_parallel if group is not None else None
