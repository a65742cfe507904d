"""Lines of logs: those that are requested, and several logs as one in the order of time."""

from __future__ import annotations

import heapq
import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from orc.launchers.attempts.logs import LogChunk, LogSelector
from orc.orchestrator.insight.log_times import LONGEST, NEAR, TIME, UNKNOWN, Clock, lines_of, split_lines

if TYPE_CHECKING:
    from orc.orchestrator.cli.ui.tail import Sink
    from orc.orchestrator.clients.surface import JobsClient

_LOOK = 64 << 10  # bytes of a log in which a time is looked for at all


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
        whole = len(chunk.data) if len(chunk.data) > LONGEST else 0
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
        for line in chunk.data.splitlines(keepends=True) if b"\r" not in chunk.data else split_lines(chunk.data):
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


def have_times(client: JobsClient, job_id: str, attempt: int, selectors: Sequence[LogSelector]) -> bool:
    """Return True where one of the logs has times, by its beginning."""
    for selector in selectors:
        beginning = b""
        for chunk in client.read_log(job_id, selector, attempt=attempt):
            beginning += chunk.data
            if len(beginning) >= _LOOK:
                break
        if any(TIME.search(line, 0, NEAR) for line in beginning[:_LOOK].split(b"\n")):
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
