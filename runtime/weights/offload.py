"""Weights that a model does not hold: in memory-mapped files, in those of a checkpoint, and the mappings of both."""

from __future__ import annotations

import ctypes
import json
import math
import mmap
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from orc.runtime.checkpoint.errors import CheckpointError
from orc.runtime.checkpoint.storage.copying import read_state
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


Entry = Mapping[str, Any]
_READ_AHEAD = 4  # weights: about a layer


class PrefixedDataset(Mapping[str, Tensor]):
    """View of *dataset* whose names all begin with *prefix*, without it."""

    def __init__(self, dataset: Mapping[str, Tensor], prefix: str) -> None:
        self.dataset, self.prefix = dataset, prefix

    def __getitem__(self, key: str) -> Tensor:
        return self.dataset[f"{self.prefix}{key}"]

    def __iter__(self) -> Iterator[str]:
        return (key.removeprefix(self.prefix) for key in self.dataset if key.startswith(self.prefix))

    def __len__(self) -> int:
        return sum(1 for _ in self)


class OffloadedWeightsLoader(Mapping[str, Tensor]):
    """Weights in memory, and weights in files that are mapped when they are first requested.

    Args:
        state_dict: weights in memory.
        save_folder: a folder that `offload_state_dict` wrote; its index is read unless *index* is given.
        index: entries by name: ``{"dtype", "shape"}`` of a file in *save_folder*, or ``{"safetensors_file",
            "weight_name", "dtype"}`` of a weight in a safetensors file (``"torch_file"``: in one of `torch.save`).
        device: where weights out of files go; where they are by default, which costs no copy.

    Raises:
        ValueError: nothing of it was given, or *save_folder* has no index.
        CheckpointError: the index is none, or files that it names are missing or cut off.
    """

    def __init__(
        self,
        state_dict: Mapping[str, Tensor] | None = None,
        save_folder: str | os.PathLike[str] | None = None,
        index: Mapping[str, Entry] | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        if state_dict is None and save_folder is None and index is None:
            raise ValueError("weights come from a state_dict, a save_folder or an index: give one of them")
        self.state_dict = dict(state_dict or {})
        self.save_folder = save_folder
        self.index = dict(_read_index(Path(save_folder)) if index is None and save_folder is not None else index or {})
        self.device = device
        self.all_keys = [*self.state_dict, *(name for name in self.index if name not in self.state_dict)]
        self._mapped: dict[str, Tensor] = {}
        self._files: dict[str, Mapping[str, Tensor]] = {}
        self._next: dict[str, str] = {}  # which weight was asked for after which
        self._last: str | None = None

    def __getitem__(self, key: str) -> Tensor:
        if key in self.state_dict:
            return self.state_dict[key]
        if self._last is not None:
            self._next[self._last] = key
        self._last = key
        value = self._file_weight(key)
        ahead = self._ahead(key)
        if ahead is not None:
            _will_need(self._mapped[ahead])
        return value if self.device is None else value.to(self.device)

    def __iter__(self) -> Iterator[str]:
        return iter(self.all_keys)

    def __len__(self) -> int:
        return len(self.all_keys)

    def __deepcopy__(self, memo: dict[int, Any]) -> OffloadedWeightsLoader:
        """Return a loader of the same weights: files are shared, and so is what is never written to."""
        return OffloadedWeightsLoader(self.state_dict, self.save_folder, self.index, self.device)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without what is mapped: it is mapped again where it is unpickled."""
        return {**self.__dict__, "_mapped": {}, "_files": {}}

    def _file_weight(self, key: str) -> Tensor:
        if key not in self._mapped:
            entry = self.index[key]
            path = entry.get("safetensors_file") or entry.get("torch_file")
            if path is not None:
                if path not in self._files:
                    self._files[path] = mapped_weights(Path(path))
                value = self._files[path][str(entry.get("weight_name", key))]
                dtype = getattr(torch, str(entry.get("dtype", "")).removeprefix("torch."), value.dtype)
                if value.dtype != dtype:
                    return value.to(dtype)  # not kept: it is memory, not a mapping
            else:
                name = safe_relative_name(f"{entry.get('weight_name', key)}.dat")
                value = load_offloaded_weight(Path(self.save_folder or ".") / name, entry)
            self._mapped[key] = value
        return self._mapped[key]

    def _ahead(self, key: str) -> str | None:
        """Return the name of the weight that is `_READ_AHEAD` after *key*; so each is requested once in a pass."""
        upcoming: str | None = key
        for _ in range(_READ_AHEAD):
            upcoming = self._next.get(upcoming) if upcoming is not None else None
        return upcoming if upcoming in self._mapped else None


def _read_index(folder: Path) -> Mapping[str, Entry]:
    path = folder / INDEX_NAME
    if not path.is_file():
        raise ValueError(f"{folder} has no {INDEX_NAME}: offload_state_dict writes such a folder")
    try:
        entries: Mapping[str, Entry] = json.loads(path.read_text())
        wrong = [name for name, entry in entries.items() if not _is_whole(folder, name, entry)]
    except (ValueError, AttributeError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} is no index of offloaded weights: {error}") from None
    if wrong:
        raise CheckpointError(
            f"{folder} is damaged: of {', '.join(wrong)} the file is missing or cut off; remove the folder, "
            "and the weights are written there again"
        )
    return entries


def _is_whole(folder: Path, name: str, entry: Entry) -> bool:
    """Return whether the file of the weight *name* is there and long enough for it."""
    if "shape" not in entry:  # in a file of a checkpoint, which is checked when it is mapped
        return True
    size: int = math.prod(entry["shape"]) * getattr(torch, str(entry["dtype"])).itemsize
    try:
        return (folder / safe_relative_name(f"{name}.dat")).stat().st_size >= size
    except OSError:
        return False


def mapped_weights(path: Path, mapped: bool = True) -> Mapping[str, Tensor]:
    """Return the weights in the file *path*, mapped into memory; without *mapped* a pickle is read into it.

    Raises:
        CheckpointError: it cannot be read, or holds something else.
    """
    state = read_state(path, None if mapped else "cpu")
    if not isinstance(state, dict) or not all(isinstance(value, Tensor) for value in state.values()):
        raise CheckpointError(f"{path} holds no state dict: load the weights in it with torch.load")
    return state


def file_entry(path: Path, name: str, dtype: torch.dtype) -> dict[str, str]:
    """Return the index entry of the weight *name* in the file *path* of a checkpoint, to be used as *dtype*."""
    kind = "safetensors_file" if path.suffix == ".safetensors" else "torch_file"
    return {kind: str(path), "weight_name": name, "dtype": str(dtype).removeprefix("torch.")}


@cache
def _memory_calls() -> tuple[Any, Any] | None:
    try:
        library = ctypes.CDLL(None)
        advise, resident = library.madvise, library.mincore
    except (OSError, AttributeError):  # no such calls on this system: nothing is read ahead
        return None
    advise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    resident.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p]
    return advise, resident


def _will_need(weight: Tensor) -> None:
    """Have the kernel read the pages of a mapped *weight* while something else computes."""
    calls = _memory_calls()
    if calls is None or not weight.is_contiguous() or weight.device.type != "cpu" or not weight.nbytes:
        return
    advise, resident = calls
    end = weight.data_ptr() + weight.nbytes
    last = (end - 1) // mmap.PAGESIZE * mmap.PAGESIZE
    buffer = ctypes.create_string_buffer(1)
    # Advice about pages that are in memory costs a look at each of them: the last one stands for all.
    if resident(last, mmap.PAGESIZE, buffer) == 0 and buffer.raw[0] & 1:
        return
    begin = weight.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
    advise(begin, end - begin, mmap.MADV_WILLNEED)  # advice: a failure means nothing


def return_free_memory() -> None:
    """Give the system back what was freed between allocations that stay, where the C library can."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # of glibc
    if trim is not None:
        trim(ctypes.c_size_t(0))


def will_not_need(weight: Tensor) -> None:
    """Let the kernel drop the pages of *weight*, which has to be mapped from a file, from this process.

    They stay in the page cache, and come back if they are read again.
    """
    calls = _memory_calls()
    if calls is None or weight.device.type != "cpu":
        return
    # Whole pages inside: the others hold a neighbour too.
    begin = -(-weight.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (weight.data_ptr() + weight.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
    if end > begin:
        calls[0](begin, end - begin, mmap.MADV_DONTNEED)
