"""Ends of jobs over an open ledger: cancelling them, and waiting for them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING

from orc.orchestrator.ledger.database import Conflict, LedgerError
from orc.orchestrator.ledger.lifecycle import Event, JobState, Kind

if TYPE_CHECKING:
    from orc.orchestrator.api.session import LedgerSession
    from orc.orchestrator.engine.passes import BackgroundPasses
    from orc.orchestrator.engine.steps import PassReport
    from orc.orchestrator.views import JobView


def cancel(
    session: LedgerSession,
    job_ids: Sequence[str],
    *,
    grace_s: float | None = None,
    on_unreachable: Callable[[Mapping[str, str]], None] | None = None,
) -> None:
    """Cancel jobs, as `JobsClient.cancel`. The request is durable first.

    Raises `JobNotFound`, and `LedgerError` where the request could be neither stored nor sent.
    """
    ids = [session.record(job_id).id for job_id in job_ids]
    session.reopen_ledger()
    ledger = session.workspace.ledger
    for job_id in ids:
        request(session, job_id, float(ledger.spec(job_id)["grace"]) if grace_s is None else grace_s)
    report = session.refresh(ids)
    if ledger.volatile:
        _check_cancelled(session, ids, report)
    if report.unreachable and on_unreachable:
        on_unreachable(report.unreachable)


def _check_cancelled(session: LedgerSession, ids: Sequence[str], report: PassReport) -> None:
    """Raise `LedgerError` for a cancellation that is neither stored nor sent to the cluster."""
    ledger = session.workspace.ledger
    waiting = [job.id for job in ledger.active(ids) if job.attempt is None or job.attempt.cancel_sent_at is None]
    if waiting:
        why = "; ".join(f"{cluster}: {text}" for cluster, text in report.unreachable.items())
        what = f"{', '.join(waiting)} cannot be cancelled now: {why or 'not at its cluster yet'}"
        where = ledger.database.url.removeprefix("sqlite:///")
        what += f", and the request cannot be stored: {ledger.volatile}"
        raise LedgerError(what, where=where, hint="free some space and try again")


def request(session: LedgerSession, job_id: str, grace_s: float) -> None:
    """Write down that a job is to be cancelled; passes do it."""
    from orc.orchestrator.engine.job_copies import note_cancelled

    while True:
        try:
            with session.workspace.ledger.transaction(durable=False) as tx:
                job = tx.find(job_id)
                if job is None or job.state.terminal:
                    return
                tx.record(
                    job,
                    Event(Kind.CANCEL_REQUESTED, None, {"grace_s": grace_s}),
                    job_set={"cancel_requested_at": tx.now, "cancel_grace_s": grace_s},
                    # A second request may come with another grace: it is passed on as well.
                    attempt_set={"cancel_sent_at": None},
                )
            note_cancelled(session.workspace.state_dir, job_id)
            return
        except Conflict:
            continue


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
    """Run passes until all jobs have ended, as `JobsClient.wait`. Raises `JobNotFound`."""
    from orc.orchestrator.engine.passes import BackgroundPasses

    ws = session.workspace
    ids = [session.record(job_id).id for job_id in job_ids]
    began = last_change = ws.clock()
    revisions: dict[str, int] = {}
    # With a limit another thread runs the passes: a cluster that does not answer may take longer.
    with BackgroundPasses(session.clone) if timeout_s is not None else nullcontext() as passes:
        while True:
            left_s = began + timeout_s - ws.clock() if timeout_s is not None else 0.0
            in_time = _run_pass(session, ids, passes, left_s)
            now = ws.clock()
            records = ws.ledger.jobs(ids)
            for record in records:
                if revisions.get(record.id) != record.revision:
                    revisions[record.id] = record.revision
                    last_change = now
                    if on_change is not None:
                        on_change(session.job(record.id))
            waiting = [record for record in records if not record.state.terminal]
            if not waiting or not in_time or (timeout_s is not None and now - began >= timeout_s):
                return [session.job(job_id) for job_id in ids]
            away = session.is_remote({record.cluster for record in waiting})
            shortest, longest = _INTERVAL_AWAY if away else _INTERVAL_HERE
            pause = min(max(shortest, (now - last_change) / 20), longest)
            due = [record.next_attempt_at for record in waiting if record.next_attempt_at is not None]
            pause = min(pause, max(min(due, default=now + pause) - now, shortest / 10))
            if timeout_s is not None:
                pause = min(pause, max(began + timeout_s - now, 0.0))
            ws.sleep(pause)


def _run_pass(session: LedgerSession, ids: Sequence[str], passes: BackgroundPasses | None, left_s: float) -> bool:
    """Run a pass; return whether it has ended within *left_s* seconds, where *passes* runs it."""
    from orc.orchestrator.ledger.polls import FRESH_S

    if passes is None:
        session.refresh(ids, max_age_s=FRESH_S)
        return True
    session.reopen_ledger()
    if session.workspace.ledger.volatile:  # what another client sees is not written down
        session.refresh(ids)
        return True
    return passes.run(ids, left_s)


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
    return session.job(job_id)


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
