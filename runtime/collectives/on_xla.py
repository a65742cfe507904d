"""Collectives over torch_xla, of tensors on its device."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

if TYPE_CHECKING:
    from orc.runtime.core.compute import Leaves


class Operations(Protocol):
    """What torch_xla computes between processes, of tensors of the types and shapes that it takes."""

    world_size: int

    def all_gather(self, tensors: Leaves) -> Leaves:
        """Return each of *tensors* of all processes, joined along the first dimension."""
        ...

    def all_reduce(self, tensors: Leaves, scale: float) -> Leaves:
        """Return the sum over the processes of each of *tensors*, times *scale*."""
        ...

    def broadcast(self, tensors: Leaves, source: int) -> None:
        """Fill *tensors* with those of rank *source*."""
        ...


class XlaCarrier:
    """The collectives of *xla*, for tensors of every dtype and shape."""

    def __init__(self, xla: Operations) -> None:
        self._xla = xla

    def gather(self, leaves: Leaves) -> Leaves:
        """Each of *leaves* of all processes, joined along the first dimension."""
        full = [index for index, leaf in enumerate(leaves) if leaf.numel()]
        gathered = self._xla.all_gather(
            [_numbers(leaves[index]).reshape(leaves[index].shape or (1,)) for index in full]
        )
        results = {index: one.to(leaves[index].dtype) for index, one in zip(full, gathered, strict=True)}
        ranks = self._xla.world_size
        return [
            results[index] if index in results else leaf.new_empty((ranks * leaf.shape[0], *leaf.shape[1:]))
            for index, leaf in enumerate(leaves)
        ]

    def reduce(self, leaves: Leaves, reduction: str, scale: float) -> Leaves:
        """The sum or mean over the processes of each of *leaves*, times *scale*."""
        carriers = [_numbers(leaf) for leaf in leaves]
        scaled = [tensor if tensor.is_floating_point() or scale == 1 else tensor.float() for tensor in carriers]
        totals = self._xla.all_reduce(scaled, scale)
        return [total / self._xla.world_size for total in totals] if reduction == "mean" else totals

    def broadcast(self, leaves: Leaves, source: int) -> Leaves:
        """*leaves*, filled in place with those of rank *source*."""
        self._xla.broadcast(leaves, source)
        return leaves


def _numbers(leaf: Tensor) -> Tensor:
    # XLA's collectives are for numbers; sums of truth values stay counts, as everywhere.
    return leaf.to(torch.int64) if leaf.dtype == torch.bool else leaf
