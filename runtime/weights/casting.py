"""Weights that rest in a small dtype and compute in a larger one, layer by layer."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from orc.runtime.weights.hooks import Arguments, ModelHook, add_hook_to_module

# Layers whose weights can rest in another dtype: they do nothing with them outside of their forward.
_LAYERS: tuple[type[nn.Module], ...] = (
    nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d, nn.Linear,
    nn.Embedding,
)  # fmt: skip


class LayerwiseCastingHook(ModelHook):
    """Hook that keeps a layer's weights in *storage_dtype* and computes in *compute_dtype*.

    With *non_blocking* conversions do not wait for the device.
    """

    moves_weights = True

    def __init__(self, storage_dtype: torch.dtype, compute_dtype: torch.dtype, non_blocking: bool = False) -> None:
        self.storage_dtype, self.compute_dtype, self.non_blocking = storage_dtype, compute_dtype, non_blocking

    def init_hook(self, module: nn.Module) -> nn.Module:
        """Return *module* in the storage dtype."""
        return module.to(dtype=self.storage_dtype, non_blocking=self.non_blocking)

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Arguments:
        """Return the arguments; *module* is in the compute dtype now."""
        module.to(dtype=self.compute_dtype, non_blocking=self.non_blocking)
        return args, kwargs

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        """Return *output*; *module* is in the storage dtype again."""
        self.forward_failed(module)
        return output

    def forward_failed(self, module: nn.Module) -> None:
        """Put *module* into the storage dtype."""
        module.to(dtype=self.storage_dtype, non_blocking=self.non_blocking)

    def detach_hook(self, module: nn.Module) -> nn.Module:
        """Return *module* in the compute dtype."""
        return module.to(dtype=self.compute_dtype, non_blocking=self.non_blocking)


def attach_layerwise_casting_hooks(
    module: nn.Module,
    storage_dtype: torch.dtype,
    compute_dtype: torch.dtype,
    skip_modules_pattern: str | Sequence[str] | None = None,
    skip_modules_classes: Sequence[type[nn.Module]] | None = None,
    non_blocking: bool = False,
) -> None:
    """Keep linear, convolution and embedding layers of *module* in *storage_dtype*; they compute in *compute_dtype*.

    Args:
        module: the model.
        storage_dtype: what the weights rest in, such as ``torch.float8_e4m3fn``.
        compute_dtype: what forward computes in.
        skip_modules_pattern: regular expressions; modules whose names they match stay as they are, with all inside.
        skip_modules_classes: classes whose modules stay as they are, with all inside.
        non_blocking: let copies from pinned memory run on while the program goes on.
    """
    patterns = (skip_modules_pattern,) if isinstance(skip_modules_pattern, str) else tuple(skip_modules_pattern or ())
    _attach("", module, LayerwiseCastingHook(storage_dtype, compute_dtype, non_blocking), patterns,
            tuple(skip_modules_classes or ()))  # fmt: skip


def _attach(
    name: str,
    module: nn.Module,
    hook: LayerwiseCastingHook,
    patterns: tuple[str, ...],
    classes: tuple[type[nn.Module], ...],
) -> None:
    if isinstance(module, classes) or any(re.search(pattern, name) for pattern in patterns):
        return
    if isinstance(module, _LAYERS):
        own = LayerwiseCastingHook(hook.storage_dtype, hook.compute_dtype, hook.non_blocking)
        add_hook_to_module(module, own, append=True)
        return
    for child_name, child in module.named_children():
        _attach(f"{name}.{child_name}" if name else child_name, child, hook, patterns, classes)
