"""Reconciler: a stateless pass that brings every live job a step further. Any `orc` command may run it.

Two passes at once are safe: side effects need the job's claim, and every write names the revision of the job that it
was decided on. No transaction holds I/O. A backend that cannot be asked never makes a job fail.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from orc.launchers.errors import LaunchError
from orc.orchestrator.engine import admission, job_secrets, orphans, schedules, updates
from orc.orchestrator.engine.dispatch import dispatch, places_jobs
from orc.orchestrator.engine.job_copies import note_cancelled
from orc.orchestrator.engine.observing import Urgency, poll_all
from orc.orchestrator.engine.steps import PassReport, write_all
from orc.orchestrator.ledger.lifecycle import ACTIVE_JOB, Event, JobState, Kind
from orc.orchestrator.ledger.records import JobRecord, JobUpdate
from orc.orchestrator.workspace import Workspace


def reconcile(
    ws: Workspace,
    job_ids: Sequence[str] | None = None,
    *,
    cluster: str | None = None,
    patience_s: float = 0.0,
    max_age_s: float | None = 0.0,
) -> PassReport:
    """Run one pass over the live jobs (of *job_ids* or of *cluster*, if given): every step that is due is taken.

    For *patience_s* a step is left to the job's own agents, where its cluster starts passes by itself. A cluster
    that is asked over a network is not asked again while its last answer is younger than *max_age_s*; with `None` it is
    asked when its interval has passed. While the ledger cannot be written, the pass only looks and cancels: nothing is
    started that would be forgotten. Raises `LedgerError` only.
    """
    ws.forget()
    report = PassReport()
    urgency = Urgency(max_age_s, some_jobs=job_ids is not None)

    def live(states: Collection[JobState] = ACTIVE_JOB) -> list[JobRecord]:
        """Return the jobs that have not ended; those that can no longer start are cancelled now."""
        found = ws.ledger.active(job_ids, cluster, states)
        changed = not ws.ledger.volatile and admission.cancel_impossible(ws, found)
        return ws.ledger.active(job_ids, cluster, states) if changed else found

    if ws.ledger.volatile:
        poll_all(ws, live(), report, urgency)
        return report
    if job_ids is not None:
        job_ids = admission.with_relatives(ws, job_ids)
    else:
        schedules.fire_due(ws)
    jobs = live()
    if _cancel_overdue(ws, jobs):
        jobs = live()

    def is_due(job: JobRecord) -> bool:
        return _needs_dispatch(job, ws.clock()) and not (patience_s and _is_left_to_agents(ws, job, patience_s))

    due = [job for job in jobs if is_due(job)]
    clusters = {job.cluster for job in due}
    crowded = {name for name in clusters if places_jobs(ws, name) or ws.limits(name) is not None}
    if crowded and job_ids is not None:
        # Who waits for room has to know who has left it, and to let those go first that are before it in the queue.
        asked = set(job_ids)
        job_ids = [job.id for job in ws.ledger.active() if job.id in asked or job.cluster in crowded]
    held = dispatch(ws, [job for job in due if job.cluster not in crowded], report)
    if due:
        jobs = live()
    poll_all(ws, jobs, report, urgency)
    # Those whose hosts have just become free or whose attempt has just ended, and those that were left for that.
    dispatched = {job.id for job in due if job.cluster not in crowded} - held
    dispatch(ws, [job for job in live(_UNSENT) if job.id not in dispatched and is_due(job)], report)
    if job_ids is None:
        orphans.end_due(ws, report, cluster)
    job_secrets.sweep(ws.state_dir, lambda job_id: _is_active(ws, job_id))
    return report


def _cancel_overdue(ws: Workspace, jobs: Sequence[JobRecord]) -> bool:
    """Request the cancellation of jobs whose deadline has passed; True if there are some."""
    now = ws.clock()
    overdue = [job for job in jobs if updates.has_passed(job, now)]
    changes = []
    for job in overdue:
        grace_s = float(ws.ledger.spec(job.id)["grace"])
        asked = Event(Kind.CANCEL_REQUESTED, None, {"grace_s": grace_s, "reason": "deadline"})
        wish = {"cancel_requested_at": now, "cancel_grace_s": grace_s}
        changes.append((job, JobUpdate((asked,), wish, {"cancel_sent_at": None})))
    for job_id in write_all(ws, changes):
        note_cancelled(ws.state_dir, job_id)
    return bool(overdue)


def _is_active(ws: Workspace, job_id: str) -> bool | None:
    job = ws.ledger.job(job_id)
    if job is None:
        return True if schedules.is_kept(ws, job_id) else None
    return not job.state.terminal


_UNSENT = (JobState.QUEUED, JobState.PREPARED, JobState.SUBMITTING)


def _needs_dispatch(job: JobRecord, now: float) -> bool:
    if job.state in (JobState.QUEUED, JobState.PREPARED):
        return job.cancel_requested_at is not None or (job.next_attempt_at or 0.0) <= now
    return job.state in _UNSENT


def _is_left_to_agents(ws: Workspace, job: JobRecord, patience_s: float) -> bool:
    """Return True while the agents of *job*, which have its submission's environment, may still run it again."""
    if job.state is not JobState.QUEUED or not job.number:
        return False
    try:
        own = ws.backend(job.cluster).self_driving
    except LaunchError:
        return False  # its dispatch says what is wrong with the cluster
    return own and ws.clock() < max(job.next_attempt_at or 0.0, job.updated_at) + patience_s
