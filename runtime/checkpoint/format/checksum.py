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

    def value(self) -> int:
        """The checksum."""
        return self._sum


class Grid64:
    """Row and column sums of each cell; see above."""

    def __init__(self) -> None:
        import numpy

        self._numpy = numpy
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
            self._cells(self._partial)
            self._filled = 0
        whole = len(data) // CELL * CELL
        if whole:
            self._cells(data[:whole])
        if whole < len(data):
            self._hold(data[whole:])

    def value(self) -> int:
        """The checksum."""
        if self._filled:
            self._partial[self._filled :] = bytes(CELL - self._filled)
            self._cells(self._partial)
        return self._sum

    def _hold(self, data: memoryview) -> None:
        if not self._partial:
            self._partial = memoryview(bytearray(CELL))
        self._partial[self._filled : self._filled + len(data)] = data
        self._filled += len(data)

    def _cells(self, data: memoryview) -> None:
        numpy = self._numpy
        grids: Any = numpy.frombuffer(data, dtype="<u8").reshape(-1, CELL // 8 // _COLUMNS, _COLUMNS)
        sums = numpy.concatenate((numpy.add.reduce(grids, 2), numpy.add.reduce(grids, 1)), 1)
        self._sum = zlib.crc32(sums, self._sum)


ALGORITHMS: dict[str, type[Crc32] | type[Grid64]] = {"crc32": Crc32, "grid64": Grid64}
DEFAULT = "grid64"
