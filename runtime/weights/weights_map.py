"""Weights that are not in their model, by name: in memory, in an offload folder, or in the files of a checkpoint.

Files are mapped, never copied: a checkpoint's own files are the offload folder. What is on the disk is read ahead: the
order in which weights are asked for is nearly always that of the pass before.
"""

from __future__ import annotations

import ctypes
import json
import math
import mmap
import os
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from orc.runtime.checkpoint.errors import CheckpointError
from orc.runtime.checkpoint.format import pickled
from orc.runtime.checkpoint.state.placing import read_weights
from orc.runtime.core.names import safe_relative_name
from orc.runtime.weights.offload import INDEX_NAME, load_offloaded_weight

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
    if path.suffix == ".safetensors":
        return read_weights(path)
    try:
        state = pickled.read(path, "cpu", mmap=mapped)
    except Exception as error:
        raise CheckpointError(f"{path} cannot be loaded: {type(error).__name__}: {error}") from error
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
