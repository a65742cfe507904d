"""Logs of ranks as lines of one stream, and back."""

from __future__ import annotations

from pathlib import Path

import pytest

from orc.launchers.containers import output
from orc.launchers.containers.output import text_of


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "rank-3.log"
    path.touch()
    return path


def append(path: Path, data: bytes) -> None:
    with path.open("ab") as file:
        file.write(data)


def test_every_line_of_a_rank_says_whose_it_is(log: Path) -> None:
    tail = output.Tail(str(log), 3)
    append(log, b"one\n\n  two\r\n[rank 0] three\n")
    assert tail.read() == ["[rank 3] one\n", "[rank 3] \n", "[rank 3]   two\r\n", "[rank 3] [rank 0] three\n"]
    assert tail.read() == []


def test_a_line_without_an_end_waits_and_is_then_marked(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tail = output.Tail(str(log), 3)
    append(log, b"50 %")
    assert tail.read() == []
    monkeypatch.setattr(output, "PATIENCE_S", -1.0)
    assert tail.read() == ["[rank 3~] 50 %\n"]
    append(log, b" 60 %\nend")
    assert tail.read(final=True) == ["[rank 3]  60 %\n", "[rank 3~] end\n"]


def test_a_very_long_line_comes_in_pieces(log: Path) -> None:
    text = "x" * (2 * output.PIECE_BYTES + 5)
    append(log, text.encode() + b"\n")
    lines = output.Tail(str(log), 3).read()
    assert [line.startswith("[rank 3~] ") for line in lines] == [True, True, False]
    assert "".join(line.rstrip("\n").partition("] ")[2] for line in lines) == text


def test_characters_that_are_cut_between_two_looks_stay_whole_and_bad_bytes_are_replaced(log: Path) -> None:
    tail = output.Tail(str(log), 3)
    word = "ä✓".encode()
    for byte in word:
        append(log, bytes([byte]))
        assert tail.read() == []
    append(log, b"\xff\n")
    assert tail.read() == ["[rank 3] ä✓\N{REPLACEMENT CHARACTER}\n"]
    append(log, b"\xc3")
    assert tail.read(final=True) == ["[rank 3~] \N{REPLACEMENT CHARACTER}\n"]


def test_a_line_of_the_node_is_never_taken_for_a_ranks(tmp_path: Path) -> None:
    path = tmp_path / "node-0.log"
    path.write_text("setup: hello\n[rank 1] says who?\n")
    assert output.Tail(str(path), None).read() == ["setup: hello\n", " [rank 1] says who?\n"]


def test_lines_of_ranks_are_told_apart_from_the_nodes_own() -> None:
    messages = ["orc: setup", "[rank 1] one", "[rank 0] zero", "[rank 1~] half", "[rank 1] done", "[rank10] torch"]
    assert text_of(messages, rank=1) == b"one\nhalfdone\n"
    assert text_of(messages, rank=0) == b"zero\n"
    assert text_of(messages, rank=None) == b"orc: setup\n[rank10] torch\n"


def test_blanks_empty_lines_and_letters_of_all_languages_are_kept() -> None:
    assert text_of(["[rank 0]   x", "[rank 0] ", "[rank 0] é"], rank=0) == "  x\n\né\n".encode()
    assert text_of(["a\n", ""], rank=None) == b"a\n\n"


def test_what_was_written_is_read_back_whole(log: Path) -> None:
    text = "one\n\n[rank 3] two\n" + "x" * (output.PIECE_BYTES + 7) + "\nno end"
    append(log, text.encode())
    assert text_of(output.Tail(str(log), 3).read(final=True), rank=3) == text.encode()
