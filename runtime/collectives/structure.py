"""Description of a nested structure of tensors: its shapes, its device, and empty tensors of the same kind."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from orc.runtime.collectives.tree import elements, find_batch_size, is_tensor, recursively_apply


@dataclasses.dataclass
class TensorInformation:
    """Shape and dtype of a tensor that is somewhere else."""

    shape: torch.Size
    dtype: torch.dtype


class CannotPadNestedTensorWarning(UserWarning):
    """A nested (ragged) tensor was to be padded: it stays as it is."""


def is_torch_tensor(tensor: Any) -> bool:
    """Return whether *tensor* is a tensor."""
    return is_tensor(tensor)


def is_tensor_information(tensor_info: Any) -> bool:
    """Return whether *tensor_info* is a `TensorInformation`."""
    return isinstance(tensor_info, TensorInformation)


def is_namedtuple(data: Any) -> bool:
    """Return whether *data* is an instance of a named tuple."""
    return isinstance(data, tuple) and hasattr(data, "_asdict") and hasattr(data, "_fields")


def honor_type(obj: Any, generator: Iterable[Any]) -> Any:
    """Return the elements of *generator* in a list, tuple or named tuple of the type of *obj*."""
    kind = type(obj)
    return kind(*generator) if is_namedtuple(obj) else kind(generator)


def get_data_structure(data: Any) -> Any:
    """Return *data* with a `TensorInformation` in place of every tensor."""
    return recursively_apply(lambda tensor: TensorInformation(tensor.shape, tensor.dtype), data)


def get_shape(data: Any) -> Any:
    """Return *data* with the shape, as a list, in place of every tensor."""
    return recursively_apply(lambda tensor: list(tensor.shape), data)


def initialize_tensors(data_structure: Any) -> Any:
    """Return *data_structure* with a new, uninitialised tensor in place of every `TensorInformation`."""

    def empty(information: TensorInformation) -> Tensor:
        return torch.empty(information.shape, dtype=information.dtype)

    # Before containers are opened: a TensorInformation is a dataclass itself.
    return recursively_apply(empty, data_structure, test_type=is_tensor_information)


def find_device(data: Any) -> torch.device | None:
    """Return the device of the first tensor in *data*; `None` when there is no tensor."""
    return next((value.device for _, value in elements(data) if isinstance(value, Tensor)), None)


def ignorant_find_batch_size(data: Any) -> int | None:
    """Return the same as `find_batch_size`, which never raises.

    Args:
        data: a batch: any nesting of tensors.
    """
    return find_batch_size(data)


def pad_input_tensors(tensor: Any, batch_size: int, num_processes: int, dim: int = 0) -> Any:
    """Return tensors of *batch_size* rows along *dim* with the last row repeated until *num_processes* divides them.

    Args:
        tensor: a tensor, or any nesting of them.
    """
    missing = -batch_size % num_processes

    def pad(tensor: Tensor) -> Tensor:
        if not missing or tensor.ndim <= dim or tensor.shape[dim] != batch_size:
            return tensor
        last = tensor.narrow(dim, batch_size - 1, 1)
        return torch.cat(
            [tensor, last.expand([missing if at == dim else size for at, size in enumerate(tensor.shape)])], dim
        )

    return recursively_apply(pad, tensor)
