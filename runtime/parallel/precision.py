"""Mixed precision: which autocast, which gradient scaler, and the wrapper around a model's forward."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from orc.runtime.collectives.tree import convert_to_fp32, recursively_apply
from orc.runtime.core.compute import TORCH
from orc.runtime.core.context import peek_context
from orc.runtime.core.errors import LaunchError
from orc.runtime.core.handlers import AutocastKwargs, GradScalerKwargs

_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


def is_bf16_available(ignore_tpu: bool = False) -> bool:
    """Return whether this process's accelerator supports bfloat16; `True` on a CPU.

    On a TPU it does unless *ignore_tpu*.
    """
    context = peek_context()
    return (TORCH if context is None else context.compute).supports_bf16(ignore_tpu)


def check_precision(mixed_precision: str, device: torch.device) -> None:
    """Raise `LaunchError` when *device* cannot train in *mixed_precision*."""
    if mixed_precision == "bf16" and device.type == "cuda" and not torch.cuda.is_bf16_supported():
        raise LaunchError(f"mixed_precision=bf16 needs a newer GPU than {torch.cuda.get_device_name(device)}; use fp16")


def loss_scaler(
    mixed_precision: str, device: torch.device, options: GradScalerKwargs | None = None, *, flattened: bool = False
) -> torch.amp.GradScaler | None:
    """The loss scaler that fp16 needs; `None` for every other precision.

    With *flattened* parameters, as in FSDP version 1, an overflow in one rank's part makes all skip the step.
    """
    if mixed_precision != "fp16":
        return None
    kwargs = options.to_kwargs() if options else {}
    if flattened:
        from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

        return ShardedGradScaler(device.type, **kwargs)
    return torch.amp.GradScaler(device.type, **kwargs)


def autocast_for(
    mixed_precision: str, device: torch.device, options: AutocastKwargs | None = None
) -> contextlib.AbstractContextManager[Any]:
    """A fresh autocast context, or one that does nothing when there is no mixed precision and nothing to disable."""
    options = options or AutocastKwargs()
    dtype = _DTYPES.get(mixed_precision)
    if dtype is None and options.enabled:
        return contextlib.nullcontext()
    kwargs = {} if options.cache_enabled is None else {"cache_enabled": options.cache_enabled}
    return torch.autocast(device.type, dtype=dtype, enabled=options.enabled, **kwargs)


class AutocastForward:
    """A model's forward in mixed precision, with float32 outputs.

    Put in the place of ``model.forward``. Autocast contexts are kept for the next call: making one costs more than
    entering it. They are handed out one per call in progress, so that a forward may run inside another.
    """

    def __init__(
        self, forward: Callable[..., Any], mixed_precision: str, device: torch.device, options: AutocastKwargs
    ) -> None:
        self.original = forward
        self._settings = mixed_precision, device, options
        self._idle: list[Any] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The model's output, half-precision tensors as float32."""
        try:
            context = self._idle.pop()
        except IndexError:
            context = autocast_for(*self._settings)
        with context:
            output = self.original(*args, **kwargs)
        self._idle.append(context)
        if type(output) is torch.Tensor:
            return output.float() if output.dtype in (torch.float16, torch.bfloat16) else output
        return convert_to_fp32(output)

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        """The original forward, where `inspect.signature` finds the arguments."""
        return self.original

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_idle": []}


class TraceableAutocastForward(AutocastForward):
    """The same for a model that is compiled: the compiler follows a context that is made where it is entered."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The model's output, half-precision tensors as float32."""
        with autocast_for(*self._settings):
            output = self.original(*args, **kwargs)
        return convert_to_fp32(output)


def wrap_forward(
    model: nn.Module, mixed_precision: str, device: torch.device, options: AutocastKwargs, *, compiled: bool = False
) -> None:
    """Let *model* compute in mixed precision; a second time changes nothing."""
    if not isinstance(model.forward, AutocastForward):
        kind = TraceableAutocastForward if compiled else AutocastForward
        model.forward = kind(model.forward, mixed_precision, device, options)


def unwrap_forward(model: nn.Module) -> None:
    """Undo `wrap_forward`."""
    if isinstance(model.forward, AutocastForward):
        original = model.forward.original
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
    """*function* with its half-precision outputs converted to float32."""

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return convert_to_fp32(function(*args, **kwargs))

    return wrapper
