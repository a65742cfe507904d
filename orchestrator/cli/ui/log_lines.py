"""Lines of logs: their times, those that are requested, and several logs as one in the order of time.

Ranks write what they like; orc puts no time before it. A line's time is what stands near its beginning in the form of
ISO 8601, as Python's logging and most others write it; a line without one has that of the line before it in its log.
"""

from __future__ import annotations

import datetime
import heapq
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from orc.launchers.attempts.logs import LogChunk, LogSelector

if TYPE_CHECKING:
    from orc.orchestrator.cli.ui.tail import Sink
    from orc.orchestrator.clients.surface import JobsClient

UNKNOWN = float("-inf")  # the time of lines before the first that has one
_LONGEST = 1 << 20  # bytes of a line; what is longer is taken for several: memory stays flat
_NEAR = 64  # bytes at the beginning of a line in which its time is looked for
_LOOK = 64 << 10  # bytes of a log in which a time is looked for at all
_TIME = re.compile(rb"(\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d)(?:[.,](\d{1,9}))?(Z|[+-]\d\d:?\d\d)?")


class Clock:
    """Reader of the times of lines; remembers the last second, which is mostly that of the next line."""

    def __init__(self) -> None:
        self._last: tuple[bytes, bytes | None] = (b"", None)
        self._at = UNKNOWN

    def time_of(self, line: bytes) -> float | None:
        """Return the time that *line* begins with, in seconds since the epoch; a time without a zone is local."""
        found = _TIME.search(line, 0, _NEAR)
        if found is None:
            return None
        second, fraction, zone = found.groups()
        if (second, zone) != self._last:
            try:
                text = second.decode() + (zone or b"").decode().replace("Z", "+00:00")
                self._at = datetime.datetime.fromisoformat(text).timestamp()
            except (ValueError, OverflowError, OSError):  # the 45th of a month
                return None
            self._last = (second, zone)
        return self._at + (int(fraction) / 10 ** len(fraction) if fraction else 0.0)


class LineFilter:
    """Sink that passes on whole lines: those since a time, and those in which a pattern is found."""

    def __init__(self, inner: Sink, since: float | None = None, pattern: re.Pattern[bytes] | None = None) -> None:
        self._inner = inner
        self._since, self._pattern = since, pattern
        self._rest: dict[tuple[int, LogSelector], LogChunk] = {}
        self._clocks: dict[tuple[int, LogSelector], tuple[Clock, float]] = {}

    def write(self, attempt: int, chunk: LogChunk) -> None:
        """Pass on the lines of *chunk* that are requested; an unfinished one waits for its end."""
        key = (attempt, chunk.selector)
        if before := self._rest.pop(key, None):
            chunk = LogChunk(chunk.selector, before.offset, before.data + chunk.data)
        whole = len(chunk.data) if len(chunk.data) > _LONGEST else 0
        whole = chunk.data.rfind(b"\n") + 1 or whole
        if whole < len(chunk.data):
            self._rest[key] = LogChunk(chunk.selector, chunk.offset + whole, chunk.data[whole:])
        self._pass(key, LogChunk(chunk.selector, chunk.offset, chunk.data[:whole]))

    def _pass(self, key: tuple[int, LogSelector], chunk: LogChunk) -> None:
        if not chunk.data:
            return
        if self._since is None and self._pattern is not None and not self._pattern.search(chunk.data):
            return
        clock, at = self._clocks.get(key, (Clock(), UNKNOWN))
        offset = chunk.offset
        for line in chunk.data.splitlines(keepends=True) if b"\r" not in chunk.data else _split(chunk.data):
            if self._since is not None:
                known = clock.time_of(line)
                at = at if known is None else known
            # What has no time might be as old or as new as anything: it is shown.
            if (self._since is None or at == UNKNOWN or at >= self._since) and (
                self._pattern is None or self._pattern.search(line)
            ):
                self._inner.write(key[0], LogChunk(chunk.selector, offset, line))
            offset += len(line)
        self._clocks[key] = (clock, at)

    def flush(self) -> None:
        """Show what was passed on."""
        self._inner.flush()

    def finish(self) -> None:
        """Pass on unfinished lines, too, and show everything."""
        for key, chunk in self._rest.items():
            self._pass(key, chunk)
        self._rest.clear()
        self._inner.finish()


def _split(data: bytes) -> list[bytes]:
    """Return *data* as lines that end with a line feed; a carriage return ends none."""
    lines = [line + b"\n" for line in data.split(b"\n")]
    last = lines.pop()[:-1]
    return [*lines, last] if last else lines


def lines_of(chunks: Iterable[LogChunk], start: int) -> Iterator[tuple[float, int, bytes]]:
    """Yield ``(time, offset, line)`` of a log, whose first byte is at *start*; times never fall."""
    clock, at, offset, rest = Clock(), UNKNOWN, start, b""
    for chunk in chunks:
        data = rest + chunk.data
        end = data.rfind(b"\n") + 1
        if not end and len(data) > _LONGEST:
            end = len(data)
        rest = data[end:]
        for line in _split(data[:end]):
            known = clock.time_of(line)
            # One clock that was set back must not hold up a whole log: its order is that in which it was written.
            at = at if known is None else max(at, known)
            yield at, offset, line
            offset += len(line)
    if rest:
        known = clock.time_of(rest)
        yield at if known is None else max(at, known), offset, rest


def have_times(client: JobsClient, job_id: str, attempt: int, selectors: Sequence[LogSelector]) -> bool:
    """Return True where one of the logs has times, by its beginning."""
    for selector in selectors:
        beginning = b""
        for chunk in client.read_log(job_id, selector, attempt=attempt):
            beginning += chunk.data
            if len(beginning) >= _LOOK:
                break
        if any(_TIME.search(line, 0, _NEAR) for line in beginning[:_LOOK].split(b"\n")):
            return True
    return False


def copy_merged(
    client: JobsClient,
    job_id: str,
    attempt: int,
    selectors: Sequence[LogSelector],
    sink: Sink,
    *,
    start: int = 0,
) -> None:
    """Copy several logs as one in the order of time; lines of one time in the order of *selectors*. Memory is flat."""

    def lines(index: int, selector: LogSelector) -> Iterator[tuple[float, int, int, bytes]]:
        chunks = client.read_log(job_id, selector, attempt=attempt, offset=start)
        return ((at, index, offset, line) for at, offset, line in lines_of(chunks, start))

    for _, index, offset, line in heapq.merge(*(lines(i, selector) for i, selector in enumerate(selectors))):
        sink.write(attempt, LogChunk(selectors[index], offset, line))
    sink.flush()
