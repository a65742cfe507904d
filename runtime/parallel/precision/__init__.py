"""Precisions of training: the devices of each, its change of a model, its forward and backward.

A new one is a module here with an attribute ``PRECISION``, named in `orc.runtime.core.config.PRECISIONS`; nothing else
changes.
"""

from __future__ import annotations

import contextlib
import importlib
from typing import TYPE_CHECKING, Any

from orc.runtime.core.compute import TORCH
from orc.runtime.core.config import PRECISIONS
from orc.runtime.core.context import peek_context
from orc.runtime.parallel.precision.base import Precision

if TYPE_CHECKING:
    import torch

    from orc.runtime.core.handlers import AutocastKwargs, GradScalerKwargs, KwargsHandler


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


def loss_scaler(
    mixed_precision: str, device: torch.device, options: GradScalerKwargs | None = None, *, flattened: bool = False
) -> torch.amp.GradScaler | None:
    """The loss scaler of the precision *mixed_precision*, see `Precision.scaler`; `None` where it needs none."""
    return precision_for(mixed_precision).scaler(device, options, flattened=flattened)


def autocast_for(
    mixed_precision: str, device: torch.device, options: AutocastKwargs | None = None
) -> contextlib.AbstractContextManager[Any]:
    """A fresh autocast context of the precision *mixed_precision*, see `Precision.autocast`."""
    return precision_for(mixed_precision).autocast(device, options)


__all__ = [
    "PRECISIONS",
    "Precision",
    "autocast_for",
    "is_bf16_available",
    "loss_scaler",
    "precision_for",
]
