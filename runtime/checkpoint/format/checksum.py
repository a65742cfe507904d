"""Checksums of what a checkpoint holds. A manifest names its algorithm, so that a better one can come.

``grid64``, which new checkpoints use, runs at the speed of memory, several times faster than a CRC. Each `CELL` of the
data, filled up with zeros, is a grid of 64-bit little-endian words; the checksum is the CRC-32 of the sums of its rows
and of its columns (modulo 2^64), cell after cell. A changed bit, or a piece that was moved or exchanged, changes a row,
a column or the order; the size is compared besides. It protects against accidents, not against forgery.
"""

from __future__ import annotations

import zlib
from typing import Any, Protocol

BLOCK = 64 * 1024 * 1024  # bytes per checksum: blocks are verified in parallel
CELL = 256 * 1024  # bytes; divides BLOCK
_COLUMNS = 512


class Checksum(Protocol):
    """The checksum of one block, fed front to back."""

    def update(self, data: memoryview) -> None:
        """Take in *data* (bytes)."""
        ...

    @staticmethod
    def part(data: memoryview) -> Any:
        """Return what `add` needs of *data*: what can be computed apart. Only the last part may hold no whole cells."""
        ...

    def add(self, part: Any) -> None:
        """Take in what `part` returned, in order, in the place of `update`."""
        ...

    def value(self) -> int:
        """The checksum of all; call it once, at the end."""
        ...


class Crc32:
    """Plain CRC-32."""

    def __init__(self) -> None:
        self._sum = 0

    def update(self, data: memoryview) -> None:
        """Take in *data*."""
        self._sum = zlib.crc32(data, self._sum)

    @staticmethod
    def part(data: memoryview) -> bytes:
        """Return *data*: nothing can be computed before its turn."""
        return bytes(data)

    def add(self, part: bytes) -> None:
        """Take in *part*."""
        self._sum = zlib.crc32(part, self._sum)

    def value(self) -> int:
        """The checksum."""
        return self._sum


class Grid64:
    """Row and column sums of each cell; see above."""

    def __init__(self) -> None:
        self._sum = 0
        self._partial = memoryview(bytearray(0))
        self._filled = 0

    def update(self, data: memoryview) -> None:
        """Take in *data*."""
        if self._filled:
            room = min(CELL - self._filled, len(data))
            self._hold(data[:room])
            data = data[room:]
            if self._filled < CELL:
                return
            self.add([_sums(self._partial)])
            self._filled = 0
        whole = len(data) // CELL * CELL
        if whole:
            self.add([_sums(data[:whole])])
        if whole < len(data):
            self._hold(data[whole:])

    @staticmethod
    def part(data: memoryview) -> list[Any]:
        """Return the sums of the cells of *data*."""
        whole = len(data) // CELL * CELL
        parts = [_sums(data[:whole])] if whole else []
        if whole < len(data):
            parts.append(_sums(memoryview(bytes(data[whole:]).ljust(CELL, b"\0"))))
        return parts

    def add(self, part: list[Any]) -> None:
        """Take in the sums *part*."""
        for sums in part:
            self._sum = zlib.crc32(sums, self._sum)

    def value(self) -> int:
        """The checksum."""
        if self._filled:
            self._partial[self._filled :] = bytes(CELL - self._filled)
            self.add([_sums(self._partial)])
        return self._sum

    def _hold(self, data: memoryview) -> None:
        if not self._partial:
            self._partial = memoryview(bytearray(CELL))
        self._partial[self._filled : self._filled + len(data)] = data
        self._filled += len(data)


def _sums(cells: memoryview) -> Any:
    """Return the sums of the rows and of the columns of each of the *cells*."""
    import numpy

    grids: Any = numpy.frombuffer(cells, dtype="<u8").reshape(-1, CELL // 8 // _COLUMNS, _COLUMNS)
    return numpy.concatenate((numpy.add.reduce(grids, 2), numpy.add.reduce(grids, 1)), 1)


ALGORITHMS: dict[str, type[Checksum]] = {"crc32": Crc32, "grid64": Grid64}
DEFAULT = "grid64"
