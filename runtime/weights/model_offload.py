"""Whole models that take turns on a device: each comes when it is called and leaves when the next one is."""

from __future__ import annotations

from typing import Any

from torch import nn

from orc.runtime.collectives.tree import send_to_device
from orc.runtime.weights.alignment import Device, as_device
from orc.runtime.weights.dispatch import check_device
from orc.runtime.weights.hooks import Arguments, ModelHook, add_hook_to_module, remove_hook_from_module


class CpuOffload(ModelHook):
    """Hook that brings a model to *execution_device* for its forward and leaves it there.

    Args:
        execution_device: where forward runs; by default the accelerator, or the CPU without one.
        prev_module_hook: the hook of the model before it in a pipeline, which leaves the device first.
    """

    moves_weights = True

    def __init__(
        self, execution_device: Device | None = None, prev_module_hook: UserCpuOffloadHook | None = None
    ) -> None:
        self.execution_device = (
            as_device(0 if _has_accelerator() else "cpu") if execution_device is None else execution_device
        )
        self.prev_module_hook = prev_module_hook

    def init_hook(self, module: nn.Module) -> nn.Module:
        """Return *module* on the CPU."""
        return module.to("cpu")

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Arguments:
        """Return the arguments on the execution device, where *module* is now and the one before it is no more."""
        if self.prev_module_hook is not None:
            self.prev_module_hook.offload()
        device = as_device(self.execution_device)
        module.to(device)
        return send_to_device(args, device), send_to_device(kwargs, device)


class UserCpuOffloadHook:
    """Handle of a `CpuOffload` hook and its model: `offload` sends the model to the CPU, `remove` ends it."""

    def __init__(self, model: nn.Module, hook: CpuOffload) -> None:
        self.model, self.hook = model, hook

    def offload(self) -> None:
        """Send the model to the CPU."""
        self.hook.init_hook(self.model)

    def remove(self) -> None:
        """Take the hook off the model."""
        remove_hook_from_module(self.model)


def cpu_offload_with_hook(
    model: nn.Module, execution_device: Device | None = None, prev_module_hook: UserCpuOffloadHook | None = None
) -> tuple[nn.Module, UserCpuOffloadHook]:
    """Send *model* to the CPU; a forward brings it to *execution_device*, where it stays until its hook offloads it.

    Args:
        model: the model; it is changed in place.
        execution_device: where forward runs; by default the accelerator, or the CPU without one.
        prev_module_hook: the hook of the model before it in a pipeline: it is offloaded when this model is called.

    Returns:
        The model, and its hook: call ``hook.offload()`` after the last forward.

    Raises:
        ValueError: this machine does not have the device.
    """
    if execution_device is not None:
        check_device(execution_device, "execution_device: the model")
    hook = CpuOffload(execution_device, prev_module_hook)
    add_hook_to_module(model, hook, append=True)
    return model, UserCpuOffloadHook(model, hook)


def _has_accelerator() -> bool:
    import torch

    return torch.cuda.is_available() or (hasattr(torch, "accelerator") and torch.accelerator.is_available())
