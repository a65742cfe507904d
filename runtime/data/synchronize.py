"""Random numbers that every rank shares with rank 0."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from orc.runtime.data.position import Share

if TYPE_CHECKING:
    from orc.runtime.core.context import RunContext


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def share_in(context: RunContext, *, simulated: bool = False) -> Share:
    """A function that gives every rank of *context* rank 0's CPU tensor; what it gets where there are no peers."""
    return _same if context.world_size == 1 or simulated else FromFirst(context)


@dataclass(frozen=True)
class FromFirst:
    """A `Share` that gives every rank of *context* rank 0's CPU tensor."""

    context: RunContext

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return rank 0's *tensor*."""
        import torch.distributed as dist

        shared = tensor.clone()
        dist.broadcast(shared, src=0, group=self.context.control_group("aligning random number generators"))
        return shared


def align(rng_types: Sequence[str], generator: torch.Generator | None, context: RunContext) -> None:
    """Give every rank rank 0's state of the generators *rng_types* (``generator`` is *generator*, if there is one)."""
    from orc.runtime.train.seeding import synchronize_rng_state

    for kind in rng_types:
        if kind != "generator" or generator is not None:
            synchronize_rng_state(kind, generator, ctx=context)
