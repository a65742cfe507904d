"""Weights in memory-mapped files: one ``<name>.dat`` per tensor, and ``index.json`` with dtypes and shapes."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from orc.runtime.checkpoint.errors import CheckpointError
from orc.runtime.core.names import safe_relative_name
from orc.runtime.weights.empty_weights import set_module_tensor_to_device

Index = dict[str, dict[str, Any]]
INDEX_NAME = "index.json"


def offload_weight(
    weight: Tensor, weight_name: str, offload_folder: str | os.PathLike[str], index: Index | None = None
) -> Index:
    """Write *weight* to ``<weight_name>.dat`` in *offload_folder*; returns *index* with its dtype and shape added."""
    index = {} if index is None else index
    tensor = weight.detach().cpu().contiguous()
    index[weight_name] = {"dtype": str(tensor.dtype).removeprefix("torch."), "shape": list(tensor.shape)}
    # As bytes: NumPy does not know all dtypes of torch. A file of no bytes cannot be mapped, so it has one.
    data = tensor.view(-1).view(torch.uint8).numpy() if tensor.numel() else np.zeros(1, dtype=np.uint8)
    _write(data, _file(offload_folder, weight_name))
    return index


def _write(data: Any, path: Path) -> None:
    data.tofile(path)


def load_offloaded_weight(weight_file: str | os.PathLike[str], weight_info: Mapping[str, Any]) -> Tensor:
    """Return the tensor in *weight_file*, mapped: pages are read as they are used, writing does not change the file.

    Args:
        weight_file: the ``.dat`` file.
        weight_info: its entry in the index: ``dtype`` and ``shape``.

    Raises:
        ValueError: the file is shorter than the entry says, or the entry names no dtype of torch.
    """
    dtype = getattr(torch, str(weight_info["dtype"]), None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{weight_file}: {weight_info['dtype']!r} is no dtype")
    shape = torch.Size(weight_info["shape"])
    size = shape.numel() * dtype.itemsize
    if not size:
        return torch.empty(shape, dtype=dtype)
    found = Path(weight_file).stat().st_size
    if found < size:
        raise ValueError(f"{weight_file} has {found} bytes; {dtype} of shape {list(shape)} needs {size}")
    mapped = np.memmap(weight_file, dtype=np.uint8, mode="c", shape=(size,))
    return torch.from_numpy(mapped).view(dtype).view(shape)


def save_offload_index(index: Index, offload_folder: str | os.PathLike[str]) -> None:
    """Add *index* to the index of *offload_folder*; nothing is written for an empty one."""
    if not index:
        return
    path = Path(offload_folder) / INDEX_NAME
    merged = (json.loads(path.read_text()) if path.exists() else {}) | index
    temporary = path.with_name(f".{INDEX_NAME}.tmp")
    temporary.write_text(json.dumps(merged, indent=2))
    temporary.replace(path)


def offload_state_dict(save_dir: str | os.PathLike[str], state_dict: Mapping[str, Tensor]) -> None:
    """Write every tensor of *state_dict* to *save_dir*, which is made if need be, and the index last.

    Raises:
        CheckpointError: they do not fit there, or it cannot be written.
    """
    index: Index = {}
    try:
        Path(save_dir).mkdir(parents=True, exist_ok=True)
        for name, tensor in state_dict.items():
            offload_weight(tensor, name, save_dir, index)
        save_offload_index(index, save_dir)
    except OSError as error:
        remove_offloaded(save_dir, state_dict)  # without an index nobody would use them, and a full disk has no room
        raise no_room(save_dir, sum(tensor.nbytes for tensor in state_dict.values()), error) from error


def no_room(folder: str | os.PathLike[str], needed: int, error: OSError) -> CheckpointError:
    """Return the error of weights of *needed* bytes that *folder* does not take, because of *error*."""
    there = Path(folder).is_dir()
    room = f", {shutil.disk_usage(folder).free} are free" if there else "; it is no folder"
    return CheckpointError(
        f"the weights cannot be offloaded to {folder}: {error.strerror or error} (they need {needed} bytes{room}); "
        "name another folder, or give the CPU more in max_memory"
    )


def remove_offloaded(folder: str | os.PathLike[str], names: Iterable[str]) -> None:
    """Remove the files of the weights *names* from *folder*; those that are not there are no failure."""
    if Path(folder).is_dir():
        for name in names:
            _file(folder, name).unlink(missing_ok=True)


def load_offloaded_weights(
    model: nn.Module, index: Mapping[str, Mapping[str, Any]] | None, offload_folder: str | os.PathLike[str]
) -> None:
    """Put the weights of *index*, read from *offload_folder*, into *model*, on the CPU.

    Raises:
        ValueError: *model* has no such weight, or it has another shape.
    """
    for name, info in (index or {}).items():
        value = load_offloaded_weight(_file(offload_folder, name), info)
        # A copy: the model owns its weights, and outlives the folder.
        set_module_tensor_to_device(model, name, "cpu", value=value.clone())


def load_state_dict(
    checkpoint_file: str | os.PathLike[str], device_map: Mapping[str, Any] | None = None
) -> dict[str, Tensor]:
    """Return the state dict in a safetensors file or one that ``torch.save`` wrote.

    Args:
        checkpoint_file: the file; safetensors files are recognised by their ending.
        device_map: devices by module name, for safetensors; weights that it does not name, and those for the disk, come
            to the CPU.
    """
    path = Path(checkpoint_file)
    if path.suffix != ".safetensors":
        state: dict[str, Tensor] = torch.load(path, map_location="cpu", weights_only=True)
        return state
    from safetensors import safe_open
    from safetensors.torch import load_file

    if not device_map:
        return load_file(path, device="cpu")
    with safe_open(path, framework="pt") as file:
        devices: dict[str, list[str]] = {}
        for name in file.keys():  # noqa: SIM118 (it is no mapping)
            devices.setdefault(_device_of(name, device_map), []).append(name)
    loaded: dict[str, Tensor] = {}
    for device, names in devices.items():
        with safe_open(path, framework="pt", device=device) as file:
            loaded |= {name: file.get_tensor(name) for name in names}
    return loaded


def _device_of(name: str, device_map: Mapping[str, Any]) -> str:
    module = name
    while module and module not in device_map:
        module = module.rpartition(".")[0]
    device = device_map.get(module, "cpu")
    return "cpu" if device == "disk" else str(torch.device(device))


def _file(folder: str | os.PathLike[str], name: str) -> Path:
    return Path(folder) / safe_relative_name(f"{name}.dat")
