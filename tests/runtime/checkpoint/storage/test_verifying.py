"""Checksums: what they notice; of files that are there, by several threads, and what cannot be read."""

import errno
import os
import random
import threading
import zlib

import pytest

from orc.runtime.checkpoint.storage import durable
from orc.runtime.checkpoint.storage.durable import CELL, Checksum, FileRecord, checksum, checksums

PIECE = CELL
DATA = random.Random(5).randbytes(10 * CELL + 77)


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    """Pieces of one cell."""
    assert durable._PIECE % CELL == 0
    monkeypatch.setattr(durable, "_PIECE", PIECE)


def total(data, steps=None):
    found, view = Checksum(), memoryview(data)
    while view:
        step = next(steps) if steps else len(view)
        found.update(view[:step])
        view = view[step:]
    return found.value()


@pytest.mark.parametrize("size", [0, 1, 7, 8, 4096, CELL - 1, CELL, CELL + 1, 3 * CELL + 12345])
def test_a_sum_does_not_depend_on_the_pieces(size):
    pieces = random.Random(1)
    several = iter(lambda: pieces.choice([1, 3, 1000, 65537, CELL, 2 * CELL + 5]), None)
    assert total(DATA[:size]) == total(DATA[:size], several)


def test_any_flipped_bit_and_any_moved_piece_is_noticed():
    size, generator = 2 * CELL + 5000, random.Random(3)
    data = bytearray(generator.randbytes(size))
    expected = total(data)
    for _ in range(200):
        place, bit = generator.randrange(size), 1 << generator.randrange(8)
        data[place] ^= bit
        assert total(data) != expected
        data[place] ^= bit
    for length in (8, 512, 4096, 65536):
        for _ in range(20):
            a, b = sorted(generator.sample(range(0, size - length, 8), 2))
            if b - a < length:
                continue
            swapped = data.copy()
            swapped[a : a + length], swapped[b : b + length] = data[b : b + length], data[a : a + length]
            assert total(swapped) != expected
    assert total(data[8:] + data[:8]) != expected
    assert total(data) == expected


def test_the_sum_is_the_one_that_is_documented():
    words = [[(row * 512 + column) << 40 for column in range(512)] for row in range(64)]
    data = b"".join(word.to_bytes(8, "little") for row in words for word in row)
    rows = [sum(row) % 2**64 for row in words]
    columns = [sum(column) % 2**64 for column in zip(*words, strict=True)]
    assert total(data) == zlib.crc32(b"".join(one.to_bytes(8, "little") for one in rows + columns))


@pytest.mark.parametrize("size", [0, 1, PIECE - 1, PIECE, PIECE + 1, 3 * PIECE, len(DATA)])
def test_a_file_has_the_sum_it_was_written_with(tmp_path, size):
    (tmp_path / "a").write_bytes(DATA[:size])
    expected = FileRecord(size, total(DATA[:size]))
    assert checksum(tmp_path / "a") == expected
    assert checksums([tmp_path / "a"] * 3) == [expected] * 3


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


@pytest.fixture(params=[1, 3])
def threads(request, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(request.param))
    return request.param


def test_files_are_read_once_front_to_back_one_after_the_other(tmp_path, reads, threads):
    for name, size in (("a", 2 * PIECE + 5), ("b", 0), ("c", PIECE)):
        (tmp_path / name).write_bytes(DATA[:size])
    found = checksums([tmp_path / name for name in "abc"])
    assert (reads.log if threads == 1 else sorted(reads.log)) == [("a", 0), ("a", PIECE), ("a", 2 * PIECE), ("c", 0)]
    assert [record.size for record in found] == [2 * PIECE + 5, 0, PIECE]
    assert reads.open == {}


def test_pieces_that_arrive_in_parts_are_put_together(tmp_path, reads):
    (tmp_path / "a").write_bytes(DATA)
    reads.most = 100_000
    assert checksums([tmp_path / "a"]) == [FileRecord(len(DATA), total(DATA))]


def test_a_file_that_becomes_shorter_while_it_is_read_has_another_sum(tmp_path, reads):
    (tmp_path / "a").write_bytes(DATA)
    reads.most = 0
    (found,) = checksums([tmp_path / "a"])
    assert found.size == len(DATA)
    assert found.sum != total(DATA)


def test_one_file_that_cannot_be_read_does_not_keep_the_others_from_it(tmp_path, reads, threads):
    for name in "abc":
        (tmp_path / name).write_bytes(DATA)
    reads.fails = ("b", PIECE)
    a, b, gone, c = checksums([tmp_path / name for name in ("a", "b", "gone", "c")])
    assert a == c == FileRecord(len(DATA), total(DATA))
    assert b.errno == errno.EIO
    assert isinstance(gone, FileNotFoundError)
    assert reads.open == {}


def test_several_threads_read_at_the_same_time(tmp_path, monkeypatch):
    (tmp_path / "a").write_bytes(DATA)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(2))
    both, real = threading.Barrier(2), os.preadv

    def read(fd, buffers, at):
        if at < 2 * PIECE:  # the first two pieces are read at the same time, or never
            both.wait(60)
        return real(fd, buffers, at)

    monkeypatch.setattr(os, "preadv", read)
    assert checksums([tmp_path / "a"]) == [FileRecord(len(DATA), total(DATA))]
