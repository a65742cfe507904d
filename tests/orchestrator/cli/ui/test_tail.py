"""Which logs are shown, and how their bytes are put out."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from orc.launchers.backends.base import LogChunk, LogSelector
from orc.launchers.errors import BackendUnreachable
from orc.orchestrator.cli.ui.tail import Cursor, PlainSink, PrefixSink, Selection

R0, R1, N0 = LogSelector(rank=0), LogSelector(rank=1), LogSelector(node=0)
L = LogSelector(launcher=True)


class Logs:
    """Logs that grow, given out in small pieces as a backend does."""

    def __init__(self, piece: int = 3) -> None:
        self.data: dict[LogSelector, bytes] = {}
        self.piece = piece
        self.file: str | None = None

    def log_file(self, _job: str, _selector: LogSelector, _attempt: int) -> str | None:
        return self.file

    def read_log(self, _job: str, selector: LogSelector, attempt: int, offset: int) -> Iterator[LogChunk]:
        data = self.data.get(selector, b"")
        for start in range(offset, len(data), self.piece):
            yield LogChunk(selector, start, data[start : start + self.piece])


@pytest.mark.parametrize(
    ("selection", "final", "chosen"),
    [
        (Selection(), False, [R0, R1]),
        (Selection(ranks=(1,)), False, [R1]),
        (Selection(nodes=(0,)), False, [N0]),
        (Selection(ranks=(0,), nodes=(0,)), True, [R0, N0]),
        (Selection(ranks=(7,)), True, []),
        (Selection(ranks=(7,), asked=False), True, [N0, L]),
        (Selection(ranks=(7,), asked=False), False, []),
        (Selection(launcher=True), False, [L]),
        (Selection(nodes=(0,), launcher=True), True, [N0, L]),
    ],
)
def test_ranks_come_first_and_nodes_when_asked_for(
    selection: Selection, final: bool, chosen: list[LogSelector]
) -> None:
    assert selection.of([R0, R1, N0, L], final=final) == chosen


def test_logs_that_were_asked_for_are_whole_without_a_host_that_has_none_of_them() -> None:
    assert Selection(ranks=(1,), nodes=(0,), launcher=True).is_whole([R0, R1, N0, L])
    for other in (Selection(ranks=(0, 7)), Selection(nodes=(1,)), Selection(launcher=True), Selection()):
        assert not other.is_whole([R0, R1, N0])


def test_a_node_stands_in_where_no_rank_ever_started() -> None:
    assert Selection().of([N0], final=False) == []
    assert Selection().of([N0], final=True) == [N0]
    assert Selection().of([L], final=True) == [L]


@pytest.mark.parametrize(
    ("selection", "resources", "single"),
    [
        (Selection(), {"nodes": 1}, True),
        (Selection(), {"nodes": 1, "procs_per_node": 2}, False),
        (Selection(), {"nodes": "1:4"}, False),
        (Selection(), {"nodes": 1, "gpus_per_node": 8}, False),
        (Selection(ranks=(3,)), {"nodes": 4}, True),
        (Selection(ranks=(3, 3)), {"nodes": 4}, True),
        (Selection(ranks=(0, 1)), {"nodes": 4}, False),
    ],
)
def test_one_log_is_known_from_the_job(selection: Selection, resources: dict[str, object], single: bool) -> None:
    assert selection.single({"resources": resources}) is single


def test_following_copies_every_byte_once() -> None:
    logs, out = Logs(), io.BytesIO()
    cursor = Cursor(logs, "job", PlainSink(out))  # type: ignore[arg-type]
    for data in (b"", b"one", b"one\ntw", b"one\ntwo\n\xff\x00"):
        logs.data[R0] = data
        cursor.copy(1, [R0])
        assert out.getvalue() == data
    assert cursor.copy(1, [R0]) == 0
    cursor.copy(2, [R0])
    assert out.getvalue() == data + data


def test_lines_of_several_ranks_are_never_mixed() -> None:
    logs, out = Logs(), io.BytesIO()
    sink = PrefixSink(out)
    cursor = Cursor(logs, "job", sink)  # type: ignore[arg-type]
    logs.data = {R0: b"zero is slo", R1: b"one\nand "}
    cursor.copy(1, [R0, R1])
    assert out.getvalue() == b"[rank 1] one\n"
    logs.data = {R0: b"zero is slow\n\nlast", R1: b"one\nand two\n"}
    cursor.copy(1, [R0, R1])
    sink.finish()
    lines = b"[rank 1] one\n[rank 0] zero is slow\n[rank 0] \n[rank 1] and two\n[rank 0] last\n"
    assert out.getvalue() == lines


@pytest.mark.parametrize("piece", [1, 3, 1000])
@pytest.mark.parametrize("ending", [b"", b"\n"])
@pytest.mark.parametrize("count", [0, 1, 2, 5, 6])
def test_the_tail_is_that_of_the_program_tail_and_goes_on_at_the_end(piece: int, ending: bytes, count: int) -> None:
    logs, out = Logs(piece), io.BytesIO()
    logs.data[R0] = b"a\nbb\n\nccc\nd" + ending
    cursor = Cursor(logs, "job", PlainSink(out))  # type: ignore[arg-type]
    cursor.copy_tail(1, [R0], count)
    expected = b"".join((b"a\nbb\n\nccc\nd" + ending).splitlines(keepends=True)[-count:]) if count else b""
    assert out.getvalue() == expected
    logs.data[R0] += b"more"
    cursor.copy(1, [R0])
    assert out.getvalue() == expected + b"more"


def test_the_tail_of_a_host_that_does_not_answer_is_shown_when_it_does(monkeypatch: pytest.MonkeyPatch) -> None:
    logs, out = Logs(), io.BytesIO()
    logs.data[R0] = b"a\nbb\nccc\n"
    cursor = Cursor(logs, "job", PlainSink(out))  # type: ignore[arg-type]

    def breaks_off(*_: object, **__: object) -> Iterator[LogChunk]:
        yield LogChunk(R0, 0, b"a\n")
        raise BackendUnreachable("no route", where="node2")

    with monkeypatch.context() as away:
        away.setattr(logs, "read_log", breaks_off)
        cursor.copy_tail(1, [R0], 1)
        cursor.copy(1, [R0])
    assert (out.getvalue(), cursor.unreachable) == (b"", {"node2": "no route"})
    cursor.copy(1, [R0])
    logs.data[R0] += b"more"
    cursor.copy(1, [R0])
    assert out.getvalue() == b"ccc\nmore"


@pytest.mark.parametrize("mode", ["wb", "ab"])
def test_a_log_on_this_machine_is_copied_into_a_file_from_the_right_byte_on(
    tmp_path: Path, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("orc.orchestrator.cli.ui.tail._SENDFILE_BYTES", 3)
    log, out = tmp_path / "rank-0.log", tmp_path / "out"
    logs = Logs()
    logs.file, logs.data[R0] = str(log), b"one\ntwo\n"
    log.write_bytes(b"one\ntwo\n")
    with out.open(mode) as file:
        cursor = Cursor(logs, "job", PlainSink(file), start=4)  # type: ignore[arg-type]
        assert cursor.copy(1, [R0]) == 4
        logs.data[R0] += b"three\n"
        log.write_bytes(logs.data[R0])
        assert cursor.copy(1, [R0]) == 6
    assert out.read_bytes() == b"two\nthree\n"


def test_a_log_on_this_machine_is_copied_into_a_pipe_without_being_read(tmp_path: Path) -> None:
    log = tmp_path / "rank-0.log"
    log.write_bytes(b"\x1b[31mred\n")
    logs = Logs()
    logs.file = str(log)  # and no data: whoever reads it gets nothing
    reader, end = os.pipe()
    with os.fdopen(end, "wb") as file:
        assert Cursor(logs, "job", PlainSink(file)).copy(1, [R0]) == 9  # type: ignore[arg-type]
    assert os.read(reader, 100) == b"\x1b[31mred\n"
    os.close(reader)


def test_a_log_that_is_not_there_yet_is_empty(tmp_path: Path) -> None:
    logs = Logs()
    logs.file = str(tmp_path / "rank-0.log")
    with (tmp_path / "out").open("wb") as file:
        assert Cursor(logs, "job", PlainSink(file)).copy(1, [R0]) == 0  # type: ignore[arg-type]
