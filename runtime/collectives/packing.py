"""Many small tensors as one payload. Moving data (gather, broadcast) does not care for its type, so tensors of all
dtypes travel as bytes in one collective; arithmetic (reduce) packs per dtype.

How a set of tensors is laid out depends on shapes and dtypes alone, which repeat from step to step: the layout is
cached. Large tensors are not packed: copying them twice costs more than a collective of their own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, cast

import torch
from torch import Tensor

# torch's own flattening of a list in one call, which DDP uses too; there is no public name for it.
from torch._utils import _flatten_dense_tensors

from orc.runtime.collectives.exchange import SMALL_BYTES

flatten_dense = cast("Callable[[Sequence[Tensor]], Tensor]", _flatten_dense_tensors)
# The stub says that it returns nothing.
unbind_copy = cast("Callable[[Tensor], Sequence[Tensor]]", torch.unbind_copy)

LARGE_BYTES = 1 << 20
# Up to here one indexed copy with a cached index is faster than a copy per tensor.
_INDEXED_ELEMENTS = 1 << 16

Key = tuple[tuple[torch.Size, torch.dtype, torch.device], ...]


@dataclass(frozen=True)
class Run:
    """Tensors of one shape that lie side by side: they are taken out together, by one view."""

    shape: torch.Size
    count: int

    @property
    def elements(self) -> int:
        """Of all of them."""
        return self.count * math.prod(self.shape)


@dataclass(frozen=True, eq=False)  # cached with its layout: identity is equality, and hashing is free
class Part:
    """The packed tensors of one dtype: which ones, sorted into runs, and where their bytes are in the payload."""

    dtype: torch.dtype
    members: tuple[int, ...]
    runs: tuple[Run, ...]
    elements: int
    start: int  # bytes
    end: int


@dataclass(frozen=True, eq=False)
class Layout:
    """Layout in which tensors on one device travel: *parts* in one payload of *size* bytes, *large* ones each alone.

    *empty* ones do not travel.
    """

    device: torch.device
    parts: tuple[Part, ...]
    size: int
    large: tuple[int, ...]
    empty: tuple[int, ...]


def sole(found: Sequence[Layout]) -> Layout | None:
    """Return the layout of tensors that travel in one small payload of host memory, and of no others."""
    if len(found) != 1 or found[0].large or found[0].device.type != "cpu" or not 0 < found[0].size <= SMALL_BYTES:
        return None
    return found[0]


def key_of(leaves: Sequence[Tensor]) -> Key:
    """Return the shapes, dtypes and devices of *leaves*, which decide their layout."""
    return tuple([(leaf.shape, leaf.dtype, leaf.device) for leaf in leaves])


@lru_cache(maxsize=256)
def shapes_of(key: Key) -> tuple[tuple[tuple[int, ...], torch.dtype], ...]:
    """Return what of *key* has to be the same on all processes."""
    return tuple((tuple(shape), dtype) for shape, dtype, _ in key)


@lru_cache(maxsize=256)
def layouts(key: Key) -> tuple[Layout, ...]:
    """Return a layout per device in *key*. Parts come by falling element size, which keeps every part aligned."""
    result = []
    for device in dict.fromkeys(device for _, _, device in key):
        small: dict[torch.dtype, dict[torch.Size, list[int]]] = {}
        large, empty = [], []
        for index, (shape, dtype, where) in enumerate(key):
            size = math.prod(shape) * dtype.itemsize
            if where != device:
                continue
            if size == 0:
                empty.append(index)
            elif size >= LARGE_BYTES:
                large.append(index)
            else:
                small.setdefault(dtype, {}).setdefault(shape, []).append(index)
        parts, offset = [], 0
        for dtype, by_shape in sorted(small.items(), key=lambda item: -item[0].itemsize):
            runs = tuple(Run(shape, len(members)) for shape, members in by_shape.items())
            elements = sum(run.elements for run in runs)
            end = offset + elements * dtype.itemsize
            members = tuple(index for indices in by_shape.values() for index in indices)
            parts.append(Part(dtype, members, runs, elements, offset, end))
            offset = end
        result.append(Layout(device, tuple(parts), offset, tuple(large), tuple(empty)))
    return tuple(result)


def flatten_part(part: Part, leaves: Sequence[Tensor]) -> Tensor:
    """The elements of *part*'s tensors, one after the other; not a copy when it is only one tensor."""
    return flatten_dense([leaves[i] for i in part.members])


def unflatten_part(part: Part, flat: Tensor, out: list[Any], ranks: int = 0) -> None:
    """Put the tensors in *flat* into *out*, in the shapes of *part*; with *ranks*, joined over so many processes.

    Each has memory of its own: a result that is kept or saved must not keep all others.
    """
    members = iter(part.members)
    copies = max(ranks, 1)
    start = 0
    for run in part.runs:
        end = start + run.elements * copies
        piece = flat if len(part.runs) == 1 else flat[start:end]
        shape = joined(run.shape, ranks) if ranks else run.shape
        if run.count == len(part.members) == 1:
            out[next(members)] = piece.view(shape)
        else:
            for tensor in unbind_copy(piece.view(run.count, *shape)):
                out[next(members)] = tensor
        start = end


def pack(layout: Layout, leaves: Sequence[Tensor]) -> Tensor:
    """The payload of *layout*, uint8 ``[size]``."""
    flats = [flatten_part(part, leaves).view(torch.uint8) for part in layout.parts]
    return flats[0] if len(flats) == 1 else torch.cat(flats)


def unpack(layout: Layout, payload: Tensor, out: list[Any]) -> None:
    """Put the tensors of a payload back in their places in *out*; they share the payload's memory."""
    for part in layout.parts:
        members = iter(part.members)
        flat, start = payload[part.start : part.end].view(part.dtype), 0
        for run in part.runs:
            for tensor in flat[start : start + run.elements].view(run.count, *run.shape).unbind(0):
                out[next(members)] = tensor
            start += run.elements


def unpack_gathered(layout: Layout, payload: Tensor, ranks: int, out: list[Any]) -> None:
    """Put the tensors of *ranks* payloads, one after the other, into *out*, each joined along its first dimension."""
    rows = payload.view(ranks, layout.size)
    for part in layout.parts:
        columns = rows if len(layout.parts) == 1 else rows[:, part.start : part.end].contiguous()
        if part.elements * ranks <= _INDEXED_ELEMENTS:
            flat = columns.view(-1).view(part.dtype).index_select(0, _interleave(part, ranks, layout.device))
            unflatten_part(part, flat, out, ranks)
            continue
        sizes = [math.prod(run.shape) for run in part.runs for _ in range(run.count)]
        shapes = [joined(run.shape, ranks) for run in part.runs for _ in range(run.count)]
        pieces = torch.split_with_sizes(columns.view(part.dtype), sizes, dim=1)
        for index, piece, shape in zip(part.members, pieces, shapes, strict=True):
            out[index] = piece.reshape(shape)  # a copy, unless it is the only one


def joined(shape: torch.Size, ranks: int) -> torch.Size:
    """The shape after joining *ranks* tensors of *shape* along the first dimension."""
    return torch.Size((ranks * shape[0], *shape[1:]) if shape else (ranks,))


@lru_cache(maxsize=32)
def _interleave(part: Part, ranks: int, device: torch.device) -> Tensor:
    """Return the payload index of each result element: payloads lie rank by rank, results tensor by tensor."""
    columns = torch.arange(ranks * part.elements).view(ranks, part.elements)
    sizes = [math.prod(run.shape) for run in part.runs for _ in range(run.count)]
    return torch.cat([piece.reshape(-1) for piece in torch.split_with_sizes(columns, sizes, dim=1)]).to(device)
