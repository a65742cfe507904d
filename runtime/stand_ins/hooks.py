"""Hooks around a module's forward, as documented: ``module._hf_hook`` is the hook, ``_old_forward`` what it wraps.

Libraries add and remove them, and ask whether there are any. Hooks that move weights are absent.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn


class ModelHook:
    """Hook that is told before and after each forward of a module; made to be derived from."""

    no_grad = False

    def init_hook(self, module: nn.Module) -> nn.Module:
        """Return the module to use, when the hook is added."""
        return module

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments of forward."""
        return args, kwargs

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        """Return the result of forward."""
        return output

    def detach_hook(self, module: nn.Module) -> nn.Module:
        """Return the module to use, when the hook is removed."""
        return module


class SequentialHook(ModelHook):
    """Several hooks, one after the other."""

    def __init__(self, *hooks: ModelHook) -> None:
        self.hooks = hooks

    def init_hook(self, module: nn.Module) -> nn.Module:
        """Add each hook."""
        for hook in self.hooks:
            module = hook.init_hook(module)
        return module

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Pass the arguments from hook to hook."""
        for hook in self.hooks:
            args, kwargs = hook.pre_forward(module, *args, **kwargs)
        return args, kwargs

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        """Pass the result from hook to hook."""
        for hook in self.hooks:
            output = hook.post_forward(module, output)
        return output

    def detach_hook(self, module: nn.Module) -> nn.Module:
        """Remove each hook."""
        for hook in self.hooks:
            module = hook.detach_hook(module)
        return module


def add_hook_to_module(module: nn.Module, hook: ModelHook, append: bool = False) -> nn.Module:
    """Have *hook* wrap the forward of *module*, after the hooks that are there with *append*, else instead of them."""
    former = getattr(module, "_hf_hook", None)
    if former is not None:
        remove_hook_from_module(module)
        if append:
            hook = SequentialHook(former, hook)
    original = module.forward
    module = hook.init_hook(module)

    @functools.wraps(original)
    def forward(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = hook.pre_forward(module, *args, **kwargs)
        if hook.no_grad:
            with torch.no_grad():
                output = original(*args, **kwargs)
        else:
            output = original(*args, **kwargs)
        return hook.post_forward(module, output)

    for name, value in (("_hf_hook", hook), ("_old_forward", original), ("forward", forward)):
        object.__setattr__(module, name, value)
    return module


def remove_hook_from_module(module: nn.Module, recurse: bool = False) -> nn.Module:
    """Take the hook off *module*, and with *recurse* off all modules in it; without a hook nothing happens."""
    hook = vars(module).get("_hf_hook")
    if hook is not None:
        module = hook.detach_hook(module)
        original = vars(module).pop("_old_forward")
        vars(module).pop("_hf_hook")
        vars(module).pop("forward", None)
        if getattr(original, "__func__", None) is not type(module).forward:  # something else had replaced it before
            object.__setattr__(module, "forward", original)
    if recurse:
        for child in module.children():
            remove_hook_from_module(child, recurse)
    return module


def remove_hook_from_submodules(module: nn.Module) -> None:
    """Take the hooks off *module* and all modules in it."""
    remove_hook_from_module(module, recurse=True)


def has_offloaded_params(module: nn.Module) -> bool:
    """Return False: no weights are moved out of the way by hooks."""
    return False


@contextmanager
def align_module_device(module: nn.Module, execution_device: torch.device | str | None = None) -> Iterator[None]:
    """A block with the parameters of *module* itself on *execution_device*; after it they are where they were."""
    before = {name: parameter.data for name, parameter in module.named_parameters(recurse=False)}
    try:
        if execution_device is not None:
            for parameter in module.parameters(recurse=False):
                parameter.data = parameter.data.to(execution_device)
        yield
    finally:
        if execution_device is not None:
            for name, parameter in module.named_parameters(recurse=False):
                parameter.data = before[name]
