"""Logs of jobs: the call that lists them, and their content over an open ledger."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from orc.launchers.attempts.logs import LogChunk, LogSelector
from orc.orchestrator.api.call import Bounds, JobId, call
from orc.orchestrator.api.rights import Kind
from orc.orchestrator.api.session import LedgerSession
from orc.orchestrator.clients.errors import JobNotFound
from orc.orchestrator.schema import View

if TYPE_CHECKING:
    from orc.launchers.backends.base import Backend, Handle

Attempt = Annotated[int | None, Bounds("Number of the attempt; the newest by default", ge=1, le=1 << 30)]


@dataclass(frozen=True)
class Logs(View):
    """Logs that an attempt has so far."""

    attempt: int
    logs: list[LogSelector]


@call("GET", "/jobs/{job_id}/logs", shows=Kind.LOGS, asks_clusters=True)
def list_logs(session: LedgerSession, job_id: JobId, attempt: Attempt = None) -> Logs:
    """Return the logs that an attempt has so far: ranks, then nodes, then the launcher's."""
    backend, handle = at_backend(session, job_id, attempt)
    return Logs(attempt or session.record(job_id).number or 1, backend.log_selectors(handle) if handle else [])


def read_log(
    session: LedgerSession, job_id: str, selector: LogSelector, attempt: int | None = None, offset: int = 0
) -> Iterator[LogChunk]:
    """Yield the content of one log as it is now, from *offset* on."""
    backend, handle = at_backend(session, job_id, attempt)
    return backend.logs(handle, selector, offset) if handle else iter(())


def at_backend(session: LedgerSession, job_id: str, number: int | None) -> tuple[Backend, Handle | None]:
    """Return the backend of a job, and the handle of one of its attempts there (the newest by default)."""
    from orc.launchers.backends.base import Handle

    ws = session.workspace
    job = session.record(job_id)
    attempts = {attempt.number: attempt for attempt in ws.ledger.attempts(job_id)}
    if number is not None and number not in attempts:
        raise JobNotFound(f"{job_id} has no attempt {number}", hint=f"it has {len(attempts)}")
    chosen = attempts.get(number or job.number)
    if chosen is None or not chosen.handle:
        return ws.backend_of_user(job.cluster, job.owner), None
    return ws.backend_of_attempt(job.cluster, job.owner, chosen), Handle.from_dict(chosen.handle)
