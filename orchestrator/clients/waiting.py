"""Waiting for jobs over an open ledger: passes until they have ended."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from orc.orchestrator.api.jobs import get_job
from orc.orchestrator.ledger.lifecycle import JobState

if TYPE_CHECKING:
    from orc.orchestrator.api.session import LedgerSession
    from orc.orchestrator.views import JobView

# How often `wait` asks: a twentieth of the time it has waited, between these bounds (seconds). A machine that starts
# passes by itself is asked by reading its files, a cluster by running its commands.
_INTERVAL_HERE = (0.05, 2.0)
_INTERVAL_AWAY = (1.0, 10.0)
# An agent starts `orc tick` just before it is gone; for so long its attempt may still look alive.
_SETTLE_S = 5.0


def wait(
    session: LedgerSession,
    job_ids: Sequence[str],
    *,
    timeout_s: float | None = None,
    on_change: Callable[[JobView], None] | None = None,
) -> list[JobView]:
    """Run passes until all jobs have ended.

    Args:
        session: The open ledger.
        job_ids: Ids of the jobs.
        timeout_s: Seconds after which it returns anyway, even if a cluster does not answer.
        on_change: Called with each job at first, and whenever something about it has changed.

    Returns:
        The last views of the jobs, in the order of *job_ids*.

    Raises:
        JobNotFound: There is no such job.
    """
    ids = [session.record(job_id).id for job_id in job_ids]
    if timeout_s is None:
        from orc.orchestrator.ledger.polls import FRESH_S

        return _wait(session, ids, None, on_change, lambda _: session.refresh(ids, max_age_s=FRESH_S) is not None)
    from orc.orchestrator.engine.passes import BackgroundPasses

    with BackgroundPasses(session.clone) as passes:

        def run_pass(left: float) -> bool:
            session.reopen_ledger()
            if session.workspace.ledger.volatile:  # what another client sees is not written down
                return session.refresh(ids) is not None
            return passes.run(ids, left)

        return _wait(session, ids, timeout_s, on_change, run_pass)


def _wait(
    session: LedgerSession,
    ids: Sequence[str],
    timeout_s: float | None,
    on_change: Callable[[JobView], None] | None,
    run_pass: Callable[[float], bool],
) -> list[JobView]:
    ws = session.workspace
    began = last_change = ws.clock()
    revisions: dict[str, int] = {}
    while True:
        in_time = run_pass(began + timeout_s - ws.clock() if timeout_s is not None else 0.0)
        now = ws.clock()
        records = ws.ledger.jobs(ids)
        for record in records:
            if revisions.get(record.id) != record.revision:
                revisions[record.id] = record.revision
                last_change = now
                if on_change is not None:
                    on_change(get_job(session, record.id))
        waiting = [record for record in records if not record.state.terminal]
        if not waiting or not in_time or (timeout_s is not None and now - began >= timeout_s):
            return [get_job(session, job_id) for job_id in ids]
        shortest, longest = _interval(session, {record.cluster for record in waiting})
        pause = min(max(shortest, (now - last_change) / 20), longest)
        due = [record.next_attempt_at for record in waiting if record.next_attempt_at is not None]
        pause = min(pause, max(min(due, default=now + pause) - now, shortest / 10))
        if timeout_s is not None:
            pause = min(pause, max(began + timeout_s - now, 0.0))
        ws.sleep(pause)


def _interval(session: LedgerSession, clusters: set[str]) -> tuple[float, float]:
    return _INTERVAL_AWAY if session.is_remote(clusters) else _INTERVAL_HERE


def tick(session: LedgerSession, job_id: str) -> JobView:
    """Run one pass for an attempt that has ended, and wait for a retry that is due.

    Returns when the job has ended, or when an attempt is safely at the backend.
    """
    session.record(job_id)
    ws = session.workspace
    settled = ws.clock() + _SETTLE_S
    first = ws.ledger.job(job_id)
    attempts = first.number if first else 0
    while True:
        session.refresh([job_id])
        job = ws.ledger.job(job_id)
        if job is None or job.state.terminal:
            break
        now = ws.clock()
        at_backend = job.state in (JobState.PENDING, JobState.RUNNING)
        if at_backend and (job.number > attempts or now >= settled):
            break
        if not at_backend and job.next_attempt_at is None and now >= settled + 600.0:
            break  # a cluster that cannot be reached; the next command goes on
        # In slices, so that a job that is cancelled meanwhile is not waited for.
        ws.sleep(min(max((job.next_attempt_at or 0.0) - now, 0.2), 1.0))
    if job is not None and job.state.terminal:
        _start_waiting(session, job.cluster)
    return get_job(session, job_id)


def _start_waiting(session: LedgerSession, cluster: str) -> None:
    """Try once more to start the jobs that wait for what a job of this cluster has just given back.

    Nothing else would, where no service and no command looks after them.
    """
    ws = session.workspace
    for job in ws.ledger.active():
        while job.cluster == cluster and job.state is JobState.PREPARED and job.reason.startswith("waiting for "):
            due = job.next_attempt_at or 0.0
            if due <= ws.clock():
                session.refresh([job.id])
                break
            ws.sleep(min(due - ws.clock(), 1.0))  # in slices: others may start it, or cancel it
            job = ws.ledger.job(job.id) or job
