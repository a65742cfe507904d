"""Check of tensor parallelism: what a plan leaves whole has the same gradient on all ranks along ``tp``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn

from orc.runtime.core.errors import ContextError
from orc.runtime.parallel.shards import local_part, spread_over

if TYPE_CHECKING:
    from orc.runtime.core.context import RunContext

_APART = 0.05  # of a gradient's norm: far more than rounding, far less than what a rank's part lacks


@torch.no_grad()
def refuse_partial(model: nn.Module, ctx: RunContext) -> bool:
    """Compare the gradients of what is not cut along ``tp``; collective over all ranks of the run.

    A parameter that is used on activations that are cut gets the gradient of one rank's part of them, and its copies
    drift apart silently.

    Returns:
        `False` where there are no finite gradients yet to compare.

    Raises:
        ContextError: they differ; the same on every rank.
    """
    group = ctx.topology.group("tp")
    assert group is not None
    whole = [
        (name, parameter)
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and "tp" not in spread_over([parameter])
    ]
    if not whole:
        return True
    first = dist.get_global_rank(group, 0)
    partial = []
    for _, one in whole:
        gradient = local_part(one if one.grad is None else one.grad).float()
        if one.grad is None:
            gradient = torch.zeros_like(gradient)
        theirs = gradient.clone(memory_format=torch.contiguous_format)
        dist.broadcast(theirs, first, group)
        partial.append(torch.stack([(gradient - theirs).norm(), theirs.norm()]))
    norms: Tensor = torch.stack(partial)
    dist.all_reduce(norms, dist.ReduceOp.MAX, ctx.require_group("tensor parallelism"))
    apart, size = norms.double().cpu().unbind(1)
    total = float(size.norm())
    if not 0 < total < float("inf"):
        return False
    wrong = [
        name for (name, _), bad in zip(whole, (apart > _APART * size) & (apart > 1e-6 * total), strict=True) if bad
    ]
    if wrong:
        shown = ", ".join(wrong[:5]) + (f" and {len(wrong) - 5} more" if len(wrong) > 5 else "")
        raise ContextError(
            f"tensor parallelism: the processes along tp have different gradients of {shown}, which the plan leaves "
            "whole: they are used on activations that are cut. Name their modules in the plan: "
            "'replicated_with_grad_allreduce' for a norm over each head, 'colwise' or 'rowwise' for a matrix, or a "
            "ParallelStyle of your own"
        )
    return True
