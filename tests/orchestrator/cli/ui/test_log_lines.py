"""Several logs as one in the order of time; lines since a time, and with a pattern; flat memory."""

from __future__ import annotations

import io
import re
import tracemalloc
from collections.abc import Iterator

import pytest

from orc.launchers.attempts.records import LogChunk, LogSelector
from orc.launchers.errors import BackendUnreachable
from orc.orchestrator.cli.commands.logs import LineFilter, copy_merged, have_times
from orc.orchestrator.cli.ui.tail import Cursor, PrefixSink
from orc.orchestrator.insight.log_times import UNKNOWN, Clock


class Logs:
    """Logs of one attempt, by rank, in pieces of a size that cuts lines."""

    def __init__(self, *texts: bytes, piece: int = 7) -> None:
        self.texts, self.piece = texts, piece
        self.selectors = [LogSelector(rank=rank) for rank in range(len(texts))]

    def read_log(self, _job, selector, attempt=None, offset=0) -> Iterator[LogChunk]:
        text = self.texts[selector.rank]
        for start in range(offset, len(text), self.piece):
            yield LogChunk(selector, start, text[start : start + self.piece])

    def merged(self, **options) -> list[str]:
        out = io.BytesIO()
        sink = PrefixSink(out, **options)
        copy_merged(Cursor(self, "j", sink), 1, self.selectors, sink)
        sink.finish()
        return out.getvalue().decode().splitlines()


def test_lines_of_ranks_come_in_the_order_of_their_times():
    logs = Logs(
        b"starting\n2026-01-01 10:00:01,500 a1\n  traceback of a1\n2026-01-01 10:00:04 a4\n",
        b"2026-01-01T10:00:01.2 b1\n2026-01-01T10:00:03 b3\nunfinished",
    )
    assert have_times(Cursor(logs, "j", None), 1, logs.selectors)
    assert [line.replace("2026-01-01", "").strip() for line in logs.merged()] == [
        "[rank 0] starting",
        "[rank 1] T10:00:01.2 b1",
        "[rank 0]  10:00:01,500 a1",
        "[rank 0]   traceback of a1",
        "[rank 1] T10:00:03 b3",
        "[rank 0]  10:00:04 a4",
        "[rank 1] unfinished",
    ]


def test_a_host_that_does_not_answer_keeps_no_other_log_from_being_shown(monkeypatch):
    logs = Logs(b"2026-01-01 10:00:01 a\n", b"2026-01-01 10:00:02 b\n", b"2026-01-01 10:00:03 c\n", piece=100)

    def read_log(_job, selector, attempt=None, offset=0):
        if selector.rank == 1:
            raise BackendUnreachable("no route", where="node2")
        return Logs.read_log(logs, _job, selector, attempt, offset)

    monkeypatch.setattr(logs, "read_log", read_log)
    sink = PrefixSink(out := io.BytesIO())
    cursor = Cursor(logs, "j", sink)
    assert have_times(cursor, 1, logs.selectors)
    copy_merged(cursor, 1, logs.selectors, sink)
    assert [line[:8] for line in out.getvalue().splitlines()] == [b"[rank 0]", b"[rank 2]"]
    assert cursor.unreachable == {"node2": "no route"}


def test_each_rank_has_a_colour_and_what_logs_bring_along_has_none():
    lines = Logs(b"2026-01-01 10:00:01 \x1b[2Ja\n", b"2026-01-01 10:00:02 b\n").merged(colours=True)
    prefixes = [re.match(r"\x1b\[(\d+)m\[rank", line)[1] for line in lines]
    assert len(set(prefixes)) == 2


@pytest.mark.parametrize(
    ("line", "later"),
    [
        (b"2026-01-01T00:00:01Z x", 1.0),
        (b"[rank0] INFO 2026-01-01 01:00:00.25+01:00 x", 0.25),
        (b"2026-01-01T00:00:00+0000", 0.0),
        (b"2026-13-41 99:00:00 x", None),
        (b"loss 0.1 at step 2026", None),
        (b" " * 64 + b"2026-01-01T00:00:01Z", None),
    ],
)
def test_times_are_read_as_they_are_mostly_written(line, later):
    assert Clock().time_of(line) == (None if later is None else 1767225600.0 + later)


def test_a_log_without_times_is_told_from_one_with_some():
    logs = Logs(b"a\nb\n", b"c\n")
    assert not have_times(Cursor(logs, "j", None), 1, logs.selectors)


def filtered(text: bytes, **options) -> bytes:
    out = io.BytesIO()
    out.isatty = lambda: False
    sink = LineFilter(PrefixSink(out), **options)
    for start in range(0, len(text), 5):
        sink.write(1, LogChunk(LogSelector(rank=0), start, text[start : start + 5]))
    sink.finish()
    return out.getvalue().replace(b"[rank 0] ", b"")


def test_lines_are_chosen_by_pattern_and_by_time():
    text = b"early\n2026-01-01T00:00:00Z one\nof one\n2026-01-02T00:00:00Z two\rtwo\nof two"
    assert filtered(text, pattern=re.compile(b"of|two")) == b"of one\n2026-01-02T00:00:00Z two\rtwo\nof two\n"
    since = Clock().time_of(b"2026-01-01T12:00:00Z")
    assert filtered(text, since=since) == b"early\n2026-01-02T00:00:00Z two\rtwo\nof two\n"
    assert filtered(text, since=since, pattern=re.compile(b"of")) == b"of two\n"
    assert filtered(text, since=UNKNOWN).count(b"\n") == 5


def test_memory_stays_flat_however_long_logs_and_lines_are():
    null = io.BytesIO()  # nothing is found, so nothing is written
    line = b"2026-01-01 10:00:00 " + b"x" * 100 + b"\n"
    long = (b"y" * (1 << 20)) * 24  # a line that never ends
    many = line * (24 * (1 << 20) // len(line))
    logs = Logs(many, long, piece=64 << 10)
    sink = LineFilter(PrefixSink(null), pattern=re.compile(b"nothing"))
    tracemalloc.start()
    try:
        copy_merged(Cursor(logs, "j", sink), 1, logs.selectors, sink)
        sink.finish()
        assert tracemalloc.get_traced_memory()[1] < 12 << 20
    finally:
        tracemalloc.stop()
