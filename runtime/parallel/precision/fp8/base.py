"""The contract of a back end of fp8, and what the back ends have in common."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from orc.runtime.core.fp8_recipes import FP8Recipe

if TYPE_CHECKING:
    from orc.runtime.core.context import RunContext
    from orc.runtime.parallel.base import Request

OLDEST_GPU = (8, 9)  # compute capability of Ada; Hopper has 9.0


class FP8Backend:
    """Library that computes in fp8.

    Args:
        recipe: its options.

    Attributes:
        name: as scripts and configurations say it.
        with_library: its layers keep the parameters of the script, which is all that one that trains asks of them.
    """

    name: str
    with_library: bool = False

    def __init__(self, recipe: FP8Recipe) -> None:
        self.recipe = recipe

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

    def together(self, objects: Sequence[Any], ctx: RunContext) -> Sequence[Any]:
        """Return the *objects* of one ``prepare``, with those that depend on each other replaced together."""
        return objects

    def has_layers(self, model: nn.Module) -> bool:
        """Return whether *model* has layers of this back end already."""
        raise NotImplementedError

    def check_model(self, model: nn.Module) -> None:
        """Raise `ValueError` when layers of *model* cannot be replaced, because something is attached to them."""
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

    def convert(self, model: nn.Module, ctx: RunContext, request: Request) -> nn.Module:
        """Return *model* with layers of this back end, replaced in place."""
        raise NotImplementedError

    def wrap(self, model: nn.Module) -> None:
        """Put what the back end needs around the forward of *model*; here nothing."""
