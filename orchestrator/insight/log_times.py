"""Times of log lines, and several logs as one in the order of time.

Ranks write what they like; orc puts no time before it. A line's time is what stands near its beginning in the form of
ISO 8601, as Python's logging and most others write it; a line without one has that of the line before it in its log.
"""

from __future__ import annotations

import datetime
import heapq
import re
from collections.abc import Iterable, Iterator, Mapping

from orc.launchers.attempts.records import LogChunk, LogSelector

UNKNOWN = float("-inf")  # the time of lines before the first that has one
LONGEST = 1 << 20  # bytes of a line; what is longer is taken for several: memory stays flat
NEAR = 64  # bytes at the beginning of a line in which its time is looked for
TIME = re.compile(rb"(\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d)(?:[.,](\d{1,9}))?(Z|[+-]\d\d:?\d\d)?")


class Clock:
    """Reader of the times of lines; remembers the last second, which is mostly that of the next line."""

    def __init__(self) -> None:
        self._last: tuple[bytes, bytes | None] = (b"", None)
        self._at = UNKNOWN

    def time_of(self, line: bytes) -> float | None:
        """Return the time that *line* begins with, in seconds since the epoch; a time without a zone is local."""
        found = TIME.search(line, 0, NEAR)
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


def split_lines(data: bytes) -> list[bytes]:
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
        if not end and len(data) > LONGEST:
            end = len(data)
        rest = data[end:]
        for line in split_lines(data[:end]):
            known = clock.time_of(line)
            # One clock that was set back must not hold up a whole log: its order is that in which it was written.
            at = at if known is None else max(at, known)
            yield at, offset, line
            offset += len(line)
    if rest:
        known = clock.time_of(rest)
        yield at if known is None else max(at, known), offset, rest


def merged(logs: Mapping[int, bytes]) -> Iterator[tuple[float, int, bytes]]:
    """Yield ``(time, rank, line)`` of pieces of the logs of ranks in the order of time, then of ranks. Pure."""

    def lines(rank: int, data: bytes) -> Iterator[tuple[float, int, bytes]]:
        return ((at, rank, line) for at, _, line in lines_of([LogChunk(LogSelector(rank=rank), 0, data)], 0))

    return heapq.merge(*(lines(rank, data) for rank, data in sorted(logs.items())), key=lambda line: line[:2])
