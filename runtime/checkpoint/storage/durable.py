"""Files that are durable when a call returns, with their checksums, and directories that change in one step.

Everything that writes goes through functions of `os`, one system call at a time, so that tests can stop the process at
each. Files that are there are read once, front to back, as one stream whose pieces threads take in turns: several
streams at once are slower than one.

The checksum runs at the speed of memory, several times faster than a CRC. Each `CELL` of the data, filled up with
zeros, is a grid of 64-bit little-endian words; the checksum is the CRC-32 of the sums of its rows and of its columns
(modulo 2^64), cell after cell. A changed bit, or a piece that was moved or exchanged, changes a row, a column or the
order; the size is compared besides. It protects against accidents, not against forgery.
"""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import threading
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CELL = 256 * 1024  # bytes
_COLUMNS = 512
# Bytes per system call: the checksum finds them in the cache, and larger writes to new files are several times slower.
_CHUNK = 256 * 1024
_BEGIN = 16 * 1024 * 1024  # bytes after which the disk begins with them, while the next are written
_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
_SYNC_FILE_RANGE_WRITE = 2


@dataclass(frozen=True)
class FileRecord:
    """Size in bytes of one file and its checksum, as a manifest records them."""

    size: int
    sum: int


class Checksum:
    """The checksum of data that comes front to back, in pieces of any size."""

    def __init__(self) -> None:
        self._sum = 0
        self._rest = bytearray()  # less than a cell

    def update(self, data: memoryview) -> None:
        """Take in *data* (bytes)."""
        if self._rest:
            room = CELL - len(self._rest)
            self._rest += data[:room]
            if len(self._rest) < CELL:
                return
            data, full = data[room:], self._rest
            self._rest = bytearray()
            self.add(sums_of_cells(full))
        whole = len(data) // CELL * CELL
        self.add(sums_of_cells(data[:whole]))
        self._rest += data[whole:]

    def add(self, sums: Any) -> None:
        """Take in what `sums_of_cells` has returned of the next data, instead of the data."""
        self._sum = zlib.crc32(sums, self._sum)

    def value(self) -> int:
        """The checksum of all so far."""
        return zlib.crc32(sums_of_cells(self._rest), self._sum)


def sums_of_cells(data: memoryview | bytearray) -> Any:
    """Return the sums of the rows and of the columns of each cell of *data*: what needs no data before it."""
    if not data:
        return b""
    import numpy

    whole: Any = bytes(data) + bytes(-len(data) % CELL) if len(data) % CELL else data
    grids: Any = numpy.frombuffer(whole, dtype="<u8").reshape(-1, CELL // 8 // _COLUMNS, _COLUMNS)
    return numpy.concatenate((numpy.add.reduce(grids, 2), numpy.add.reduce(grids, 1)), 1)


class Hashing:
    """A new file, written front to back and checksummed on the way. Subclasses write the bytes."""

    chunk = _CHUNK

    def __init__(self) -> None:
        self.size = 0
        self._failure: OSError | None = None
        self._sum = Checksum()

    def _put(self, data: memoryview) -> int:
        """Write some of *data*; how much."""
        raise NotImplementedError

    def _finish(self) -> None:
        """Everything is written: make it last."""
        raise NotImplementedError

    def _drop(self) -> None:
        """It will not be finished."""
        raise NotImplementedError

    def write(self, data: Any) -> int:
        """Append *data* (bytes-like); returns its length."""
        view = memoryview(data).cast("B")
        at = 0
        while at < len(view):
            try:
                written = self._put(view[at : at + self.chunk])
            except OSError as error:
                self._failure = error
                raise
            self._sum.update(view[at : at + written])
            at += written
        self.size += len(view)
        return len(view)

    def flush(self) -> None:
        """Nothing is buffered here."""

    def close(self) -> FileRecord:
        """Make everything durable; return the entry for the manifest."""
        self._finish()
        return FileRecord(self.size, self._sum.value())

    def fill(self, write: Callable[[Hashing], object]) -> FileRecord:
        """Let *write* write all of it, and close it, or abandon it after an error."""
        try:
            write(self)
        except BaseException:
            self.abandon()
            raise
        return self.close()

    def abandon(self) -> None:
        """Close without a promise, after an error. Raises the reason where `torch.save` has hidden it."""
        self._drop()
        if self._failure is not None:
            raise self._failure


class HashingFile(Hashing):
    """On a local or mounted file system; on disk after `close`."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        self._written = 0
        self._begun = 0

    def _put(self, data: memoryview) -> int:
        count = os.write(self._fd, data)
        self._written += count
        if self._written - self._begun >= _BEGIN:
            begin_sync(self._fd, self._begun, self._written - self._begun)
            self._begun = self._written
        return count

    def _finish(self) -> None:
        os.fsync(self._fd)
        os.close(self._fd)

    def _drop(self) -> None:
        os.close(self._fd)


def write_file(path: Path, data: bytes) -> FileRecord:
    """A new durable file at *path* that holds *data*."""
    return HashingFile(path).fill(lambda file: file.write(data))


def begin_sync(fd: int, start: int, size: int) -> None:
    """Let the disk begin with *size* bytes from *start* on, without waiting: less is left for the `fsync` that counts.

    Where the system or the file system cannot, that one does it all.
    """
    try:
        call = ctypes.CDLL(None).sync_file_range
    except AttributeError:  # not this C library
        return
    # What goes wrong is told by fsync.
    call(fd, ctypes.c_int64(start), ctypes.c_int64(size), ctypes.c_uint(_SYNC_FILE_RANGE_WRITE))


def sync_directory(path: Path) -> None:
    """Make the names in the directory *path* durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def exchange(one: Path, other: Path) -> bool:
    """Swap two names in one step; `False` where the file system cannot."""
    try:
        call = ctypes.CDLL(None, use_errno=True).renameat2
    except AttributeError:  # not this C library
        return False
    result = call(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), ctypes.c_uint(_RENAME_EXCHANGE))
    if result == 0:
        return True
    number = ctypes.get_errno()
    if number in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EPERM):
        return False
    raise OSError(number, os.strerror(number), str(one), None, str(other))


def publish(temporary: Path, target: Path) -> None:
    """Make the complete directory *temporary* be *target*, replacing what was there.

    At every moment either the old or the new content is at *target*, or, only where the file system cannot swap names,
    the old content is at `replaced_name`, where readers look too.
    """
    for entry in temporary.iterdir():
        if entry.is_dir() and not entry.is_symlink():
            sync_directory(entry)
    sync_directory(temporary)
    replaced = replaced_name(target)
    if not target.exists():
        temporary.rename(target)
        sync_directory(target.parent)
    elif exchange(temporary, target):
        sync_directory(target.parent)
        remove_tree(temporary)
    else:
        remove_tree(replaced)
        target.rename(replaced)
        temporary.rename(target)
        sync_directory(target.parent)
    remove_tree(replaced)


def temporary_name(target: Path, author: str = "") -> Path:
    """Return the path at which the next content of *target* is put together, by *author* where there are several."""
    return target.with_name(f"{target.name}.{author}.tmp" if author else f"{target.name}.tmp")


def replaced_name(target: Path) -> Path:
    """Return the path of the old content of *target* during its replacement, if names cannot be swapped."""
    return target.with_name(f"{target.name}.replaced")


def remove_tree(path: Path) -> None:
    """Remove a directory that may or may not be there; of a link only the link, and what else has its name too."""
    if path.is_symlink() or path.is_file():
        path.unlink()
    elif path.exists():
        shutil.rmtree(path)


def keep_entries(source: Path, target: Path, names: set[str]) -> None:
    """Give the entries *names* of *source* a second name in *target*: they are not ours to lose."""
    for name in sorted(names):
        origin, copy = source / name, target / name
        if copy.exists():
            continue
        if origin.is_dir() and not origin.is_symlink():
            shutil.copytree(origin, copy, symlinks=True, copy_function=_link)
        else:
            _link(origin, copy)


def _link(source: Any, target: Any) -> None:
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.EMLINK, errno.EXDEV):
            raise
        shutil.copy2(source, target, follow_symlinks=False)


_PIECE = 1024 * 1024  # bytes; whole cells of the checksum, and small enough to stay in the cache of a core
_THREADS = 8  # at most: memory has no more to give


def checksum(path: Path) -> FileRecord:
    """Return size and checksum of a file, read by the caller's thread. Raises `OSError`."""
    total, size = Checksum(), 0
    with path.open("rb", buffering=0) as file:
        while data := file.read(_PIECE):
            total.update(memoryview(data))
            size += len(data)
    return FileRecord(size, total.value())


def checksums(paths: Iterable[Path]) -> list[FileRecord | OSError]:
    """Return size and checksum of the files *paths*, or why one of them cannot be read."""
    files = [_File(path) for path in paths]
    threads = min(len(os.sched_getaffinity(0)), _THREADS)
    under_way: deque[tuple[_File, Future[Any]]] = deque()
    buffers = _Buffers()
    try:
        with ThreadPoolExecutor(threads) as pool:
            for file, start in _pieces(files):
                if len(under_way) > threads:
                    _File.add(*under_way.popleft())
                under_way.append((file, pool.submit(file.sums, start, buffers)))
            while under_way:
                _File.add(*under_way.popleft())
    finally:
        for file in files:
            file.close()
    return [file.failure or FileRecord(file.size, file.total.value()) for file in files]


class _Buffers(threading.local):
    """Where each thread reads a piece, again and again: it stays in the cache of its core."""

    def __init__(self) -> None:
        self.piece = memoryview(bytearray(_PIECE))


class _File:
    """A file that is read, and the checksum of what was read so far."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.size = 0
        self.total = Checksum()
        self.failure: OSError | None = None
        self._fd = -1
        self._at = 0

    def open(self) -> None:
        self._fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        self.size = os.fstat(self._fd).st_size

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def sums(self, start: int, buffers: _Buffers) -> Any:
        """Return the sums of the piece at *start*; of less where the file has become shorter."""
        at, end, buffer = start, min(start + _PIECE, self.size), buffers.piece
        while at < end and (count := os.preadv(self._fd, [buffer[at - start : end - start]], at)):
            at += count
        return sums_of_cells(buffer[: at - start])

    def add(self, sums: Future[Any]) -> None:
        """Take in the *sums* of the next piece; the last one closes the file."""
        try:
            self.total.add(sums.result())
        except OSError as error:
            self.failure = error
        self._at += _PIECE
        if self._at >= self.size:
            self.close()


def _pieces(files: Iterable[_File]) -> Iterator[tuple[_File, int]]:
    """Open one file after the other, and name where its pieces begin."""
    for file in files:
        try:
            file.open()
        except OSError as error:
            file.failure = error
            continue
        if not file.size:
            file.close()
        for start in range(0, file.size, _PIECE):
            if file.failure is None:
                yield file, start
