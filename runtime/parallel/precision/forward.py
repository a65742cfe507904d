"""Forwards in mixed precision: what takes the place of a model's ``forward``, and conversions around it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from orc.runtime.collectives.tree import convert_to_fp32, recursively_apply


class WrappedForward:
    """A callable in the place of ``model.forward``, around the one that was there."""

    def __init__(self, forward: Callable[..., Any]) -> None:
        self.original = forward

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        """The original forward, where `inspect.signature` finds the arguments."""
        return self.original


class AutocastForward(WrappedForward):
    """A model's forward in mixed precision, with float32 outputs.

    Autocast contexts are kept for the next call: making one costs more than entering it. They are handed out one per
    call in progress, so that a forward may run inside another.

    Args:
        forward: the one that computes.
        autocast: makes the contexts.
    """

    def __init__(self, forward: Callable[..., Any], autocast: Callable[[], AbstractContextManager[Any]]) -> None:
        super().__init__(forward)
        self._autocast = autocast
        self._idle: list[Any] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The model's output, half-precision tensors as float32."""
        try:
            context = self._idle.pop()
        except IndexError:
            context = self._autocast()
        with context:
            output = self.original(*args, **kwargs)
        self._idle.append(context)
        if type(output) is torch.Tensor:
            return output.float() if output.dtype in (torch.float16, torch.bfloat16) else output
        return convert_to_fp32(output)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_idle": []}


class TraceableAutocastForward(AutocastForward):
    """The same for a model that is compiled: the compiler follows a context that is made where it is entered."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The model's output, half-precision tensors as float32."""
        with self._autocast():
            output = self.original(*args, **kwargs)
        return convert_to_fp32(output)


def unwrap_forward(model: nn.Module) -> None:
    """Give *model* back the forward that it had before it got a `WrappedForward`, or several."""
    if not isinstance(model.forward, WrappedForward):
        return
    original: Any = model.forward
    while isinstance(original, WrappedForward):
        original = original.original
    del model.__dict__["forward"]
    if model.forward != original:  # the script had put its own in the place of the class's
        model.forward = original


def cast_inputs(model: nn.Module, dtype: torch.dtype) -> None:
    """Convert the floating-point tensors that *model* is called with to *dtype*, which its parameters have."""

    def cast(module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        return recursively_apply(_as(dtype), args), recursively_apply(_as(dtype), kwargs)

    model.register_forward_pre_hook(cast, with_kwargs=True)


def _as(dtype: torch.dtype) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor


def convert_outputs_to_fp32(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return *function* with its half-precision outputs converted to float32."""

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return convert_to_fp32(function(*args, **kwargs))

    return wrapper
