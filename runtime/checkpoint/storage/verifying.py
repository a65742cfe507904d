"""Checksums of files that are there, each read once, front to back, by several threads.

The threads take turns at the pieces of one file after the other, so that a disk is read as one stream: several streams
at once are slower than one, and a thread for each block would make them. What has to happen in order, the fold of the
pieces' sums into those of a block, is little, and done by whichever thread has the next.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from orc.runtime.checkpoint.format.checksum import ALGORITHMS, BLOCK, DEFAULT
from orc.runtime.checkpoint.storage.durable import FileRecord

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
