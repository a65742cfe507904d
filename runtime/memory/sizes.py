"""Memory of a model in bytes, computed from shapes and dtypes alone: the model may be on the meta device."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

# What torch has no dtype for: bytes per element by name.
_BY_NAME = {"float32": 4.0, "float16": 2.0, "bfloat16": 2.0, "int8": 1.0, "fp8": 1.0, "int4": 0.5, "int2": 0.25}
_UNITS = {
    "": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "PB": 10**15,
    "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40, "PIB": 2**50,
}  # fmt: skip

Layers = Sequence[tuple[str, nn.Module | Tensor]]


def convert_file_size_to_int(size: int | str) -> int:
    """Return the bytes of a size: ``10GiB`` = 10·2³⁰, ``10GB`` = 10·10⁹, any case; ``Gb`` counts bits.

    Raises:
        ValueError: the size cannot be read or is negative.
    """
    if isinstance(size, int) and not isinstance(size, bool) and size >= 0:
        return size
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", size) if isinstance(size, str) else None
    factor = _UNITS.get(match[2].upper()) if match else None
    if match is None or factor is None:
        raise ValueError(f"`size` {size!r} is not in a valid format; use an integer for bytes, or a string with a unit "
                         "(like '5.0GB' or '10GiB')")  # fmt: skip
    value = int(float(match[1]) * factor)
    return value // 8 if re.fullmatch(r"[A-Za-z]b", match[2]) else value


def convert_bytes(size: float) -> str:
    """Return a size in bytes as text, in the largest unit that leaves at least 1 (steps of 1024): ``413.18 MB``."""
    for unit in ("bytes", "KB", "MB", "GB", "TB"):
        if size < 1024:
            return f"{round(size, 2)} {unit}"
        size /= 1024
    return f"{round(size, 2)} PB"


def dtype_byte_size(dtype: torch.dtype | str) -> float:
    """Return the bytes per element: 4 for ``torch.float32``, ½ for ``"int4"``, ⅛ for truth values (packed).

    Args:
        dtype: a type of torch, or the name of a narrower one.

    Raises:
        ValueError: a name that is no type.
    """
    if dtype is torch.bool:
        return 1 / 8
    if isinstance(dtype, torch.dtype):
        return float(dtype.itemsize)
    name = str(getattr(dtype, "value", dtype)).removeprefix("torch.")
    if name in _BY_NAME:
        return _BY_NAME[name]
    known = getattr(torch, name, None)
    if isinstance(known, torch.dtype):
        return dtype_byte_size(known)
    raise ValueError(f"`dtype` is not a valid dtype: {dtype}")


def named_module_tensors(
    module: nn.Module, include_buffers: bool = True, recurse: bool = False, remove_non_persistent: bool = False
) -> Iterator[tuple[str, Tensor]]:
    """Return the parameters of *module*, then its buffers, with their names.

    Args:
        module: the module.
        include_buffers: buffers too.
        recurse: those of the modules inside too.
        remove_non_persistent: leave out buffers that are not in the state dict.
    """
    yield from module.named_parameters(recurse=recurse)
    if not include_buffers:
        return
    transient = transient_buffers(module, recurse) if remove_non_persistent else set()
    for name, buffer in module.named_buffers(recurse=recurse):
        if name not in transient:
            yield name, buffer


def transient_buffers(module: nn.Module, recurse: bool = True) -> set[str]:
    """Names of the buffers that are not in *module*'s state dict."""
    inside = module.named_modules() if recurse else [("", module)]
    return {
        f"{prefix}.{name}" if prefix else name for prefix, one in inside for name in one._non_persistent_buffers_set
    }


def compute_module_sizes(
    model: nn.Module,
    dtype: torch.dtype | str | None = None,
    special_dtypes: Mapping[str, torch.dtype | str] | None = None,
    buffers_only: bool = False,
) -> dict[str, int]:
    """Return the bytes of every module, parameter and buffer of *model* by name; ``""`` is the whole model.

    Tensors that are used in several places count once, where they stand first. A module without any of its own has no
    entry, and 0 bytes when it is looked up.

    Args:
        model: the model.
        dtype: what floating-point tensors are converted to; those that are smaller already, and whole numbers, stay.
        special_dtypes: other dtypes for single tensors, by name.
        buffers_only: count buffers alone.
    """
    special = special_dtypes or {}
    sizes: dict[str, float] = {"": 0}
    tensors = model.named_buffers() if buffers_only else named_module_tensors(model, recurse=True)
    for name, tensor in tensors:
        size = tensor.numel() * element_size(tensor, dtype, special.get(name))
        parts = name.split(".")
        for depth in range(len(parts) + 1):
            prefix = ".".join(parts[:depth])
            sizes[prefix] = sizes.get(prefix, 0) + size
    return Counter({name: int(size) for name, size in sizes.items()})


def element_size(tensor: Tensor, dtype: torch.dtype | str | None, special: torch.dtype | str | None) -> float:
    """Return the bytes per element of *tensor* as *special*, or as *dtype* if it is of floating point and wider."""
    if special is not None:
        return dtype_byte_size(special)
    own = dtype_byte_size(tensor.dtype)
    return min(dtype_byte_size(dtype), own) if dtype is not None and tensor.is_floating_point() else own


def get_max_layer_size(
    modules: Layers, module_sizes: Mapping[str, int], no_split_module_classes: str | Sequence[str] | None
) -> tuple[int, list[str]]:
    """Return the size in bytes of the largest layer, and the names of all layers of that size.

    A layer is a tensor, a module without modules inside, or one of a class that must stay whole.

    Args:
        modules: names and modules or tensors, as ``model.named_children()`` gives them.
        module_sizes: what `compute_module_sizes` computed.
        no_split_module_classes: names of classes whose modules stay whole.
    """
    whole = class_names(no_split_module_classes)
    largest, names = 0, list[str]()
    waiting: list[tuple[str, Any]] = list(modules)
    while waiting:
        name, module = waiting.pop(0)
        inside = [] if isinstance(module, Tensor) else list(module.named_children())
        if inside and type(module).__name__ not in whole:
            direct = module.named_parameters(recurse=False)
            waiting = [(f"{name}.{key}", value) for key, value in (*direct, *inside)] + waiting
            continue
        size = module_sizes.get(name, 0)
        if size > largest:
            largest, names = size, [name]
        elif size == largest:
            names.append(name)
    return largest, names


def class_names(classes: str | Sequence[str] | None) -> tuple[str, ...]:
    """Return *classes*, one class name or several, as a tuple."""
    return (classes,) if isinstance(classes, str) else tuple(classes or ())


def top_level(model: nn.Module) -> list[tuple[str, nn.Module | Tensor]]:
    """The tensors that *model* holds itself, and its children, with their names."""
    return [
        *model.named_parameters(recurse=False),
        *model.named_children(),
        *model.named_buffers(recurse=False),
    ]


def calculate_maximum_sizes(model: nn.Module) -> tuple[int, tuple[int, list[str]]]:
    """Return the bytes of the whole *model*, and of its largest layer with the names of the layers of that size."""
    sizes = compute_module_sizes(model)
    whole = getattr(model, "_no_split_modules", None)
    return sizes[""], get_max_layer_size(top_level(model), sizes, list(whole) if whole else [])


@dataclass(frozen=True)
class MemoryEstimate:
    """Memory that loading a model in one dtype takes, in bytes."""

    dtype: str
    largest_layer: float
    total: float

    @property
    def training(self) -> float:
        """Training with Adam: weights, gradients and two moments."""
        return 4 * self.total

    def row(self) -> tuple[str, str, str, str]:
        """Return dtype, largest layer, total and training, as text."""
        return self.dtype, convert_bytes(self.largest_layer), convert_bytes(self.total), convert_bytes(self.training)


def estimate_memory(
    model: nn.Module, dtypes: Sequence[str] = ("float32", "float16", "int8", "int4")
) -> list[MemoryEstimate]:
    """Estimate the memory of *model* in each of *dtypes*, starting from the float32 model. Activations come on top.

    Returns:
        One estimate for each of *dtypes*.

    Raises:
        ValueError: a dtype other than ``float32``, ``float16``, ``int8`` and ``int4``.
    """
    divisors = {"float32": 1, "float16": 2, "int8": 4, "int4": 8}
    if bad := [dtype for dtype in dtypes if dtype not in divisors]:
        raise ValueError(f"no estimate for {', '.join(bad)}; choose from {', '.join(divisors)}")
    total, (largest, _) = calculate_maximum_sizes(model)
    return [MemoryEstimate(dtype, largest / divisors[dtype], total / divisors[dtype]) for dtype in dtypes]
