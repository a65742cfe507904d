"""gather, reduce, broadcast and pad over nested structures of tensors."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from orc.runtime.collectives import verify
from orc.runtime.collectives.exchange import SMALL_BYTES, all_gather_flat
from orc.runtime.collectives.packing import (
    Layout,
    Part,
    flatten_part,
    joined,
    key_of,
    layouts,
    pack,
    shapes_of,
    sole,
    unbind_copy,
    unflatten_part,
    unpack,
    unpack_gathered,
)
from orc.runtime.collectives.tree import CannotPadNestedTensorWarning, flatten, outline, unflatten
from orc.runtime.core.compute import TORCH, Leaves
from orc.runtime.core.context import RunContext, current_context
from orc.runtime.core.host_memory import new_empty

# What the backends cannot add travels wider. Sums of truth values stay counts.
_CARRIERS = {
    torch.bool: torch.int64,
    torch.int16: torch.int32,
    torch.uint16: torch.int32,
    torch.uint32: torch.int64,
}

_TOGETHER_BYTES = 1 << 14
_PIECE_BYTES, _PIECES_AT_ONCE = 16 << 20, 2


def gather(tensor: Any, *, ctx: RunContext | None = None) -> Any:
    """Return the tensors of all processes, joined along the first dimension, on every process.

    A tensor of shape ``[n, ...]`` becomes ``[world * n, ...]`` in order of rank; one without dimensions becomes
    ``[world]``. All processes must pass the same structure, shapes and dtypes. Gradients do not flow through.

    Args:
        ctx: the run; the current one unless given.

    Raises:
        TypeError: an element is no tensor.
        DistributedOperationException: the processes differ.
    """
    ctx = ctx or current_context()
    if ctx.world_size == 1:
        return tensor
    group = ctx.require_group("gather")
    leaves, spec = flatten(tensor, "gather")
    key = key_of(leaves)
    alone = _in_band(key, ctx)
    sent = None if alone is None else pack(alone, leaves)
    rows = verify.exchange_checked("gather", tensor, (outline(spec), shapes_of(key)), ctx, sent)
    if (carrier := ctx.compute.collectives) is not None:
        return unflatten(spec, _carried(ctx, leaves, carrier.gather, _gather))
    out: list[Any] = [None] * len(leaves)
    with torch.no_grad():
        for layout in layouts(key):
            if layout.size:
                if layout is alone:
                    everything = rows.contiguous().view(-1)
                else:
                    payload = pack(layout, leaves)
                    everything = payload.new_empty(ctx.world_size * layout.size)
                    all_gather_flat(everything, payload, group)
                unpack_gathered(layout, everything, ctx.world_size, out)
            for index in layout.empty:
                out[index] = leaves[index].new_empty(joined(leaves[index].shape, ctx.world_size))
            for index in layout.large:
                out[index] = _gather_large(leaves[index], ctx.world_size, group)
    return unflatten(spec, out)


def _in_band(key: Any, ctx: RunContext) -> Layout | None:
    """The layout of tensors that are small enough to travel together with the comparison of the operands."""
    return None if ctx.compute.collectives is not None or ctx.control_device.type != "cpu" else sole(layouts(key))


def _gather(leaves: list[Tensor], ctx: RunContext) -> Any:
    return gather(leaves, ctx=ctx)


def _gather_large(leaf: Tensor, ranks: int, group: dist.ProcessGroup) -> Tensor:
    leaf = leaf.detach().contiguous()
    result = new_empty(leaf, (ranks * leaf.shape[0], *leaf.shape[1:]))
    all_gather_flat(result.view(-1).view(torch.uint8), leaf.view(-1).view(torch.uint8), group)
    return result


def reduce(tensor: Any, reduction: str = "mean", scale: float = 1.0, *, ctx: RunContext | None = None) -> Any:
    """The tensors of all processes combined element by element, on every process; the inputs stay as they are.

    Args:
        tensor: a structure of tensors, the same on all processes.
        reduction: ``sum``, ``mean``, ``max``, ``min`` or ``none`` (returns the input). Means of whole numbers are
            float32. Sums and means count truth values.
        scale: what results are multiplied by on XLA devices; it has no meaning elsewhere.
        ctx: the process context.

    Raises:
        TypeError: an element is no tensor.
        ValueError: an unknown reduction.
        DistributedOperationException: the processes differ.
    """
    if reduction not in ("sum", "mean", "max", "min", "none"):
        raise ValueError(f"reduce: unknown reduction {reduction!r}; choose sum, mean, max, min or none")
    ctx = ctx or current_context()
    if ctx.world_size == 1 or reduction == "none":
        return tensor
    if reduction in ("max", "min"):
        # Rare and small (a metric, a flag): gathered, and looked at here.
        extreme = torch.amax if reduction == "max" else torch.amin
        from orc.runtime.collectives.tree import recursively_apply

        rows = gather(recursively_apply(lambda leaf: leaf.unsqueeze(0), tensor, error_on_other_type=True), ctx=ctx)
        return recursively_apply(lambda leaf: extreme(leaf, 0), rows)
    group = ctx.require_group("reduce")
    leaves, spec = flatten(tensor, "reduce")
    key = key_of(leaves)
    alone = _in_band(key, ctx)
    if alone is not None and alone.size * ctx.world_size > SMALL_BYTES:
        alone = None  # a ring moves less
    sent = None if alone is None else pack(alone, leaves)
    rows = verify.exchange_checked("reduce", tensor, (outline(spec), shapes_of(key)), ctx, sent)
    if (carrier := ctx.compute.collectives) is not None:
        return unflatten(
            spec,
            _carried(
                ctx,
                leaves,
                lambda some: carrier.reduce(some, reduction, scale),
                lambda some, plain: reduce(some, reduction, ctx=plain),
            ),
        )
    out: list[Any] = list(leaves)
    with torch.no_grad():
        for layout in layouts(key):
            for part in layout.parts:
                if layout is alone:
                    total = _sum_here(part, rows)
                else:
                    flat = flatten_part(part, leaves)
                    # A single tensor is not copied by flattening.
                    total = _sum(flat.clone() if len(part.members) == 1 else flat, group)
                unflatten_part(part, _divided(total, ctx.world_size) if reduction == "mean" else total, out)
            for index in layout.large:
                total = _sum_large(leaves[index].detach(), group)
                out[index] = _divided(total, ctx.world_size) if reduction == "mean" else total
    return unflatten(spec, out)


def _sum(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """*tensor*, which may be overwritten, summed over the processes."""
    dtype = tensor.dtype
    if dtype in _CARRIERS:
        tensor = tensor.to(_CARRIERS[dtype])
    dist.all_reduce(torch.view_as_real(tensor) if tensor.is_complex() else tensor, group=group)
    return tensor.to(dtype) if dtype in _CARRIERS and dtype != torch.bool else tensor


def _sum_large(leaf: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The sum of *leaf* over the processes; on the host, one piece is copied while the ones before it travel."""
    if leaf.dtype in _CARRIERS or leaf.device.type != "cpu":
        return _sum(leaf.clone(memory_format=torch.contiguous_format), group)
    result = new_empty(leaf)
    total, own = (torch.view_as_real(t) if t.is_complex() else t for t in (result, leaf.contiguous()))
    length = _PIECE_BYTES // total.dtype.itemsize
    under_way: list[dist.Work] = []
    for piece, source in zip(total.view(-1).split(length), own.view(-1).split(length), strict=True):
        piece.copy_(source)
        if len(under_way) == _PIECES_AT_ONCE:
            under_way.pop(0).wait()
        under_way.append(dist.all_reduce(piece, group=group, async_op=True))
    for work in under_way:
        work.wait()
    return result


def _divided(total: Tensor, by: int) -> Tensor:
    """*total*, which may be overwritten, divided; whole numbers become float32."""
    return total.div_(by) if total.is_floating_point() or total.is_complex() else total / by


def _sum_here(part: Part, rows: Tensor) -> Tensor:
    """The sum of *part* over the processes, whose payloads *rows* are; as `_sum`."""
    columns = rows[:, part.start : part.end].contiguous().view(part.dtype)
    carrier = _CARRIERS.get(part.dtype, part.dtype)
    total = columns.to(carrier).sum(0, dtype=carrier)
    return total.to(part.dtype) if part.dtype in _CARRIERS and part.dtype != torch.bool else total


def broadcast(tensor: Any, from_process: int = 0, *, ctx: RunContext | None = None) -> Any:
    """Fill the tensors of all processes, in place, with those of *from_process*; returns the structure.

    All processes must pass the same structure, shapes and dtypes.

    Args:
        ctx: the run; the current one unless given.

    Raises:
        TypeError: an element is no tensor.
        DistributedOperationException: the processes differ.
    """
    ctx = ctx or current_context()
    if ctx.world_size == 1 or ctx.mirrored:
        return tensor
    group = ctx.require_group("broadcast")
    leaves, spec = flatten(tensor, "broadcast")
    key = key_of(leaves)
    alone = _in_band(key, ctx)
    sent = None if alone is None else pack(alone, leaves)
    rows = verify.exchange_checked("broadcast", tensor, (outline(spec), shapes_of(key)), ctx, sent)
    if (carrier := ctx.compute.collectives) is not None:
        _carried(
            ctx,
            leaves,
            lambda some: carrier.broadcast(some, from_process),
            lambda some, plain: broadcast(some, from_process, ctx=plain),
        )
        return tensor
    with torch.no_grad():
        for layout in layouts(key):
            if layout is alone:
                if layout.size and ctx.rank != from_process:
                    _copy_packed(layout, rows[from_process].clone(), leaves)
            elif layout.size:
                _broadcast_packed(layout, leaves, from_process, ctx.rank, group)
            for index in layout.large:
                leaf = leaves[index]
                dense = leaf.detach() if leaf.is_contiguous() else leaf.detach().contiguous()
                dist.broadcast(dense.view(-1).view(torch.uint8), from_process, group)
                if ctx.rank != from_process and not leaf.is_contiguous():
                    leaf.copy_(dense)
    return tensor


def _broadcast_packed(layout: Layout, leaves: list[Tensor], source: int, rank: int, group: dist.ProcessGroup) -> None:
    if rank == source:
        dist.broadcast(pack(layout, leaves), source, group)
        return
    payload = torch.empty(layout.size, dtype=torch.uint8, device=layout.device)
    dist.broadcast(payload, source, group)
    _copy_packed(layout, payload, leaves)


def _copy_packed(layout: Layout, payload: Tensor, leaves: list[Tensor]) -> None:
    received: list[Any] = [None] * len(leaves)
    unpack(layout, payload, received)
    packed = [index for part in layout.parts for index in part.members]
    torch._foreach_copy_([leaves[i].detach() for i in packed], [received[i] for i in packed])


def pad_across_processes(
    tensor: Any, dim: int = 0, pad_index: float = 0, pad_first: bool = False, *, ctx: RunContext | None = None
) -> Any:
    """Pad every tensor along *dim* to the largest size on any process, so that the results can be gathered.

    Tensors without that dimension stay, and so do ragged ones, with a `CannotPadNestedTensorWarning`. One small
    collective finds all sizes.

    Args:
        tensor: a structure of tensors, the same on all processes but for their sizes.
        dim: the dimension to pad.
        pad_index: the value of the new elements.
        pad_first: put them at the beginning instead of the end.
        ctx: the process context.

    Returns:
        A structure like *tensor* with the padded tensors.

    Raises:
        TypeError: an element is no tensor.
        DistributedOperationException: the processes differ in more than sizes.
    """
    ctx = ctx or current_context()
    if ctx.world_size == 1:
        return tensor
    leaves, spec = flatten(tensor, "pad_across_processes")
    if any(leaf.is_nested for leaf in leaves):
        warnings.warn(
            "ragged (nested) tensors cannot be padded and stay as they are", CannotPadNestedTensorWarning, stacklevel=2
        )
    shapes = [() if leaf.is_nested else leaf.shape for leaf in leaves]
    own = [shape[dim] if -len(shape) <= dim < len(shape) else 0 for shape in shapes]
    # Sizes along other dimensions may differ, too: a script pads one after the other.
    kinds = tuple((leaf.ndim, leaf.dtype) for leaf in leaves)
    sent = torch.tensor(own, dtype=torch.int64).view(torch.uint8)
    rows = verify.exchange_checked("pad_across_processes", tensor, (outline(spec), kinds), ctx, sent, free_sizes=True)
    sizes = rows.cpu().contiguous().view(torch.int64).view(ctx.world_size, -1).amax(0)
    padded = list(leaves)
    alike: dict[Any, list[int]] = {}  # many small tensors of one kind are padded together
    for index, (mine, largest) in enumerate(zip(own, sizes.tolist(), strict=True)):
        if mine != largest:
            leaf = leaves[index]
            alike.setdefault((shapes[index], largest, leaf.dtype, leaf.device), []).append(index)
    for (shape, largest, *_), members in alike.items():
        first, missing = leaves[members[0]], largest - shape[dim]
        if len(members) == 1 or first.nbytes > _TOGETHER_BYTES:
            for index in members:
                padded[index] = _pad(leaves[index], dim, missing, pad_index, pad_first)
            continue
        stacked = torch.stack([leaves[index] for index in members])
        several = _pad(stacked, dim % len(shape) + 1, missing, pad_index, pad_first)
        for index, result in zip(members, unbind_copy(several), strict=True):
            padded[index] = result
    return unflatten(spec, padded)


def _pad(leaf: Tensor, dim: int, missing: int, value: float, first: bool) -> Tensor:
    # Pairs of (before, after), from the last dimension up to *dim*.
    amounts = [0, 0] * (leaf.ndim - dim % leaf.ndim)
    amounts[-2 if first else -1] = missing
    return torch.constant_pad_nd(leaf, amounts, value)


def any_process(flag: bool, *, ctx: RunContext | None = None) -> bool:
    """Return whether *flag* is set on any process; the result is the same on all."""
    ctx = ctx or current_context()
    if ctx.world_size == 1:
        return flag
    value = torch.tensor([flag], dtype=torch.int32, device=ctx.control_device)
    dist.all_reduce(value, dist.ReduceOp.MAX, ctx.require_group("any_process"))
    return bool(value.item())


def _carried(
    ctx: RunContext, leaves: Leaves, by_carrier: Callable[[Leaves], Leaves], operation: Callable[..., Any]
) -> Any:
    """*leaves* after a collective: those of the device *by_carrier*, the others by *operation* over the group."""
    results: dict[int, Tensor] = {}
    here = [index for index, leaf in enumerate(leaves) if leaf.device.type == ctx.device.type]
    away = [index for index in range(len(leaves)) if index not in set(here)]
    if here:
        with torch.no_grad():
            results.update(zip(here, by_carrier([leaves[index].detach() for index in here]), strict=True))
    if away:
        plain = dataclasses.replace(ctx, compute=TORCH)
        results.update(zip(away, operation([leaves[index] for index in away], plain), strict=True))
    return [results[index] for index in range(len(leaves))]
