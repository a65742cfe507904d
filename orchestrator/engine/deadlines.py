"""Deadlines: the time at which a job is cancelled, running or queued. Pure."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING

from orc.launchers.errors import SpecError

if TYPE_CHECKING:
    from orc.orchestrator.ledger.records import JobRecord

ON_REQUEST = "on request"


def deadline_at(deadline: float | str | None, now: float) -> float | None:
    """Return the time that ``deadline:`` of a job submitted *now* means. Raises `SpecError` for one that has passed."""
    if deadline is None:
        return None
    if not isinstance(deadline, str):
        return now + deadline
    at = datetime.fromisoformat(deadline).timestamp()
    if at <= now:
        raise SpecError(f"its deadline, {deadline}, has passed already", hint="set another one: --set deadline=12h")
    return at


def has_passed(job: JobRecord, now: float) -> bool:
    """Return True for a live job whose deadline has passed and that is not cancelled yet."""
    return job.deadline_at is not None and job.deadline_at <= now and job.cancel_requested_at is None


def cancel_reason(job: JobRecord) -> str:
    """Return the reason that *job* is being cancelled."""
    asked, deadline = job.cancel_requested_at, job.deadline_at
    if asked is None or deadline is None or asked < deadline:
        return ON_REQUEST
    return f"its deadline has passed ({datetime.fromtimestamp(deadline, UTC):%Y-%m-%d %H:%M:%S} UTC)"
