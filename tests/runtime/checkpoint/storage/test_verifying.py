"""Checksums of files that are there: whole, in order, by several threads, and what cannot be read."""

import errno
import os
import random
import threading

import pytest

from orc.runtime.checkpoint.format.checksum import CELL, Crc32, Grid64
from orc.runtime.checkpoint.storage import durable
from orc.runtime.checkpoint.storage.durable import FileRecord, checksum, checksums

PIECE, BLOCK = CELL, 3 * CELL
DATA = random.Random(5).randbytes(10 * CELL + 77)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Blocks of three pieces of one cell."""
    monkeypatch.setattr(durable, "BLOCK", BLOCK)
    monkeypatch.setattr(durable, "_PIECE", PIECE)


def sums(data, algorithm=Grid64):
    found = []
    for at in range(0, len(data), BLOCK):
        total = algorithm()
        total.update(memoryview(data)[at : at + BLOCK])
        found.append(total.value())
    return tuple(found)


def test_a_piece_is_whole_cells():
    assert durable._PIECE % CELL == BLOCK % PIECE == 0


@pytest.mark.parametrize("size", [0, 1, PIECE - 1, PIECE, PIECE + 1, BLOCK - 1, BLOCK, BLOCK + 1, len(DATA)])
def test_a_file_has_the_sums_it_was_written_with(tmp_path, size):
    (tmp_path / "a").write_bytes(DATA[:size])
    assert checksum(tmp_path / "a") == FileRecord(size, sums(DATA[:size]))
    for threads in (1, 3, None):
        for name, algorithm in (("grid64", Grid64), ("crc32", Crc32)):
            expected = FileRecord(size, sums(DATA[:size], algorithm))
            assert checksums([tmp_path / "a"] * 3, name, threads) == [expected] * 3


class Reads:
    """The reads of a test, in order, and the files that are open; *fails* makes one fail, *most* limits all."""

    def __init__(self, monkeypatch):
        self.log, self.open, self.fails, self.most = [], {}, None, 10**9
        real = {name: getattr(os, name) for name in ("open", "close", "preadv")}
        lock = threading.Lock()

        def opened(path, flags, *rest, **options):
            fd = real["open"](path, flags, *rest, **options)
            if flags == os.O_RDONLY | os.O_CLOEXEC:  # not inherited by programs
                self.open[fd] = os.path.basename(path)
            return fd

        def closed(fd):
            self.open.pop(fd, None)
            real["close"](fd)

        def read(fd, buffers, at):
            with lock:
                self.log.append((self.open[fd], at))
            if self.log[-1] == self.fails:
                raise OSError(errno.EIO, "Input/output error")
            return real["preadv"](fd, [buffers[0][: self.most]], at)

        for name, spy in (("open", opened), ("close", closed), ("preadv", read)):
            monkeypatch.setattr(os, name, spy)


@pytest.fixture
def reads(monkeypatch):
    return Reads(monkeypatch)


def test_files_are_read_once_front_to_back_one_after_the_other(tmp_path, reads):
    for name, size in (("a", 2 * PIECE + 5), ("b", 0), ("c", PIECE)):
        (tmp_path / name).write_bytes(DATA[:size])
    found = checksums([tmp_path / name for name in "abc"], threads=1)
    assert reads.log == [("a", 0), ("a", PIECE), ("a", 2 * PIECE), ("c", 0)]
    assert [record.size for record in found] == [2 * PIECE + 5, 0, PIECE]
    assert reads.open == {}


def test_pieces_that_arrive_in_parts_are_put_together(tmp_path, reads):
    (tmp_path / "a").write_bytes(DATA)
    reads.most = 100_000
    assert checksum(tmp_path / "a") == FileRecord(len(DATA), sums(DATA))


def test_a_file_that_becomes_shorter_while_it_is_read_has_other_sums(tmp_path, reads):
    (tmp_path / "a").write_bytes(DATA)
    reads.most = 0
    found = checksum(tmp_path / "a")
    assert found.size == len(DATA)
    assert found.sums != sums(DATA)


@pytest.mark.parametrize("threads", [1, 3])
def test_one_file_that_cannot_be_read_does_not_keep_the_others_from_it(tmp_path, reads, threads):
    for name in "abc":
        (tmp_path / name).write_bytes(DATA)
    reads.fails = ("b", PIECE)
    a, b, gone, c = checksums([tmp_path / name for name in ("a", "b", "gone", "c")], threads=threads)
    assert a == c == FileRecord(len(DATA), sums(DATA))
    assert b.errno == errno.EIO
    assert isinstance(gone, FileNotFoundError)
    assert reads.open == {}
    if threads == 1:
        assert [at for name, at in reads.log if name == "b"] == [0, PIECE]  # no more of it
        with pytest.raises(OSError, match="Input/output error"):
            checksum(tmp_path / "b")


def test_the_turns_are_shared_by_as_many_threads_as_there_are_processors_for(tmp_path, monkeypatch):
    (tmp_path / "a").write_bytes(DATA)
    pools, real = [], durable.ThreadPoolExecutor
    monkeypatch.setattr(durable, "ThreadPoolExecutor", lambda threads: pools.append(threads) or real(threads))
    for processors in (1, 2, 64):
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(processors))  # noqa: B023 - used before the next
        assert checksums([tmp_path / "a"]) == [FileRecord(len(DATA), sums(DATA))]
    assert pools == [2, 8]


def test_every_thread_takes_a_turn(tmp_path, monkeypatch):
    (tmp_path / "a").write_bytes(DATA)
    both, real = threading.Barrier(2), os.preadv

    def read(fd, buffers, at):
        if at < 2 * PIECE:  # the first two pieces are read at the same time, or never
            both.wait(60)
        return real(fd, buffers, at)

    monkeypatch.setattr(os, "preadv", read)
    assert checksums([tmp_path / "a"], threads=2) == [FileRecord(len(DATA), sums(DATA))]
