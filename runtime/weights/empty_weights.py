"""Models without memory: parameters on the meta device as they are made, and putting real tensors in their place."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn


@contextlib.contextmanager
def init_empty_weights(include_buffers: bool | None = None) -> Iterator[None]:
    """A block in which models are made without using memory: every parameter goes to the meta device at once.

    Args:
        include_buffers: buffers too. By default they are real: many are computed from other tensors.

    Example:
        >>> with init_empty_weights():
        ...     model = nn.Sequential(*[nn.Linear(10000, 10000) for _ in range(1000)])
        >>> next(model.parameters()).device
        device(type='meta')
    """
    with init_on_device(torch.device("meta"), include_buffers=include_buffers):
        yield


@contextlib.contextmanager
def init_on_device(device: torch.device | str, include_buffers: bool | None = None) -> Iterator[None]:
    """A block in which models are made on *device*. It holds for the whole process, so for all of its threads.

    Args:
        device: where parameters go as soon as they are registered.
        include_buffers: buffers too; then every tensor of the block is made on *device* in the first place.
    """
    if include_buffers:
        with torch.device(device):
            yield
        return
    original = nn.Module.register_parameter

    def register(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        original(module, name, param)
        made = module._parameters[name]
        if made is None:
            return
        value = made.detach().to(device)
        if value.device != made.device:  # else it may be shared, and stays so
            module._parameters[name] = moved_parameter(made, value)

    nn.Module.register_parameter = register  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = original  # type: ignore[method-assign]


def moved_parameter(parameter: nn.Parameter, value: Tensor) -> nn.Parameter:
    """A parameter like *parameter*, of the same class and with the same attributes, that holds *value*."""
    # A parameter of a tensor subclass (quantized weights, for one) is of that class, and made like a plain one.
    kind: Any = type(parameter) if issubclass(type(parameter), nn.Parameter) else nn.Parameter
    wanted = parameter.requires_grad and (value.is_floating_point() or value.is_complex())
    result: nn.Parameter = kind(value, requires_grad=wanted)
    if kind is nn.Parameter and type(parameter) is not nn.Parameter:
        return result
    result.__dict__.update({key: kept for key, kept in parameter.__dict__.items() if key != "requires_grad"})
    return result


def set_module_tensor_to_device(
    module: nn.Module,
    tensor_name: str,
    device: torch.device | str | int,
    value: Tensor | None = None,
    dtype: torch.dtype | str | None = None,
    fp16_statistics: Tensor | None = None,
    tied_params_map: dict[int, dict[Any, Tensor]] | None = None,
    non_blocking: bool = False,
    clear_cache: bool = True,
) -> None:
    """Put one parameter or buffer of *module* on *device*, with a new value if there is one.

    Args:
        module: the module, or one above it.
        tensor_name: the tensor's name, with dots for modules inside.
        device: where to.
        value: what to put there; needed when the tensor is on the meta device and *device* is not.
        dtype: of the result; by default the one the tensor has.
        fp16_statistics: of 8-bit weights; quantised modules are not supported here.
        tied_params_map: tensors by data pointer and device that were moved already, and are used again.
        non_blocking: let copies from pinned memory run on while the program goes on.
        clear_cache: give the memory that a GPU tensor left back to the device.

    Raises:
        ValueError: there is no such tensor, no value for it, or a value of another shape.
    """
    if fp16_statistics is not None:
        raise ValueError("fp16_statistics belongs to quantised modules, which are not supported here")
    path, _, name = tensor_name.rpartition(".")
    owner = _inside(module, path)
    tensors = owner._parameters if name in owner._parameters else owner._buffers
    if name not in tensors:
        raise ValueError(f"{type(owner).__name__} does not have a parameter or a buffer named {name}.")
    old = tensors[name]
    target = torch.device("meta" if device == "disk" else device)
    if old is None and value is None:
        return
    if value is None:
        assert old is not None
        if old.device == target and dtype is None:
            return
        if old.is_meta and target.type != "meta":
            raise ValueError(f"{tensor_name} is on the meta device, we need a `value` to put in on {device}.")
    elif old is not None and old.shape != value.shape:
        raise ValueError(f'Trying to set a tensor of shape {value.shape} in "{tensor_name}" (which has shape '
                         f"{old.shape}), this looks incorrect.")  # fmt: skip
    new = _moved(old, value, target, as_dtype(dtype), tied_params_map, non_blocking)
    if isinstance(old, nn.Parameter):
        new = moved_parameter(old, new) if not isinstance(new, nn.Parameter) else new
    elif tensors is owner._parameters and not isinstance(new, nn.Parameter):
        new = nn.Parameter(new, requires_grad=new.is_floating_point())
    tensors[name] = new  # type: ignore[assignment]
    if clear_cache and old is not None and old.device.type not in ("cpu", "meta"):
        from orc.runtime.train.memory import clear_device_cache

        clear_device_cache()


def _inside(module: nn.Module, path: str) -> nn.Module:
    try:
        return module.get_submodule(path)
    except AttributeError as error:
        raise ValueError(f"{type(module).__name__} has no submodule {path}: {error}") from None


def as_dtype(dtype: torch.dtype | str | None) -> torch.dtype | None:
    """Return the dtype of that name. Raises `ValueError` where there is none."""
    if isinstance(dtype, str):
        known = getattr(torch, dtype.removeprefix("torch."), None)
        if not isinstance(known, torch.dtype):
            raise ValueError(f"`dtype` is not a valid dtype: {dtype!r} is no dtype")
        return known
    return dtype


def _moved(
    old: Tensor | None,
    value: Tensor | None,
    target: torch.device,
    dtype: torch.dtype | None,
    known: dict[int, dict[Any, Tensor]] | None,
    non_blocking: bool,
) -> Tensor:
    source = value if value is not None else old
    assert source is not None
    key = source.data_ptr()
    if known is not None and target in known.get(key, {}):
        return known[key][target]
    if dtype is None and old is not None and value is not None and value.is_floating_point():
        dtype = old.dtype  # as load_state_dict does
    new = source.detach().to(device=target, dtype=dtype or source.dtype, non_blocking=non_blocking)
    if known is not None and key in known:
        known[key][target] = new
    return new
