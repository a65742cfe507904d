"""Precisions of training: the devices of each, its change of a model, its forward and backward.

A new one is a module here with an attribute ``PRECISION``, named in `orc.runtime.core.config.PRECISIONS`; nothing else
changes.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from orc.runtime.core.compute import TORCH
from orc.runtime.core.context import peek_context

if TYPE_CHECKING:
    from orc.runtime.core.context import RunContext
    from orc.runtime.core.handlers import AutocastKwargs, GradScalerKwargs, KwargsHandler
    from orc.runtime.parallel.base import Request


class Precision:
    """Precision of forward and backward. This one computes in what the model has; subclasses override.

    Args:
        recipe: options of this precision, where it has any.

    Attributes:
        name: as scripts and configurations say it.
        dtype: the type that autocast computes in; `None` without autocast.
    """

    name: str = "no"
    dtype: torch.dtype | None = None

    def __init__(self, recipe: KwargsHandler | None = None) -> None:
        self.recipe = recipe

    def check(self, ctx: RunContext) -> None:
        """Raise `LaunchError` when the run *ctx* cannot train in this precision; before anything is allocated."""

    def together(self, objects: Sequence[Any], ctx: RunContext) -> Sequence[Any]:
        """Return the *objects* of one ``prepare``, with those that depend on each other replaced together."""
        return objects

    def convert(self, model: nn.Module, ctx: RunContext, request: Request) -> nn.Module:
        """Return *model* with the layers that compute in this precision; before any parallelizer applies.

        A model that is for evaluation only (``request.evaluation``) keeps its layers.
        """
        return model

    def wrap(self, model: nn.Module, device: torch.device, options: AutocastKwargs, *, compiled: bool = False) -> None:
        """Let the forward of *model* compute in this precision; a second time changes nothing."""
        if self.dtype is None:
            return
        from orc.runtime.parallel.precision.forward import AutocastForward, TraceableAutocastForward

        if not isinstance(model.forward, AutocastForward):
            kind = TraceableAutocastForward if compiled else AutocastForward
            model.forward = kind(model.forward, functools.partial(self.autocast, device, options))

    def autocast(
        self, device: torch.device, options: AutocastKwargs | None = None
    ) -> contextlib.AbstractContextManager[Any]:
        """A fresh autocast context, or one that does nothing without mixed precision and nothing to disable."""
        enabled, cached = (True, None) if options is None else (options.enabled, options.cache_enabled)
        if self.dtype is None and enabled:
            return contextlib.nullcontext()
        kwargs = {} if cached is None else {"cache_enabled": cached}
        return torch.autocast(device.type, dtype=self.dtype, enabled=enabled, **kwargs)

    def scaler(
        self, device: torch.device, options: GradScalerKwargs | None = None, *, flattened: bool = False
    ) -> torch.amp.GradScaler | None:
        """The loss scaler, or `None` where losses need no scaling.

        With *flattened* parameters, as in FSDP version 1, an overflow in one rank's part makes all skip the step.
        """
        return None


def precision_for(name: str, recipe: KwargsHandler | None = None) -> Precision:
    """Return the precision *name*, with the options in *recipe*.

    Raises:
        ValueError: *recipe* has the options of another precision.
    """
    if recipe is not None and (own := getattr(recipe, "precision", name)) != name:
        raise ValueError(f"{type(recipe).__name__} needs mixed_precision={own!r}; it is {name!r}")
    module = importlib.import_module(f"{__name__}.{name}")
    precision: Precision = module.PRECISION(recipe)
    return precision


def is_bf16_available(ignore_tpu: bool = False) -> bool:
    """Return whether this process's accelerator supports bfloat16; `True` on a CPU.

    On a TPU it does unless *ignore_tpu*.
    """
    context = peek_context()
    return (TORCH if context is None else context.compute).supports_bf16(ignore_tpu)
