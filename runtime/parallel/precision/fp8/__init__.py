"""Mixed precision with 8-bit products: a library replaces layers, the rest computes in bfloat16.

A new back end is a module here with a subclass of `FP8` as the attribute ``BACKEND``, named (in lower case) in
`fp8_settings.BACKENDS`, and its options in `fp8_recipes.RECIPES`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

import torch
from torch import nn

from orc.runtime.core.errors import LaunchError
from orc.runtime.core.fp8_recipes import FP8Recipe, resolve_recipe
from orc.runtime.parallel.precision import Precision
from orc.runtime.parallel.replacements import following

if TYPE_CHECKING:
    from orc.runtime.core.context import RunContext
    from orc.runtime.parallel.base import Request

OLDEST_GPU = (8, 9)  # compute capability of Ada; Hopper has 9.0


class FP8(Precision):
    """Products in fp8 by one library, and autocast to bfloat16 for the rest; subclasses say what differs.

    Attributes:
        backend: the library, as scripts and configurations say it.
        with_library: its layers keep the parameters of the script, which is all that a library that trains asks of
            them.
    """

    name = "fp8"
    dtype = torch.bfloat16
    backend: str
    with_library: bool = False
    recipe: FP8Recipe

    def check(self, ctx: RunContext) -> None:
        """Raise `LaunchError` where the back end cannot compute in the run *ctx*."""
        if ctx.library is not None and not self.with_library:
            raise LaunchError(
                f"the back end {self.backend.lower()} of fp8 and {ctx.library.title} do not go together in this "
                "version of orc: choose the back end ao, shard with an fsdp_plugin, or choose bf16"
            )
        if reason := self.requires(ctx):
            raise LaunchError(f"mixed_precision=fp8 with the back end {self.backend.lower()}: {reason}")

    def requires(self, ctx: RunContext) -> str | None:
        """Return the reason why the back end cannot compute in *ctx*, or `None`. Here: an NVIDIA GPU with fp8."""
        if ctx.device.type != "cuda":
            return f"it computes on NVIDIA GPUs, not on {ctx.device.type}"
        capability = torch.cuda.get_device_capability(ctx.device)
        if capability >= OLDEST_GPU:
            return None
        return (
            f"it needs a GPU with fp8 (Ada, Hopper or newer: compute capability {'.'.join(map(str, OLDEST_GPU))}); "
            f"{torch.cuda.get_device_name(ctx.device)} has {'.'.join(map(str, capability))}; choose bf16"
        )

    def convert(self, model: nn.Module, ctx: RunContext, request: Request) -> nn.Module:
        """Return *model* with layers of the back end, unless it is for evaluation only; optimizers follow.

        Raises:
            ValueError: its layers cannot be replaced, because something is attached to them.
        """
        if request.evaluation or self.has_layers(model):  # converted by the script, or by an earlier call
            return model
        from orc.runtime.parallel import is_sharded

        if is_sharded(model):
            raise ValueError(
                "mixed_precision=fp8: the model is sharded already, and its layers cannot be replaced any more: "
                "convert it before fully_shard, or let prepare shard it (fsdp_plugin)"
            )
        if any(hasattr(module, "_hf_hook") for module in model.modules()):
            raise ValueError(
                "mixed_precision=fp8: the model has hooks (a device map, offloading), which would be lost with the "
                "layers that are replaced: load it without, or choose bf16"
            )
        with following(model):
            return self.replaced(model, ctx, request)

    def has_layers(self, model: nn.Module) -> bool:
        """Return whether *model* has layers of this back end already."""
        raise NotImplementedError

    def replaced(self, model: nn.Module, ctx: RunContext, request: Request) -> nn.Module:
        """Return *model* with layers of this back end, replaced in place."""
        raise NotImplementedError


def by_library(recipe: FP8Recipe | None = None) -> FP8:
    """Return fp8 by the back end of *recipe*, of the environment, or of an installed library.

    Raises:
        LaunchError: the library is not installed, or none is.
    """
    try:
        recipe = resolve_recipe(recipe)
    except ValueError as error:
        raise LaunchError(str(error)) from None
    module = importlib.import_module(f"{__name__}.{str(getattr(recipe, 'backend', '')).lower()}")
    precision: FP8 = module.BACKEND(recipe)
    return precision


PRECISION = by_library
