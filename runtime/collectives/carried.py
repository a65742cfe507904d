"""Collectives of a library below torch: tensors on its device travel through it, others over the process group."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from orc.runtime.core.compute import TORCH, Leaves

if TYPE_CHECKING:
    from orc.runtime.core.context import RunContext


def carried(
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
