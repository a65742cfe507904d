"""Mixed precision with 8-bit products: a back end replaces layers, the rest computes in bfloat16.

A new back end is a module here with an attribute ``BACKEND``, named (in lower case) in `fp8_settings.BACKENDS`, and its
options in `fp8_recipes.RECIPES`.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from orc.runtime.core.errors import LaunchError
from orc.runtime.core.fp8_recipes import FP8Recipe, resolve_recipe
from orc.runtime.parallel.precision import Precision
from orc.runtime.parallel.precision.fp8.base import FP8Backend
from orc.runtime.parallel.replacements import following

if TYPE_CHECKING:
    from orc.runtime.core.context import RunContext
    from orc.runtime.core.handlers import AutocastKwargs
    from orc.runtime.parallel.base import Request


class FP8(Precision):
    """Products in fp8 by one of the back ends, and autocast to bfloat16 for the rest."""

    name = "fp8"
    dtype = torch.bfloat16
    recipe: FP8Recipe | None

    @cached_property
    def backend(self) -> FP8Backend:
        """The back end that computes. Raises `LaunchError` where it is not installed."""
        try:
            recipe = resolve_recipe(self.recipe)
        except ValueError as error:
            raise LaunchError(str(error)) from None
        module = importlib.import_module(f"{__name__}.{str(getattr(recipe, 'backend', '')).lower()}")
        backend: FP8Backend = module.BACKEND(recipe)
        return backend

    def check(self, ctx: RunContext) -> None:
        """Raise `LaunchError` where no back end is installed, or it cannot compute in the run *ctx*."""
        if ctx.library is not None and not self.backend.with_library:
            raise LaunchError(
                f"the back end {self.backend.name.lower()} of fp8 and {ctx.library.title} do not go together in this "
                "version of orc: choose the back end ao, shard with an fsdp_plugin, or choose bf16"
            )
        if reason := self.backend.requires(ctx):
            raise LaunchError(f"mixed_precision=fp8 with the back end {self.backend.name.lower()}: {reason}")

    def together(self, objects: Sequence[Any], ctx: RunContext) -> Sequence[Any]:
        """Return *objects* as the back end makes them of each other."""
        return self.backend.together(objects, ctx)

    def convert(self, model: nn.Module, ctx: RunContext, request: Request) -> nn.Module:
        """Return *model* with layers of the back end, unless it is for evaluation only; optimizers follow.

        Raises:
            ValueError: its layers cannot be replaced.
        """
        if request.evaluation or self.backend.has_layers(model):  # converted by the script, or by an earlier call
            return model
        self.backend.check_model(model)
        with following(model):
            return self.backend.convert(model, ctx, request)

    def wrap(self, model: nn.Module, device: torch.device, options: AutocastKwargs, *, compiled: bool = False) -> None:
        """Let the forward of *model* compute in fp8 where its layers can, in bfloat16 elsewhere."""
        self.backend.wrap(model)
        super().wrap(model, device, options, compiled=compiled)


PRECISION = FP8
