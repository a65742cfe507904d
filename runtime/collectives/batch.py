"""Cutting and joining batches for dispatch: like tensors along the first dimension, but whatever else has rows too."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from orc.runtime.collectives.tree import recursively_apply


def _is_column(leaf: Any) -> bool:
    """A tensor, or a list or tuple with one plain value per row (strings, numbers, None), as collate functions make."""
    if isinstance(leaf, torch.Tensor):
        return True
    return (
        isinstance(leaf, (list, tuple))
        and not hasattr(leaf, "_fields")
        and bool(leaf)
        and not any(isinstance(value, (torch.Tensor, list, tuple, Mapping)) for value in leaf)
    )


def _length(column: Any) -> int | None:
    if isinstance(column, torch.Tensor):
        return column.shape[0] if column.dim() else None
    return len(column)


def _columns(batch: Any) -> list[Any]:
    columns: list[Any] = []
    recursively_apply(columns.append, batch, test_type=_is_column)
    return columns


def _of_samples(batch: Any) -> bool:
    """Return whether *batch* is a list of samples (as ``collate_fn=list`` makes): its columns have no common length."""
    lengths = {length for column in _columns(batch) if (length := _length(column)) is not None}
    return isinstance(batch, (list, tuple)) and len(lengths) != 1


def rows_of(batch: Any) -> int | None:
    """Return the number of samples in *batch*; `None` when nothing in it has rows."""
    if _of_samples(batch):
        return len(batch)
    lengths = [length for column in _columns(batch) if (length := _length(column)) is not None]
    return lengths[0] if lengths else None


def cut(batch: Any, part: slice, process_index: int | None = None, num_processes: int | None = None) -> Any:
    """The samples *part* of *batch*; what has no rows stays as it is. Signature of ``slice_fn_for_dispatch``."""
    if _of_samples(batch):
        return batch[part]
    rows = rows_of(batch)

    def cut_column(column: Any) -> Any:
        return column[part] if _length(column) == rows else column

    return recursively_apply(cut_column, batch, test_type=_is_column)


def join(batches: list[Any]) -> Any:
    """Return a batch with the samples of all *batches*, which have the same structure."""
    first = batches[0]
    if len(batches) == 1:
        return first
    if isinstance(first, (list, tuple)) and (_is_column(first) or _of_samples(first)):
        return type(first)(sample for batch in batches for sample in batch)
    if isinstance(first, torch.Tensor):
        return torch.cat(batches) if first.dim() else first
    columns = [iter(_columns(batch)) for batch in batches]
    return recursively_apply(lambda _: join([next(column) for column in columns]), first, test_type=_is_column)


def fit(batches: list[Any]) -> bool:
    """Return whether `join` can join *batches*: their tensors agree beyond the first dimension."""
    if all(_of_samples(batch) for batch in batches):
        return True
    shapes = [
        [(column.dtype, column.shape[1:]) if isinstance(column, torch.Tensor) else None for column in _columns(batch)]
        for batch in batches
    ]
    return all(other == shapes[0] for other in shapes)


def repeat(batch: Any, rows: int, wanted: int) -> Any:
    """*batch* of *rows* samples with its own samples repeated until there are *wanted*."""
    pieces, have = [batch], rows
    while 0 < have < wanted:
        pieces.append(cut(batch, slice(0, wanted - have)))
        have += min(rows, wanted - have)
    return join(pieces)
