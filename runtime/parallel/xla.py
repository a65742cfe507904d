"""Replicas over torch_xla: every process holds the whole model; gradients are averaged when the optimizer steps."""

from __future__ import annotations

from typing import TYPE_CHECKING

from orc.runtime.launch.xla import Xla
from orc.runtime.parallel.base import Parallelizer, Request

if TYPE_CHECKING:
    from torch import nn

    from orc.runtime.core.context import RunContext


class XlaReplicas(Parallelizer):
    """The same parameters on all processes. The model is not wrapped: there is nothing to do in its backward."""

    name = "xla"
    order = 400
    default = True

    def wanted(self, model: nn.Module, ctx: RunContext, request: Request) -> bool:
        """With several processes over torch_xla, for a model that is trained."""
        return (
            ctx.distributed
            and not request.evaluation
            and request.strategy in ("auto", "ddp")
            and any(parameter.requires_grad for parameter in model.parameters())
        )

    def requires(self, ctx: RunContext) -> str | None:
        """Nothing more."""
        return None

    def apply(self, model: nn.Module, ctx: RunContext, request: Request) -> nn.Module:
        """Give all processes the parameters of rank 0."""
        if isinstance(ctx.compute, Xla):
            ctx.compute.broadcast_parameters(model)
        return model


PARALLELIZER = XlaReplicas()
