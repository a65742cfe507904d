"""Gathering results for metrics: without the samples that were repeated to fill up the last batch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from orc.runtime.collectives.collectives import gather
from orc.runtime.collectives.objects import gather_object
from orc.runtime.collectives.tree import elements, flatten, unflatten
from orc.runtime.core.context import RunContext, current_context

if TYPE_CHECKING:
    from orc.runtime.core.accumulation import GradientRecord


def gather_for_metrics(input_data: Any, use_gather_object: bool = False, *, ctx: RunContext | None = None) -> Any:
    """`gather` over the ranks with different data, cut to the samples of the current batch that are no repetitions.

    The loader that yielded last says how many of its last global batch are real.

    Args:
        input_data: tensors in any nesting, one row per sample; or other objects.
        use_gather_object: send pickled objects: tensors of different sizes, anything. A list or tuple has one element
            per sample; anything else with rows (a tensor, a dictionary of columns) arrives as one element per process,
            cut to its rows that are no repetitions.
        ctx: the process context.
    """
    run = ctx or current_context()
    ctx = run.topology.data_context  # what peers have in common counts once
    tensors = not use_gather_object and any(isinstance(value, Tensor) for _, value in elements(input_data))
    everything = gather(input_data, ctx=ctx) if tensors else gather_object(input_data, ctx=ctx)
    valid = run.gradient.remainder
    if ctx.world_size == 1:
        valid = _rows_of_last_batch(run.gradient) if tensors else -1
    if valid < 0:
        return everything
    if not tensors:
        return everything[:valid] if isinstance(input_data, (list, tuple)) else _cut_each(everything, valid)
    leaves, spec = flatten(everything)
    # What had no dimension before the gathering has one row per process, not per sample.
    rows = [leaf[:valid] if mine.ndim else leaf for leaf, mine in zip(leaves, flatten(input_data)[0], strict=True)]
    return unflatten(spec, rows)


def _rows_of_last_batch(gradient: GradientRecord) -> int:
    """Rows of a last batch that is not full, -1 for others: libraries gather a value repeated to a full batch."""
    loader: Any = gradient.active[-1] if gradient.end_of_dataloader else None
    return getattr(loader, "rows_of_last_batch", -1)


def _cut_each(parts: list[Any], valid: int) -> list[Any]:
    """The parts of all processes, of which the first *valid* rows count."""
    from orc.runtime.collectives.batch import cut, rows_of

    result = []
    for part in parts:
        rows = rows_of(part)
        result.append(part if rows is None else cut(part, slice(0, valid)))
        valid = max(0, valid - (rows or 0))
    return result
