"""Nested structures of tensors: flatten, rebuild, describe, and the local operations on them.

Containers are lists, tuples, named tuples, mappings and dataclass instances, in any nesting; their types are kept.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

# A structure with its leaves taken out: `None` for a leaf, `_Constant` for what is no tensor, otherwise a `_Node`.
Spec = Any


@dataclasses.dataclass(slots=True, repr=False)
class _Constant:
    """A leaf that is no tensor."""

    value: Any


@dataclasses.dataclass(slots=True, repr=False)
class _Node:
    """A container, and how one of its kind is built."""

    build: Callable[[Any, list[Any]], Any]
    original: Any
    keys: Sequence[Any]
    children: list[Spec]


def _build_list(original: Any, values: list[Any]) -> Any:
    return values if type(original) is list else type(original)(values)


def _build_namedtuple(original: Any, values: list[Any]) -> Any:
    return type(original)(*values)


def _build_dict(original: Any, values: list[Any]) -> Any:
    return dict(zip(original, values, strict=True))


def _build_reordered(original: Any, values: list[Any]) -> Any:
    # The values come in the order of `_canonical`, the result has the order of the original.
    given = dict(zip(_canonical(tuple(original)) or original, values, strict=True))
    ordered = [given[key] for key in original]
    return _build_dict(original, ordered) if type(original) is dict else _build_mapping(original, ordered)


def _build_mapping(original: Any, values: list[Any]) -> Any:
    # A copy keeps what the type carries besides its items: a default factory, the order, the attributes of a batch.
    result = copy.copy(original)
    for key, value in zip(original, values, strict=True):
        result[key] = value
    return result


def _build_dataclass(original: Any, values: list[Any]) -> Any:
    result = copy.copy(original)
    for field, value in zip(dataclasses.fields(original), values, strict=True):
        object.__setattr__(result, field.name, value)  # also where the class is frozen
    return result


def _open(data: Any) -> tuple[Callable[[Any, list[Any]], Any], Sequence[Any], Iterable[Any]] | None:
    """Return a function that rebuilds *data*, and the keys and the values below it; `None` when it is no container."""
    kind = type(data)
    if kind is dict:
        return _build_dict, tuple(data), data.values()
    if kind is list or kind is tuple:
        return _build_list, range(len(data)), data
    if isinstance(data, tuple) and hasattr(data, "_fields"):
        return _build_namedtuple, data._fields, data
    if isinstance(data, (list, tuple)):
        return _build_list, range(len(data)), data
    if isinstance(data, Mapping):
        return _build_mapping, tuple(data), [data[key] for key in data]
    if dataclasses.is_dataclass(data) and not isinstance(data, type):
        names = tuple(field.name for field in dataclasses.fields(data))
        return _build_dataclass, names, [getattr(data, name) for name in names]
    return None


@functools.lru_cache(maxsize=1024)
def _canonical(keys: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """*keys* of a mapping in the order all processes agree on; `None` when that is the order they have."""
    try:
        ordered = tuple(sorted(keys))
    except TypeError:  # keys of several types
        ordered = tuple(sorted(keys, key=lambda key: (type(key).__name__, repr(key))))
    return None if ordered == keys else ordered


def _walk(data: Any, leaves: list[Tensor], operation: str | None) -> Spec:
    if isinstance(data, Tensor):
        leaves.append(data)
        return None
    opened = _open(data)
    if opened is None:
        if operation is not None:
            raise TypeError(type(data))
        return _Constant(data)
    build, keys, values = opened
    if operation is not None and isinstance(data, Mapping) and (ordered := _canonical(tuple(keys))) is not None:
        # Processes may have filled a dictionary in different orders.
        children = {key: _walk(data[key], leaves, operation) for key in ordered}
        return _Node(_build_reordered, data, ordered, list(children.values()))
    return _Node(build, data, keys, [_walk(value, leaves, operation) for value in values])


def flatten(data: Any, operation: str | None = None) -> tuple[list[Tensor], Spec]:
    """The tensors in *data*, in order, and what `unflatten` needs to put others in their place.

    Anything that is no tensor stays where it is, unless *operation* names a collective that cannot carry it: then
    `TypeError` names the element and its type, and mappings are walked in the order of their sorted keys.
    """
    leaves: list[Tensor] = []
    try:
        spec = _walk(data, leaves, operation)
    except TypeError:
        for path, value in elements(data):
            if not isinstance(value, Tensor):
                raise TypeError(
                    f"{operation}: the element at {path or 'the top'} is of type {type(value).__name__}; only tensors "
                    "and nested lists, tuples, mappings and dataclasses of tensors can be sent "
                    "(gather_object and broadcast_object_list take any object)"
                ) from None
        raise
    return leaves, spec


def outline(spec: Spec) -> Any:
    """Return the containers of *spec* by their keys alone: hashable, and equal where the paths of elements are."""
    return (tuple(spec.keys), tuple([outline(child) for child in spec.children])) if type(spec) is _Node else None


def unflatten(spec: Spec, leaves: Iterable[Any]) -> Any:
    """The structure of *spec* with *leaves* in the place of its tensors."""
    return _rebuild(spec, iter(leaves))


def _rebuild(spec: Spec, leaves: Iterator[Any]) -> Any:
    if spec is None:
        return next(leaves)
    if type(spec) is _Constant:
        return spec.value
    return spec.build(spec.original, [_rebuild(child, leaves) for child in spec.children])


def elements(data: Any, path: str = "", *, canonical: bool = False) -> Iterator[tuple[str, Any]]:
    """Every element of *data* that is no container, with its path: ``['logits'][0]``.

    *canonical* walks mappings in the order of their sorted keys, as collectives do.
    """
    opened = None if isinstance(data, Tensor) else _open(data)
    if opened is None:
        yield path, data
        return
    _, keys, values = opened
    if canonical and isinstance(data, Mapping) and (ordered := _canonical(tuple(keys))) is not None:
        keys, values = ordered, [data[key] for key in ordered]
    for key, value in zip(keys, values, strict=True):
        yield from elements(value, f"{path}[{key!r}]", canonical=canonical)


def is_torch_tensor(tensor: Any) -> bool:
    """Return whether *tensor* is a tensor."""
    return isinstance(tensor, Tensor)


def recursively_apply(
    func: Callable[..., Any],
    data: Any,
    *args: Any,
    test_type: Callable[[Any], bool] = is_torch_tensor,
    error_on_other_type: bool = False,
    **kwargs: Any,
) -> Any:
    """Return *data* with ``func(element, *args, **kwargs)`` in place of every element that passes *test_type*.

    Other elements stay, or raise `TypeError` with *error_on_other_type*.
    """
    if test_type(data):
        return func(data, *args, **kwargs)
    opened = None if isinstance(data, Tensor) else _open(data)
    if opened is None:
        if error_on_other_type:
            raise TypeError(f"{getattr(func, '__name__', func)} cannot be applied to {type(data).__name__}")
        return data
    build, _, values = opened
    return build(
        data,
        [
            recursively_apply(
                func, value, *args, test_type=test_type, error_on_other_type=error_on_other_type, **kwargs
            )
            for value in values
        ],
    )


def send_to_device(
    tensor: Any,
    device: torch.device | str | int,
    non_blocking: bool = False,
    skip_keys: str | Sequence[str] | None = None,
) -> Any:
    """Return *tensor* (any nesting) on *device*. What already is there is not copied; what is no tensor stays.

    Args:
        tensor: a structure of tensors, or an object with a ``to`` method of its own.
        device: where to.
        non_blocking: let copies from pinned memory run on while the program goes on.
        skip_keys: keys of mappings whose values stay where they are.
    """
    skipped = (skip_keys,) if isinstance(skip_keys, str) else tuple(skip_keys or ())
    return _send(tensor, torch.device(device), non_blocking, skipped)


def _send(data: Any, device: torch.device, non_blocking: bool, skipped: tuple[str, ...]) -> Any:
    if isinstance(data, Tensor):
        return data.to(device, non_blocking=non_blocking)
    if type(data) not in (list, tuple, dict) and callable(getattr(data, "to", None)):
        try:
            return data.to(device, non_blocking=non_blocking)
        except TypeError:  # a `to` with one parameter only
            return data.to(device)
    opened = _open(data)
    if opened is None:
        return data
    build, keys, values = opened
    return build(
        data,
        [
            value if key in skipped else _send(value, device, non_blocking, skipped)
            for key, value in zip(keys, values, strict=True)
        ],
    )


def find_batch_size(data: Any) -> int | None:
    """Return the first dimension of the first tensor in *data* that has one."""
    return next((value.shape[0] for _, value in elements(data) if isinstance(value, Tensor) and value.ndim), None)


def slice_tensors(
    data: Any, tensor_slice: slice, process_index: int | None = None, num_processes: int | None = None
) -> Any:
    """Return every tensor of *data* cut to *tensor_slice* along its first dimension.

    *process_index* and *num_processes* are what a slicing function for dispatched loaders is given; not used here.
    """
    return recursively_apply(lambda tensor: tensor[tensor_slice], data)


def concatenate(data: Sequence[Any], dim: int = 0) -> Any:
    """Return structures of the same shape joined tensor by tensor along *dim*. Raises `TypeError` for other elements.

    Args:
        data: the structures, in order.
    """
    flat = [flatten(one, "concatenate") for one in data]
    leaves, spec = [one for one, _ in flat], flat[0][1]
    if len({len(leaf) for leaf in leaves}) != 1:
        raise TypeError(f"concatenate: the structures hold {', '.join(str(len(leaf)) for leaf in leaves)} tensors")
    return unflatten(spec, [torch.cat(column, dim=dim) for column in zip(*leaves, strict=True)])


def listify(data: Any) -> Any:
    """Return *data* with every tensor as nested Python lists."""

    def to_list(tensor: Tensor) -> Any:
        return tensor.detach().cpu().tolist()

    return recursively_apply(to_list, data)


def convert_to_fp32(data: Any) -> Any:
    """Return *data* with its half-precision tensors in float32."""
    return recursively_apply(Tensor.float, data, test_type=_is_half)


def _is_half(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dtype in (torch.float16, torch.bfloat16)


# ---- descriptions


@dataclasses.dataclass
class TensorInformation:
    """Shape and dtype of a tensor that is somewhere else."""

    shape: torch.Size
    dtype: torch.dtype


class CannotPadNestedTensorWarning(UserWarning):
    """A nested (ragged) tensor was to be padded: it stays as it is."""


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
