"""Cancelling jobs over an open ledger."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from orc.orchestrator.ledger.database import Conflict, LedgerError
from orc.orchestrator.ledger.lifecycle import Event, Kind

if TYPE_CHECKING:
    from orc.orchestrator.api.session import LedgerSession
    from orc.orchestrator.engine.steps import PassReport


def cancel(
    session: LedgerSession,
    job_ids: Sequence[str],
    *,
    grace_s: float | None = None,
    on_unreachable: Callable[[Mapping[str, str]], None] | None = None,
) -> None:
    """Cancel jobs. The request is durable first; those that have ended stay as they are.

    Args:
        session: The open ledger.
        job_ids: Ids of the jobs.
        grace_s: Seconds between SIGTERM and SIGKILL; the job's own grace by default.
        on_unreachable: Called with clusters that could not be reached, and the reasons; the next pass tries again.

    Raises:
        JobNotFound: There is no such job.
        LedgerError: The request could be neither stored nor sent.
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
        raise LedgerError(
            f"{', '.join(waiting)} cannot be cancelled now: {why or 'not at its cluster yet'}, "
            f"and the request cannot be stored: {ledger.volatile}",
            where=ledger.database.url.removeprefix("sqlite:///"),
            hint="free some space and try again",
        )


def request(session: LedgerSession, job_id: str, grace_s: float) -> None:
    """Write down that a job is to be cancelled; passes do it."""
    from orc.orchestrator.engine.submission import note_cancelled

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
