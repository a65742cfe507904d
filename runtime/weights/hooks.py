"""Hooks around the forward of a module: what goes in, what comes out, and where its weights are meanwhile.

A hooked module keeps its forward as ``_old_forward`` and its hook as ``_hf_hook``; libraries look at both.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

import torch
from torch import nn

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


class ModelHook:
    """Hook that is called before and after each forward of a module; made to be derived from.

    With ``no_grad = True`` the module's forward runs under `torch.no_grad`. A hook that puts other weights into the
    module says ``moves_weights = True``: `torch.compile` does not look into it.
    """

    no_grad = False
    moves_weights = False

    def init_hook(self, module: nn.Module) -> nn.Module:
        """Return the module to use, when the hook is added."""
        return module

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Arguments:
        """Return the arguments of forward.

        Args:
            module: the module of the hook.
        """
        return args, kwargs

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        """Return the result of forward.

        Args:
            module: the module of the hook.
            output: the result of its forward.
        """
        return output

    def forward_failed(self, module: nn.Module) -> None:
        """Clear up where forward raised, and `post_forward` is not called.

        Args:
            module: the module of the hook.
        """

    def detach_hook(self, module: nn.Module) -> nn.Module:
        """Return the module to use, when the hook is removed."""
        return module


class SequentialHook(ModelHook):
    """Several hooks in one, called in order before forward and after it."""

    def __init__(self, *hooks: ModelHook) -> None:
        self.hooks = hooks
        self.no_grad = any(hook.no_grad for hook in hooks)
        self.moves_weights = any(hook.moves_weights for hook in hooks)

    def init_hook(self, module: nn.Module) -> nn.Module:
        """Return the module after each hook was added to it."""
        for hook in self.hooks:
            module = hook.init_hook(module)
        return module

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Arguments:
        """Return the arguments after they went from hook to hook."""
        for hook in self.hooks:
            args, kwargs = hook.pre_forward(module, *args, **kwargs)
        return args, kwargs

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        """Return the result after it went from hook to hook."""
        for hook in self.hooks:
            output = hook.post_forward(module, output)
        return output

    def forward_failed(self, module: nn.Module) -> None:
        """Let each hook clear up."""
        for hook in self.hooks:
            hook.forward_failed(module)

    def detach_hook(self, module: nn.Module) -> nn.Module:
        """Return the module after each hook was removed from it."""
        for hook in self.hooks:
            module = hook.detach_hook(module)
        return module


class HookedForward:
    """Forward of a module with its hook around it.

    An object, not a closure, so that a copy or a pickle of the module calls the copy's own hook and forward.
    """

    def __init__(self, module: nn.Module, forward: Any) -> None:
        functools.update_wrapper(self, forward)  # who inspects it sees the parameters of the original
        self.module = module

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the module's result for these arguments, as its hook leaves them."""
        module = self.module
        hook: ModelHook = module._hf_hook  # type: ignore[assignment]
        before, after, failed = _steps(hook)
        try:
            args, kwargs = before(module, *args, **kwargs)
            if hook.no_grad:
                with torch.no_grad():
                    output = module._old_forward(*args, **kwargs)  # type: ignore[operator]
            else:
                output = module._old_forward(*args, **kwargs)  # type: ignore[operator]
        except BaseException:
            failed(module)
            raise
        return after(module, output)


def _steps(hook: ModelHook) -> tuple[Any, Any, Any]:
    """Return what *hook* does before and after forward and where that fails, hidden from a compiler if need be."""
    if not hook.moves_weights or "torch._dynamo" not in sys.modules:
        return hook.pre_forward, hook.post_forward, hook.forward_failed
    kind = type(hook)
    if kind not in _UNTRACED:
        _UNTRACED[kind] = _untraced(kind)
    before, after, failed = _UNTRACED[kind]
    return functools.partial(before, hook), functools.partial(after, hook), functools.partial(failed, hook)


_UNTRACED: dict[type[ModelHook], tuple[Any, Any, Any]] = {}


def _untraced(kind: type[ModelHook]) -> tuple[Any, Any, Any]:
    # Here and not where the methods are defined, because the decorator imports the compiler.
    return (
        torch.compiler.disable(kind.pre_forward),
        torch.compiler.disable(kind.post_forward),
        torch.compiler.disable(kind.forward_failed),
    )


def add_hook_to_module(module: nn.Module, hook: ModelHook, append: bool = False) -> nn.Module:
    """Return *module* with *hook* around its forward.

    Args:
        module: the module; it is changed in place.
        hook: the hook.
        append: call it after the hook that is there; else it takes that one's place.
    """
    former = vars(module).get("_hf_hook")
    if former is not None:
        if append:  # the former stays as it is: its weights need not go back and forth
            module = hook.init_hook(module)
            object.__setattr__(module, "_hf_hook", SequentialHook(*_flat(former), hook))
            return module
        remove_hook_from_module(module)
    original = module.forward
    module = hook.init_hook(module)
    # Past `nn.Module.__setattr__`: a hook may be a module, which is no part of this one.
    object.__setattr__(module, "_hf_hook", hook)
    object.__setattr__(module, "_old_forward", original)
    object.__setattr__(module, "forward", HookedForward(module, original))
    return module


def _flat(hook: ModelHook) -> tuple[ModelHook, ...]:
    return tuple(hook.hooks) if isinstance(hook, SequentialHook) else (hook,)


def remove_hook_from_module(module: nn.Module, recurse: bool = False) -> nn.Module:
    """Return *module* without its hook, and with *recurse* all modules in it; without a hook nothing happens."""
    hook = vars(module).get("_hf_hook")
    if hook is not None:
        module = hook.detach_hook(module)
        original = vars(module).pop("_old_forward")
        vars(module).pop("_hf_hook")
        if isinstance(vars(module).get("forward"), HookedForward):
            vars(module).pop("forward")
            if getattr(original, "__func__", None) is not type(module).forward:  # it had been replaced before
                object.__setattr__(module, "forward", original)
    if recurse:
        for child in module.children():
            remove_hook_from_module(child, recurse)
    return module


def remove_hook_from_submodules(module: nn.Module) -> None:
    """Remove the hooks of *module* and of all modules in it."""
    remove_hook_from_module(module, recurse=True)
