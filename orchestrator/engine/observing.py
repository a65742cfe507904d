"""Observing: cancellations are passed on, each cluster is polled once for all its jobs, the answers are stored.

Where users have accounts of their own, it is asked once for each account, about the jobs of its owner.

A cluster that is asked over a network is asked by one process at a time, and not more often than its interval says
(`orc.orchestrator.ledger.polls`); the lease and the interval are its row of ``cluster_polls``.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from orc.launchers.errors import LaunchError, PartlyUnreachable
from orc.launchers.ids import AttemptId
from orc.orchestrator.engine import job_secrets, log_rules
from orc.orchestrator.engine.attempt_inputs import attempt_inputs
from orc.orchestrator.engine.placement import PlacementPlanner
from orc.orchestrator.engine.steps import PassReport, fault_point, note_unreachable, what_of, write_all
from orc.orchestrator.engine.updates import retry_cause, retry_policy, update_from_observation
from orc.orchestrator.ledger import leases, polls
from orc.orchestrator.ledger.database import LedgerError
from orc.orchestrator.ledger.lifecycle import AttemptState, Event, Kind
from orc.orchestrator.ledger.records import JobRecord, JobSize, JobUpdate
from orc.orchestrator.workspace import Access, Workspace

if TYPE_CHECKING:
    from orc.launchers.backends.base import Backend, Handle, Observation
    from orc.orchestrator.engine.log_rules import LogMatch

SEEN_EVERY_S = 10.0  # so often the ledger is told that a job was seen although nothing about it has changed
_STEPS = 5  # of one attempt in one pass, while its machines are being made
_ANSWER_S = 15.0  # for which a person waits for the answer that another process is getting
_LOOK_S = 0.2
_MOST_POLLS = 40  # of a cluster in one pass, to find the few jobs for which polling breaks


@dataclass(frozen=True)
class Urgency:
    """Urgency of a pass: *max_age_s* of an answer that is good enough, `None` for "when it is time"."""

    max_age_s: float | None = 0.0
    some_jobs: bool = False  # it is about some jobs, not about everything


def poll_all(ws: Workspace, jobs: Iterable[JobRecord], report: PassReport, urgency: Urgency) -> None:
    """Poll the clusters of *jobs* for those that they have, and store the answers."""
    for access, there in _by_access(ws, jobs, report).items():
        if ws.ledger.volatile or not _needs_lease(ws, access.cluster, urgency):
            _poll_cluster(ws, access, there, report)
        else:
            _poll_with_lease(ws, access, there, report, urgency)


def _by_access(ws: Workspace, jobs: Iterable[JobRecord], report: PassReport) -> dict[Access, list[JobRecord]]:
    """Return the jobs that are at their clusters; note those whose users have lost their account there."""
    found: dict[Access, list[JobRecord]] = defaultdict(list)
    without: dict[tuple[str, str], list[JobRecord]] = defaultdict(list)
    for job in jobs:
        if job.attempt is None or not job.attempt.handle or job.attempt.state.terminal:
            continue
        try:
            found[ws.access(job.cluster, job.owner, job.attempt.sent_to)].append(job)
        except Exception as error:  # noqa: BLE001 - one backend's defect must not keep the others' jobs waiting
            without[job.cluster, what_of(error)].append(job)
    for (cluster, what), those in without.items():
        note_unreachable(ws, cluster, those, what, report)
    return found


def _needs_lease(ws: Workspace, cluster: str, urgency: Urgency) -> bool:
    """Return True for a cluster that one process polls for all.

    A look at some jobs of hosts asks those hosts alone: another one, that does not answer, is not waited for.
    """
    from orc.launchers.backends.base import SupportsPlacement

    try:
        backend = ws.backend(cluster)
    except LaunchError:
        return False  # asking it says what is wrong with it
    return not backend.self_driving and not (urgency.some_jobs and isinstance(backend, SupportsPlacement))


def _poll_with_lease(
    ws: Workspace, access: Access, jobs: list[JobRecord], report: PassReport, urgency: Urgency
) -> None:
    cluster = access.cluster
    jobs = _cancel_at(ws, access, jobs, report)
    before = _poll_of(ws, access)
    moved_at = max(job.updated_at for job in jobs)
    if not polls.is_due(before, ws.clock(), moved_at=moved_at, max_age_s=urgency.max_age_s):
        if before is not None and before.error:
            report.unreachable.setdefault(cluster, before.error)
        return
    if not _take_lease(ws, access):
        if urgency.max_age_s is not None:
            _await_answer(ws, access, before, report)
        return
    done: polls.ClusterPoll | None = None
    try:
        last = _poll_of(ws, access) or polls.ClusterPoll(cluster)
        if last.polled_at != (before.polled_at if before else None) and not polls.is_due(
            last, ws.clock(), moved_at=moved_at, max_age_s=urgency.max_age_s
        ):
            return  # another process was faster
        everything = _by_access(ws, ws.ledger.active(cluster=cluster), PassReport())[access]
        own = PassReport()
        changed = _poll_cluster(ws, access, everything, own)
        now, error = ws.clock(), own.unreachable.get(cluster)
        report.unreachable.update(own.unreachable)
        interval = polls.next_interval(last.interval_s or 0.0, changed=changed, failed=error is not None)
        done = polls.ClusterPoll(
            cluster,
            next_at=now + polls.spread(interval, random.random()),  # noqa: S311
            interval_s=interval,
            polled_at=now,
            answered_at=last.answered_at if error else now,
            error=error,
            account=access.account,
        )
    finally:
        with ws.ledger.database.write() as connection:
            if done is None:
                polls.release(connection, cluster, ws.owner, access.account)
            else:
                polls.record(connection, done, ws.owner)


def _poll_of(ws: Workspace, access: Access) -> polls.ClusterPoll | None:
    with ws.ledger.database.read() as connection:
        return polls.find(connection, access.cluster, access.account)


def _take_lease(ws: Workspace, access: Access) -> bool:
    cluster, account = access.cluster, access.account
    with ws.ledger.database.write() as connection:
        return polls.take_lease(connection, cluster, ws.owner, ws.clock(), polls.LEASE_S, account)


def _await_answer(ws: Workspace, access: Access, before: polls.ClusterPoll | None, report: PassReport) -> None:
    """Wait until the process that polls the cluster at this moment has its answer."""
    until = ws.clock() + _ANSWER_S
    while ws.clock() < until:
        now = _poll_of(ws, access)
        if now is None or now.polled_at != (before.polled_at if before else None) or now.lease_owner is None:
            if now is not None and now.error:
                report.unreachable.setdefault(access.cluster, now.error)
            return
        ws.sleep(_LOOK_S)


def _cancel_at(ws: Workspace, access: Access, jobs: list[JobRecord], report: PassReport) -> list[JobRecord]:
    """Pass requests to cancel on; that needs no lease, and waits for none."""
    try:
        return _cancel(ws, ws.open(access), jobs, report)
    except LedgerError:
        raise
    except Exception as error:  # noqa: BLE001 - one backend's defect must not keep the others' jobs waiting
        note_unreachable(ws, access.cluster, jobs, what_of(error), report)
    return jobs


def _poll_cluster(ws: Workspace, access: Access, jobs: list[JobRecord], report: PassReport) -> bool:
    """Send cancellations, poll the cluster once for all its jobs, and store the observations; True if some are new."""
    handles = _handles(ws, jobs)
    try:
        backend = ws.open(access)
        jobs = _cancel(ws, backend, jobs, report)
        seen = _seen(ws, backend, jobs, handles)
    except LedgerError:
        raise
    except Exception as error:  # noqa: BLE001 - one backend's defect must not keep the others' jobs waiting
        note_unreachable(ws, access.cluster, jobs, what_of(error), report)
        return False
    answers = [(job, seen[handles[job.id]]) for job in jobs if handles[job.id] in seen]
    changed, all_lost = _write(ws, backend, answers)
    if ws.ledger.volatile:
        return changed
    _note_seen(ws, answers)
    for lost in all_lost:
        _end_leftovers(ws, backend, lost, report)
    for job, answer in answers:
        if answer.due:
            _advance(ws, backend, job.id, handles[job.id], report)
    return changed or any(answer.due for _, answer in answers)


def _handles(ws: Workspace, jobs: Sequence[JobRecord]) -> dict[str, Handle]:
    """Return the handles of *jobs* by id, with the number of nodes that their plans have."""
    from orc.launchers.backends.base import Handle

    handles = {job.id: Handle.from_dict(job.attempt.handle) for job in jobs if job.attempt and job.attempt.handle}
    for job_id, spec in ws.ledger.specs([job_id for job_id in handles if job_id not in ws.sizes]):
        ws.sizes[job_id] = JobSize.of(spec)
    return {job_id: replace(handle, nodes=ws.sizes[job_id].nodes) for job_id, handle in handles.items()}


def _seen(
    ws: Workspace, backend: Backend, jobs: Sequence[JobRecord], handles: Mapping[str, Handle]
) -> dict[Handle, Observation]:
    """Poll all *jobs* at once; where that breaks, in halves: what one of them has left keeps no other one waiting.

    Raises what polling raises when nothing could be seen.
    """
    seen: dict[Handle, Observation] = {}
    parts, broken, asked = [jobs], list[tuple[Sequence[JobRecord], Exception]](), 0
    while parts:
        part = parts.pop()
        asked += 1
        try:
            seen.update(backend.poll([handles[job.id] for job in part]))
        except LaunchError:
            raise
        except Exception as error:  # noqa: BLE001 - a program in a job's account can write anything for us to read
            if len(part) > 1 and asked < _MOST_POLLS:
                parts += [part[: len(part) // 2], part[len(part) // 2 :]]
            else:
                broken.append((part, error))
    if broken and not seen:
        raise broken[0][1]
    for part, why in broken:  # the cluster can be reached
        note_unreachable(ws, part[0].cluster, part, f"{type(why).__name__}: {why}", PassReport())
    return seen


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


def _cancel(ws: Workspace, backend: Backend, jobs: list[JobRecord], report: PassReport) -> list[JobRecord]:
    due: dict[float, list[JobRecord]] = defaultdict(list)
    for job in jobs:
        if job.cancel_requested_at is not None and job.attempt and job.attempt.cancel_sent_at is None:
            due[job.cancel_grace_s or 0.0].append(job)
    sent: dict[str, JobRecord] = {}
    for grace_s, group in due.items():
        handles = _handles(ws, group)
        try:
            backend.cancel([handles[job.id] for job in group], timedelta(seconds=grace_s))
        except PartlyUnreachable as error:  # it is tried again with every pass, and keeps nobody else waiting
            unreached = [job for job in group if handles[job.id].marker in error.markers]
            note_unreachable(ws, group[0].cluster, unreached, error.what, report)
            group = [job for job in group if job not in unreached]
        at = ws.clock()
        passed_on = [
            (job, JobUpdate((Event(Kind.CANCEL_SENT, job.number),), {}, {"cancel_sent_at": at})) for job in group
        ]
        sent.update(write_all(ws, passed_on))
    return [sent.get(job.id, job) for job in jobs]


def _write(
    ws: Workspace, backend: Backend, answers: Iterable[tuple[JobRecord, Observation]]
) -> tuple[bool, list[JobRecord]]:
    """Write what was seen. Returns whether something new was, and the jobs whose attempt is lost."""
    answers = list(answers)
    ended = ws.ledger.specs([job.id for job, seen in answers if seen.phase.ended])
    specs = {job_id: {key: spec.get(key) for key in ("retry", "secrets")} for job_id, spec in ended}
    updates = [(job, _update_from(ws, backend, job, seen, specs.get(job.id))) for job, seen in answers]
    written = write_all(ws, updates)
    # The steps that a rank has taken are no news about where its job stands.
    changed = any(update.events or "reason" in update.job_set for _, update in updates)
    return changed, [job for job in written.values() if job.attempt and job.attempt.state is AttemptState.LOST]


def _update_from(
    ws: Workspace, backend: Backend, job: JobRecord, seen: Observation, spec: Mapping[str, Any] | None
) -> JobUpdate:
    """Return what follows from *seen*. *spec* has the policy of retries and the secrets of a job that has ended."""
    if spec is None:
        return update_from_observation(job, seen, ws.clock())
    attempts = ws.ledger.attempts(job.id)[: job.number - 1] if job.number > 1 else []
    change = update_from_observation(
        job,
        seen,
        ws.clock(),
        policy=retry_policy(spec),
        earlier=[retry_cause(a.cause or "", (a.exit or {}).get("ranks", {})) for a in attempts],
        logged=_logged(backend, job, spec, seen),
        loss_window_s=backend.loss_window_s,
    )
    if not spec["secrets"]:
        return change
    said = ([event.data for event in change.events], change.job_set, change.attempt_set)
    data, job_set, attempt_set = job_secrets.without_values(ws, job.id, said)
    events = tuple(replace(event, data=clean) for event, clean in zip(change.events, data, strict=True))
    return replace(change, events=events, job_set=job_set, attempt_set=attempt_set)


def _logged(backend: Backend, job: JobRecord, spec: Mapping[str, Any], seen: Observation) -> LogMatch | None:
    """Return the line of a failed attempt's logs for which its job has a rule."""
    from orc.launchers.backends.base import Cause, Handle, Phase

    rules = spec["retry"].get("on_log")
    failed = seen.phase in (Phase.FAILED, Phase.LOST) and seen.cause not in (Cause.PREEMPTED, Cause.CANCELLED)
    if not rules or not failed or job.cancel_requested_at is not None or job.attempt is None or not job.attempt.handle:
        return None
    return log_rules.match(rules, backend, Handle.from_dict(job.attempt.handle), seen.exit, seen.hosts)


def _advance(ws: Workspace, backend: Backend, job_id: str, handle: Handle, report: PassReport) -> None:
    """Let the backend take the next step of an attempt whose machines are being made, and write down what it saw."""
    from orc.launchers.backends.base import SupportsProvisioning

    job = ws.ledger.job(job_id)
    if job is None or job.attempt is None or job.attempt.state.terminal or job.attempt.marker != handle.marker:
        return
    if job.cancel_requested_at is not None or not isinstance(backend, SupportsProvisioning):
        return
    if not leases.is_free(job.claim_owner, job.claim_expires_at, ws.clock()) or not ws.ledger.claim([job.id], ws.owner):
        return
    try:
        spec, snapshot, secrets = attempt_inputs(ws, job)
        plan = PlacementPlanner(ws, spec, snapshot, AttemptId(job.id, job.number), owner=job.owner).render(None)
        last_reason = ""
        for _ in range(_STEPS):
            fault_point("advancing")
            seen = backend.advance(handle, plan, secrets)
            fault_point("advanced")
            if current := ws.ledger.job(job_id):
                for lost in _write(ws, backend, [(current, seen)])[1]:
                    _end_leftovers(ws, backend, lost, report)
            if not seen.due or seen.reason == last_reason:  # what has to be waited for says the same again
                break
            last_reason = seen.reason
    except LedgerError:
        raise
    except Exception as error:  # noqa: BLE001 - one backend's defect must not keep the others' jobs waiting
        note_unreachable(ws, job.cluster, [job], what_of(error), report)
    finally:
        ws.give_back(job_id)


def _end_leftovers(ws: Workspace, backend: Backend, job: JobRecord, report: PassReport) -> None:
    try:
        reap(backend, job)
    except LaunchError as error:
        # It is tried again before the next attempt, if there is one.
        report.unreachable.setdefault(job.cluster, error.what)


def reap(backend: Backend, job: JobRecord) -> None:
    """Let the backend end what the previous attempt may have left running, so that two attempts never overlap."""
    from orc.launchers.backends.base import Handle

    if job.attempt is not None and job.attempt.handle:
        backend.reap(Handle.from_dict(job.attempt.handle))
