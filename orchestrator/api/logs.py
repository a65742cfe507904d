"""Logs of jobs: the call that lists them, and their content over an open ledger."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from orc.launchers.attempts.records import LogChunk, LogSelector
from orc.launchers.errors import BackendUnreachable, SpecError
from orc.orchestrator.api.call import Bounds, JobId, JobNotFound, Kind, call
from orc.orchestrator.api.session import LedgerSession
from orc.orchestrator.views import View

if TYPE_CHECKING:
    from orc.launchers.backends.base import Backend, Handle

_MOST_RANKS = 512
_MERGED_BYTES = 512 << 10  # of all ranks in one answer ...
_RANK_BYTES = 4 << 10  # ... but so many of each at least
_MOST_TEXT = 4000  # characters of a line
_POSITIONS = re.compile(r"([0-9]{1,9}:[0-9]{1,18}(,|$))*")  # by rank
Attempt = Annotated[int | None, Bounds("Number of the attempt; the newest by default", ge=1, le=1 << 30)]


@dataclass(frozen=True)
class Logs(View):
    """Logs that an attempt has so far."""

    attempt: int
    logs: list[LogSelector]
    unreachable: Mapping[str, str] = field(default_factory=dict)  # hosts that did not say which they have, and why


@call("GET", "/jobs/{job_id}/logs", shows=Kind.LOGS, asks_clusters=True)
def list_logs(session: LedgerSession, job_id: JobId, attempt: Attempt = None) -> Logs:
    """Return the logs that an attempt has so far: ranks, then nodes, then the launcher's."""
    backend, handle = at_backend(session, job_id, attempt)
    logs, unreachable = backend.log_listing(handle) if handle else ([], {})
    return Logs(attempt or session.record(job_id).number or 1, logs, unreachable)


@dataclass(frozen=True)
class RankLine(View):
    """Line of a rank's log."""

    rank: int
    at: float | None  # the time that it begins with, or that of the line before it; seconds since the epoch
    text: str


@dataclass(frozen=True)
class MergedLogs(View):
    """Lines of the logs of all ranks in the order of their times; ``next`` is where to go on."""

    lines: list[RankLine]
    next: str
    unreachable: Mapping[str, str] = field(default_factory=dict)  # hosts whose lines are missing, and why


@call("GET", "/jobs/{job_id}/merged-log", shows=Kind.LOGS, asks_clusters=True)
def merge_logs(
    session: LedgerSession,
    job_id: JobId,
    attempt: Attempt = None,
    after: Annotated[str, Bounds("`next` of the answer before: what came since", max_length=20_000)] = "",
) -> MergedLogs:
    """Return the newest lines of the logs of all ranks as one log, by the times that the lines begin with.

    Ranks beyond the first 512 are left out. What one answer of a service has no time for is in the next.
    """
    from orc.orchestrator.insight.log_times import UNKNOWN, merged

    backend, handle = at_backend(session, job_id, attempt)
    if handle is None:
        return MergedLogs([], after)
    if not _POSITIONS.fullmatch(after):
        raise SpecError(f"no such position: {after:.80}", where="query.after")
    offsets = {int(rank): int(offset) for rank, offset in (part.split(":") for part in after.split(",") if part)}
    listed, unreachable = backend.log_listing(handle)
    ranks = [found.rank for found in listed if found.rank is not None][:_MOST_RANKS]
    most = max(_MERGED_BYTES // max(len(ranks), 1), _RANK_BYTES)
    job = session.record(job_id)
    over = job.ended_at is not None or attempt not in (None, job.number)
    until = time.monotonic() + session.measured.seconds
    logs = {}
    for rank in sorted(ranks, key=offsets.__contains__):  # those that were not read yet come first
        try:
            begin, data = _piece(backend, handle, LogSelector(rank=rank), offsets.get(rank), most, over)
        except BackendUnreachable as error:
            unreachable |= {error.where or f"rank {rank}": error.what}
        else:
            logs[rank] = data
            offsets[rank] = begin + len(data)
        if time.monotonic() > until:
            break
    lines = [
        RankLine(rank, None if at == UNKNOWN else at, line.decode("utf-8", "replace").rstrip("\n")[:_MOST_TEXT])
        for at, rank, line in merged(logs)
    ]
    return MergedLogs(lines, ",".join(f"{rank}:{offset}" for rank, offset in sorted(offsets.items())), unreachable)


def _piece(
    backend: Backend, handle: Handle, selector: LogSelector, offset: int | None, most: int, over: bool
) -> tuple[int, bytes]:
    """Return whole lines of a log from *offset* on (its last ones without), *most* bytes of them, and their offset.

    The last line of a log to which nothing is added any more, that is *over*, is whole as it is.
    """
    from orc.launchers.remote.files import read_range

    begin, data = offset or 0, b""
    if path := backend.log_file(handle, selector):
        with suppress(OSError):  # there is none yet
            begin = max(Path(path).stat().st_size - most, 0) if offset is None else offset
            data = read_range(path, begin, most)
    else:
        for chunk in backend.logs(handle, selector, begin):
            data += chunk.data
            if len(data) > most:
                if offset is not None:
                    data = data[:most]
                    break
                begin, data = begin + len(data) - most, data[-most:]
    if offset is None and begin:  # not the middle of a line
        cut = data.find(b"\n") + 1
        begin, data = begin + cut, data[cut:]
    if over and len(data) < most:
        return begin, data
    whole = data.rfind(b"\n") + 1
    return begin, data[: whole or (len(data) if len(data) == most else 0)]


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
