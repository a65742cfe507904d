"""Compare the operands of all processes before a collective, instead of hanging in it or being ended by it."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from orc.runtime.collectives.exchange import exchange, fingerprint
from orc.runtime.collectives.objects import all_gather_pickled
from orc.runtime.collectives.tree import elements, recursively_apply
from orc.runtime.core.context import RunContext
from orc.runtime.core.errors import DistributedOperationException

# One element of an operand: its path, its shape with sizes that may differ masked, its dtype.
_Element = tuple[str, tuple[int | None, ...], str]


def exchange_checked(
    operation: str, data: Any, key: Any, ctx: RunContext, payload: Tensor | None = None, *, free_sizes: bool = False
) -> Tensor:
    """Return the *payload* of each process, uint8 ``[world, length]``, when their operands have the same *key*.

    That they have is found out by a collective that fits whatever they bring, so it does not matter which process
    brings something new. In debug mode the operands are compared in full first.

    Raises:
        DistributedOperationException: the operands differ; on all processes.
    """
    if ctx.debug:
        same(operation, data, ctx, free_sizes=free_sizes)
    rows = exchange(ctx, operation, fingerprint(operation, key), payload)
    if rows is None:
        same(operation, data, ctx, free_sizes=free_sizes)
        raise DistributedOperationException(f"orc.runtime.{operation}: the processes pass operands that differ")
    return rows


def same(operation: str, data: Any, ctx: RunContext, *, free_sizes: bool = False) -> None:
    """Raise `DistributedOperationException` on all processes unless they agree on structure, shapes and dtypes.

    With *free_sizes* on the number of dimensions, not on their sizes.
    """
    mine = (operation, _describe(data, free_sizes), str(recursively_apply(_shape, data)))
    everyone = all_gather_pickled(mine, ctx, operation)
    operations = [name for name, _, _ in everyone]
    if len(set(operations)) > 1:
        calls = "\n".join(f"  - Process {process}: `orc.runtime.{name}`" for process, name in enumerate(operations))
        raise DistributedOperationException(
            "Cannot apply desired operation: the processes call different ones. Every process must make the same "
            f"calls in the same order.\n\n{calls}"
        )
    if message := mismatch(operation, [one for _, one, _ in everyone], [shapes for _, _, shapes in everyone]):
        raise DistributedOperationException(message)


def _shape(tensor: Tensor) -> list[int | None]:
    # A nested tensor of torch's older kind has no shape, only a number of dimensions.
    return [None] * tensor.ndim if tensor.is_nested else list(tensor.shape)


def _describe(data: Any, free_sizes: bool) -> list[_Element]:
    described: list[_Element] = []
    for path, leaf in elements(data, canonical=True):
        if isinstance(leaf, Tensor):
            shape: list[int | None] = [None] * leaf.ndim if free_sizes else _shape(leaf)
            described.append((path, tuple(shape), str(leaf.dtype)))
    return described


def mismatch(operation: str, described: list[list[_Element]], shapes: list[str]) -> str | None:
    """Return the message on the first difference between the processes, or `None`; it shows operands as *shapes*."""
    first = described[0]
    for rank, other in enumerate(described):
        if other == first:
            continue
        where = _difference(first, other)
        lines = "\n".join(f"  - Process {process}: {text}" for process, text in enumerate(shapes))
        return (
            "Cannot apply desired operation due to shape mismatches. All shapes across devices must be valid.\n\n"
            f"Operation: `orc.runtime.{operation}`\nInput shapes:\n{lines}\n"
            f"First difference: process {rank} {where}"
        )
    return None


def _difference(first: list[_Element], other: list[_Element]) -> str:
    for (path, shape, dtype), (other_path, other_shape, other_dtype) in zip(first, other, strict=False):
        if path != other_path:
            return f"has {other_path or 'a tensor'} where process 0 has {path or 'a tensor'}"
        at = f"at {path}" if path else "in its tensor"
        if shape != other_shape:
            return f"differs from process 0 {at}: shape {_show(other_shape)} against {_show(shape)}"
        if dtype != other_dtype:
            return f"differs from process 0 {at}: {other_dtype} against {dtype}"
    return f"has {len(other)} tensors, process 0 has {len(first)}"


def _show(shape: tuple[int | None, ...]) -> str:
    return "[" + ", ".join("*" if size is None else str(size) for size in shape) + "]"
