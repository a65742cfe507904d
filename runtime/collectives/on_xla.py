"""Collectives over torch_xla. Tensors on its device travel through XLA, those in host memory over the process group."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from orc.runtime.core.context import RunContext

Leaves = list[Tensor]


def carried(
    ctx: RunContext, leaves: Leaves, over_xla: Callable[[Leaves], Leaves], operation: Callable[..., Any]
) -> Any:
    """*leaves* after a collective: those of the device by *over_xla*, the others by *operation* over the group."""
    results: dict[int, Tensor] = {}
    here = [index for index, leaf in enumerate(leaves) if leaf.device.type == ctx.device.type]
    away = [index for index in range(len(leaves)) if index not in set(here)]
    if here:
        with torch.no_grad():
            results.update(zip(here, over_xla([leaves[index].detach() for index in here]), strict=True))
    if away:
        plain = dataclasses.replace(ctx, xla=None)
        results.update(zip(away, operation([leaves[index] for index in away], plain), strict=True))
    return [results[index] for index in range(len(leaves))]


def gather(ctx: RunContext, leaves: Leaves) -> Leaves:
    """Each of *leaves* of all processes, joined along the first dimension."""
    assert ctx.xla is not None
    full = [index for index, leaf in enumerate(leaves) if leaf.numel()]
    found = ctx.xla.all_gather([_numbers(leaves[index]).reshape(leaves[index].shape or (1,)) for index in full])
    results = {index: one.to(leaves[index].dtype) for index, one in zip(full, found, strict=True)}
    return [
        results[index] if index in results else leaf.new_empty((ctx.world_size * leaf.shape[0], *leaf.shape[1:]))
        for index, leaf in enumerate(leaves)
    ]


def reduce(ctx: RunContext, leaves: Leaves, reduction: str, scale: float) -> Leaves:
    """The sum or mean over the processes of each of *leaves*, times *scale*."""
    assert ctx.xla is not None
    carriers = [_numbers(leaf) for leaf in leaves]
    scaled = [one if one.is_floating_point() or scale == 1 else one.float() for one in carriers]
    totals = ctx.xla.all_reduce(scaled, scale)
    return [total / ctx.world_size for total in totals] if reduction == "mean" else totals


def broadcast(ctx: RunContext, leaves: Leaves, source: int) -> Leaves:
    """*leaves*, filled in place with those of rank *source*."""
    assert ctx.xla is not None
    ctx.xla.broadcast(leaves, source)
    return leaves


def _numbers(leaf: Tensor) -> Tensor:
    # XLA's collectives are for numbers; sums of truth values stay counts, as everywhere.
    return leaf.to(torch.int64) if leaf.dtype == torch.bool else leaf
