"""Files that are durable when a call returns, with their checksums, and directories that change in one step.

Everything that writes goes through functions of `os`, one system call at a time, so that tests can stop the process at
each. Files that are there are read once, front to back, as one stream whose pieces threads take in turns: several
streams at once are slower than one. What has to happen in order, the fold of the pieces' sums into those of a block, is
little, and done by whichever thread has the next.
"""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orc.runtime.checkpoint.format.checksum import ALGORITHMS, BLOCK, DEFAULT

# Bytes per system call: the checksum finds them in the cache, and larger writes to new files are several times slower.
_CHUNK = 256 * 1024
_BEGIN = 16 * 1024 * 1024  # bytes after which the disk begins with them, while the next are written
_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
_SYNC_FILE_RANGE_WRITE = 2


@dataclass(frozen=True)
class FileRecord:
    """Size in bytes of one file and the checksum of each of its blocks of `BLOCK` bytes, as a manifest records them."""

    size: int
    sums: tuple[int, ...]


class Hashing:
    """A new file, written front to back and checksummed on the way. Subclasses write the bytes."""

    chunk = _CHUNK

    def __init__(self) -> None:
        self.size = 0
        self._failure: OSError | None = None
        self._sums: list[int] = []
        self._sum = ALGORITHMS[DEFAULT]()
        self._left = BLOCK

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
                written = self._put(view[at : at + min(self.chunk, self._left)])
            except OSError as error:
                self._failure = error
                raise
            self._sum.update(view[at : at + written])
            at += written
            self._left -= written
            if self._left == 0:
                self._sums.append(self._sum.value())
                self._sum, self._left = ALGORITHMS[DEFAULT](), BLOCK
        self.size += len(view)
        return len(view)

    def flush(self) -> None:
        """Nothing is buffered here."""

    def close(self) -> FileRecord:
        """Make everything durable; return the entry for the manifest."""
        self._finish()
        if self._left < BLOCK:
            self._sums.append(self._sum.value())
        return FileRecord(self.size, tuple(self._sums))

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
    file = HashingFile(path)
    try:
        file.write(data)
    except BaseException:
        file.abandon()
        raise
    return file.close()


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
    """Return size and checksums of a file, read by the caller's thread. Raises `OSError`."""
    (digest,) = checksums([path], threads=1)
    if isinstance(digest, OSError):
        raise digest
    return digest


def checksums(
    paths: Iterable[Path], algorithm: str = DEFAULT, threads: int | None = None
) -> list[FileRecord | OSError]:
    """Return size and checksums of the files *paths*, or why one of them cannot be read.

    *threads* are as many as there are processors for, unless given; 1 is the caller's own.
    """
    files = [_File(path, algorithm) for path in paths]
    turns = _Turns(files)
    if threads is None:
        threads = min(len(os.sched_getaffinity(0)), _THREADS)
    try:
        if threads == 1:
            turns.take()
        else:
            with ThreadPoolExecutor(threads) as pool:
                for done in [pool.submit(turns.take) for _ in range(threads)]:
                    done.result()
    finally:
        for file in files:
            file.close()
    return [file.failure or FileRecord(file.size, tuple(file.sums)) for file in files]


class _File:
    """A file that is read: its sums so far, and those of pieces that wait for one before them."""

    def __init__(self, path: Path, algorithm: str) -> None:
        self.path = path
        self.size = 0
        self.sums: list[int] = []
        self.failure: OSError | None = None
        self.checksum = ALGORITHMS[algorithm]
        self._fd = -1
        self._total = self.checksum()
        self._at = 0
        self._waiting: dict[int, tuple[int, Any]] = {}
        self._lock = threading.Lock()

    def open(self) -> None:
        self._fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        self.size = os.fstat(self._fd).st_size

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def read(self, start: int, end: int, buffer: memoryview) -> memoryview:
        """Return the bytes from *start* to *end*, fewer where the file has become shorter, in *buffer*."""
        at = start
        while at < end and (count := os.preadv(self._fd, [buffer[at - start : end - start]], at)):
            at += count
        return buffer[: at - start]

    def add(self, start: int, end: int, part: Any) -> None:
        """Take in the sums of the piece from *start* to *end* when those before it are there."""
        with self._lock:
            self._waiting[start] = end, part
            while self._at in self._waiting:
                self._at, part = self._waiting.pop(self._at)
                self._total.add(part)
                if self._at % BLOCK == 0 or self._at == self.size:
                    self.sums.append(self._total.value())
                    self._total = self.checksum()
            if self._at == self.size:
                self.close()


class _Turns:
    """The pieces of files in order, each for one of several threads."""

    def __init__(self, files: Iterable[_File]) -> None:
        self._pieces = self._all(files)
        self._lock = threading.Lock()

    def take(self) -> None:
        """Read pieces as long as there are any."""
        buffer = memoryview(bytearray(_PIECE))
        while True:
            with self._lock:
                piece = next(self._pieces, None)
            if piece is None:
                return
            file, start, end = piece
            try:
                part = file.checksum.part(file.read(start, end, buffer))
            except OSError as error:
                file.failure = error
            else:
                file.add(start, end, part)

    @staticmethod
    def _all(files: Iterable[_File]) -> Iterator[tuple[_File, int, int]]:
        for file in files:
            try:
                file.open()
            except OSError as error:
                file.failure = error
                continue
            for block in range(0, file.size, BLOCK):
                last = min(block + BLOCK, file.size)
                for start in range(block, last, _PIECE):
                    if file.failure is None:
                        yield file, start, min(start + _PIECE, last)
