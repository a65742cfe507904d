"""Training over torch_xla: gradients are averaged when the optimizer steps, and a step runs what was traced."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from orc.runtime.core.context import RunContext
from orc.runtime.core.errors import ContextError
from orc.runtime.core.prepared import Prepared, PreparedOptimizer
from orc.runtime.engine.native import NativeEngine
from orc.runtime.launch.xla import Xla

if TYPE_CHECKING:
    import torch

    from orc.runtime.core.options import Options


class XlaEngine(NativeEngine):
    """The same as the native engine; what differs is who averages gradients, and when."""

    name = "xla"

    def __init__(self, ctx: RunContext, options: Options | None = None, prepared: Prepared | None = None) -> None:
        super().__init__(ctx, options, prepared)
        if not isinstance(ctx.compute, Xla):
            raise ContextError(f"the xla engine needs torch_xla, but this process computes with {ctx.compute.library}")
        self._xla = ctx.compute

    def complete(self, parameters: Sequence[Tensor]) -> None:
        """Average the gradients first: what is done to all of them has to come after."""
        super().complete(parameters)
        if self._gradient.sync_gradients:
            ids = {id(parameter) for parameter in parameters}
            optimizers = [optimizer.optimizer for optimizer in self.prepared.optimizers]
            self._xla.reduce_gradients([optimizer for optimizer in optimizers if ids & _parameters(optimizer)])

    def step(self, optimizer: PreparedOptimizer, closure: Callable[[], Any] | None = None) -> Any:
        """Average the gradients and step; a prepared loader runs what was traced when it goes on."""
        if self._scaler is not None:
            return super().step(optimizer, closure)
        optimizer.steps += 1
        return self._xla.step(optimizer.optimizer, closure, barrier=not self._gradient.active)

    def zero_grad(self, optimizer: PreparedOptimizer, set_to_none: bool = True) -> None:
        """Clear the gradients; the next ones are to be averaged."""
        super().zero_grad(optimizer, set_to_none)
        self._xla.forget(optimizer.optimizer)


def _parameters(optimizer: torch.optim.Optimizer) -> set[int]:
    return {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}


ENGINE = XlaEngine
