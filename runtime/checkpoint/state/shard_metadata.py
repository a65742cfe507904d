"""The ``.metadata`` of a folder of shards: torch's pickle, written for millions of parts.

The pickle of a part differs from that of the next one in a few numbers. So the parts of a tensor are rows of an array,
and their bytes a template with columns of numbers in it; an object for each part would take rank 0 minutes.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

Array: TypeAlias = npt.NDArray[Any]
Piece: TypeAlias = bytes | Array  # of a pickle: the same in every row, or a column of numbers
ALIGNMENT = 64  # bytes; where each value in a file of shards begins
PLAIN = "orc.contiguous"  # says that the elements of each tensor lie in order, at aligned places
_VERSION = "1.0.0"  # of torch's format
_STATE = {  # what is pickled of each
    Metadata: ("state_dict_metadata", "planner_data", "storage_data", "storage_meta", "version"),
    TensorStorageMetadata: ("properties", "size", "chunks"),
    BytesStorageMetadata: (),
    ChunkStorageMetadata: ("offsets", "sizes"),
    MetadataIndex: ("fqn", "offset", "index"),
    _StorageInfo: ("relative_path", "offset", "length"),
}
_GET = b"j"  # the object of a number (four bytes) in the memo


@dataclass(frozen=True)
class Parts:
    """The parts of a tensor that are written, a column for each; of a value that is no tensor its only one.

    Attributes:
        dtype: of the tensor; `None` of another value.
        ranks: that write them.
        positions: of the parts in the plans of these ranks.
        offsets: a row for each dimension, as *sizes*.
    """

    name: str
    dtype: torch.dtype | None
    size: tuple[int, ...]
    ranks: Array
    positions: Array
    offsets: Array
    sizes: Array


def flat(places: Array, size: Sequence[int]) -> Array:
    """Return one number for each column of *places* in a tensor of that *size*, its ends included."""
    return np.cumprod([1, *(length + 1 for length in size)], dtype=np.int64)[:-1] @ places


def metadata_bytes(
    every: Sequence[Parts], stored: Sequence[Sequence[Array]], paths: Mapping[str, Any], files: Sequence[str]
) -> bytes:
    """Return the content of ``.metadata``.

    Args:
        every: the values of the folder.
        stored: where the parts of each lie: numbers of *files*, offsets in them, lengths.
        paths: of the values in the state, by name.
        files: by their names.
    """
    pickled = _Pickle()
    kinds: dict[torch.dtype | None, TensorProperties] = {
        parts.dtype: TensorProperties(parts.dtype) for parts in every if parts.dtype is not None
    }
    shapes: dict[tuple[int, ...], torch.Size] = {}

    def shape(size: Sequence[int]) -> torch.Size:
        return shapes.setdefault(tuple(size), torch.Size(size))

    cuts = []
    for parts in every:
        _, rows, which = np.unique(flat(parts.sizes, parts.size), return_index=True, return_inverse=True)
        cuts.append(np.array([pickled.number(shape(parts.sizes[:, row].tolist())) for row in rows])[which])
    heads = [
        (pickled.get(parts.name), pickled.get(kinds.get(parts.dtype)), pickled.get(shape(parts.size)))
        for parts in every
    ]
    names = np.array([pickled.number(name) for name in files])
    rest = [[pickled.get(value)] for value in (dict(paths), StorageMeta(modules=[PLAIN]), _VERSION)]
    number = pickled.number([])  # of the last object so far: this one
    tensors: list[Piece] = [b"}("]
    places: list[Piece] = [b"}("]
    for parts, (name, kind, size), cut, (file, begin, length) in zip(every, heads, cuts, stored, strict=True):
        place = pickled.made(_StorageInfo, [_GET, names[file].astype("<u4")], _integers(begin), _integers(length))
        if parts.dtype is None:
            tensors += [name, *pickled.made(BytesStorageMetadata)]
            places.append(_rows(1, [*pickled.made(MetadataIndex, [name], [b"N"], [b"N"]), *place]))
            continue
        count = len(parts.ranks)
        memo = np.arange(number + 1, number + 1 + count).astype("<u4")
        number += count
        numbers = [piece for column in parts.offsets for piece in _integers(column)]
        offsets = [pickled.get(torch.Size), b"(", *numbers, b"t\x85Rr", memo]
        chunks = _rows(count, pickled.made(ChunkStorageMetadata, offsets, [_GET, cut.astype("<u4")]))
        tensors += [name, *pickled.made(TensorStorageMetadata, [kind], [size], [b"](", chunks, b"e"])]
        index = pickled.made(MetadataIndex, [name], [_GET, memo], _integers(np.arange(count)))
        places.append(_rows(count, [*index, *place]))
    planner, meta, version = rest
    return pickled.content(pickled.made(Metadata, [*tensors, b"u"], planner, [*places, b"u"], meta, version))


class _Pickle:
    """A pickle: objects that it names by numbers first, then what is made of them."""

    def __init__(self) -> None:
        self._buffer = io.BytesIO()
        self._pickler = pickle.Pickler(self._buffer, 3)  # the last protocol that numbers the objects itself
        self._named: list[bytes] = []
        for kind, keys in _STATE.items():
            for value in (kind, *keys, torch.Size):
                self.number(value)

    def number(self, value: Any) -> int:
        """Return the number by which the pickle names *value*, which must stay alive."""
        if len(code := self._dump(value)) != (2 if code[:1] == b"h" else 5):  # the first time
            self._named += [code, b"0"]
            code = self._dump(value)
        return int.from_bytes(code[1:], "little")

    def get(self, value: Any) -> bytes:
        """Return the bytes that stand for *value*."""
        if value is None:
            return b"N"
        number = self.number(value)
        return bytes([*b"h", number]) if number < 256 else _GET + number.to_bytes(4, "little")

    def made(self, kind: type, *state: Sequence[Piece]) -> list[Piece]:
        """Return the pieces that make an object of that *kind*, with the pieces of its state."""
        made: list[Piece] = [self.get(kind), b")\x81}("]
        for key, value in zip(_STATE[kind], state, strict=True):
            made += [self.get(key), *value]
        return [*made, b"ub"]

    def content(self, made: Sequence[Piece]) -> bytes:
        """Return the pickle of the object that is *made*."""
        pieces = (piece if isinstance(piece, bytes) else piece.tobytes() for piece in made)
        return b"".join((b"\x80\x03", *self._named, *pieces, b"."))

    def _dump(self, value: Any) -> bytes:
        self._buffer.seek(0)
        self._buffer.truncate()
        self._pickler.dump(value)
        return self._buffer.getvalue()[2:-1]


def _integers(column: Array) -> list[Piece]:
    """Return the pieces of a *column* of integers."""
    if not column.any():
        return [b"K\0"]
    return [b"J", column.astype("<i4")] if column.max() < 2**31 else [b"\x8a\x08", column.astype("<i8")]


def _rows(count: int, pieces: Sequence[Piece]) -> bytes:
    """Return *pieces* one after another, *count* times: of columns each time the next number."""
    kinds = [np.dtype(f"V{len(piece)}") if isinstance(piece, bytes) else piece.dtype for piece in pieces]
    table = np.empty(count, [(f"{place}", kind) for place, kind in enumerate(kinds)])
    for place, (piece, kind) in enumerate(zip(pieces, kinds, strict=True)):
        table[f"{place}"] = np.frombuffer(piece, kind) if isinstance(piece, bytes) else piece
    return table.tobytes()
