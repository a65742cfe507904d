"""MS-AMP: 8-bit gradients and communication (O1), and states of the optimizer (O2). It replaces model and optimizer.

It computes on NVIDIA GPUs only. The tests run against a double of its documented function ``msamp.initialize``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from torch import nn
from torch.optim import Optimizer

from orc.runtime.core.fp8_recipes import MSAMPRecipeKwargs
from orc.runtime.parallel.precision.fp8 import FP8

if TYPE_CHECKING:
    from orc.runtime.core.context import RunContext
    from orc.runtime.parallel.base import Request

_TOGETHER = (
    "mixed_precision=fp8 with MS-AMP replaces a model and its optimizer together: accelerator.prepare(model, "
    "optimizer) with one of each"
)


class MSAMP(FP8):
    """MS-AMP."""

    backend = "MSAMP"
    recipe: MSAMPRecipeKwargs

    def __init__(self, recipe: MSAMPRecipeKwargs) -> None:
        super().__init__(recipe)
        self._made: WeakSet[nn.Module] = WeakSet()

    def requires(self, ctx: RunContext) -> str | None:
        """A GPU with fp8, and replicas: it has its own form of shards."""
        if ctx.fsdp_plugin is not None:
            return "it does not train shards (fsdp_plugin); choose the back end ao or te"
        return super().requires(ctx)

    def together(self, objects: Sequence[Any], ctx: RunContext) -> Sequence[Any]:
        """Return *objects* with the model and the optimizer that MS-AMP makes of them.

        Raises:
            ValueError: there is no optimizer to a model, or several of them; O2 without Adam.
        """
        from orc.runtime.parallel import extract_model_from_parallel

        models = [
            index
            for index, item in enumerate(objects)
            if isinstance(item, nn.Module) and extract_model_from_parallel(item) not in self._made
        ]
        optimizers = [index for index, item in enumerate(objects) if isinstance(item, Optimizer)]
        if not models:
            return objects
        if len(models) > 1 or len(optimizers) != 1:
            raise ValueError(_TOGETHER)
        import msamp

        optimizer = objects[optimizers[0]]
        if self.recipe.opt_level == "O2" and "adam" not in type(optimizer).__name__.lower():
            raise ValueError(
                f"MS-AMP keeps the states of Adam in 8 bits (O2), not those of {type(optimizer).__name__}: choose "
                "opt_level='O1' or AdamW"
            )
        model = objects[models[0]].to(ctx.device)
        model, optimizer = msamp.initialize(model, optimizer, opt_level=self.recipe.opt_level)
        self._made.add(model)
        result = list(objects)
        result[models[0]], result[optimizers[0]] = model, optimizer
        return result

    def has_layers(self, model: nn.Module) -> bool:
        """Return whether *model* is MS-AMP's already."""
        return model in self._made

    def replaced(self, model: nn.Module, ctx: RunContext, request: Request) -> nn.Module:
        """Refused: the optimizer is missing. Raises `ValueError`."""
        raise ValueError(_TOGETHER)


BACKEND = MSAMP
