"""Copies of a state that training cannot change any more, in memory that is used again for the next one."""

from __future__ import annotations

import copy
import mmap
import os
import warnings
import weakref
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

import torch

from orc.runtime.checkpoint.storage.copying import CopyQueue

_ALIGNMENT = 64  # bytes; every dtype can be viewed at such a place
TensorKey = tuple[int, torch.dtype, torch.Size, tuple[int, ...], torch.device]


class Stage:
    """Host memory for one state at a time, locked where it comes from a GPU. It grows to the largest and is kept.

    Args:
        size: bytes that the largest will take, where that is known.
    """

    def __init__(self, size: int = 0) -> None:
        self._block: torch.UntypedStorage | None = None
        self._least = size
        self._locked: weakref.finalize[..., Stage] | None = None
        self._process = 0

    def take(self, state: Any) -> Any:
        """A copy of *state* (any nesting) with its tensors in this memory; the copy before is overwritten.

        Tensors that were one (tied weights) are one in the copy. Returns when the copy is complete.
        """
        keys: dict[int, TensorKey] = {}
        tensors: dict[TensorKey, torch.Tensor] = {}
        for tensor in _tensors(state):
            place = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), tensor.device)
            keys[id(tensor)] = place
            tensors.setdefault(place, tensor)
        copies = self._copy(tensors)
        # Everything that is no tensor of the usual kind is copied the usual way.
        return copy.deepcopy(state, {key: copies[place] for key, place in keys.items()})

    def _copy(self, tensors: dict[TensorKey, torch.Tensor]) -> dict[TensorKey, torch.Tensor]:
        spans: dict[TensorKey, tuple[int, int]] = {}
        at = 0
        for place, tensor in tensors.items():
            size = tensor.numel() * tensor.element_size()
            spans[place] = (at, at + size)
            at += -(-size // _ALIGNMENT) * _ALIGNMENT
        foreign = [device for (_, _, _, _, device) in tensors if device.type == "cuda"]
        block = self._reserve(at, foreign[0] if foreign else None)
        copies: dict[TensorKey, torch.Tensor] = {}
        with CopyQueue() as under_way:
            for place, tensor in tensors.items():
                begin, end = spans[place]
                # A storage of its own: torch.save writes whole storages.
                target: Any = torch.empty(0, dtype=tensor.dtype)
                if end > begin:
                    target.set_(block[begin:end], 0, tensor.shape)
                    under_way.start(target, tensor)
                else:
                    target = torch.empty(tensor.shape, dtype=tensor.dtype)
                copies[place] = target
        for device in set(foreign):
            torch.cuda.synchronize(device)
        return copies

    def _reserve(self, size: int, device: torch.device | None) -> torch.UntypedStorage:
        """Memory of *size* bytes; into which *device*, if given, copies by itself."""
        block = self._block if self._process == os.getpid() else None
        if block is None or block.nbytes() < size or (device is not None and self._locked is None):
            if self._locked is not None:
                self._locked()
            block = self._block = self._locked = None  # the old memory goes before the new one comes
            block = self._block = _pages(max(size, self._least)).untyped_storage()
            self._process = os.getpid()
            if device is not None:
                self._locked = lock(block, device, self)
        return block


def lock(block: torch.UntypedStorage, device: torch.device, owner: Stage) -> weakref.finalize[..., Stage]:
    """Lock the pages of *block*, so that *device* copies into them by itself; what is returned unlocks them.

    torch's own pinned memory comes in powers of two: a state of 33 GB would take 64 GB.
    """
    address, size = block.data_ptr(), block.nbytes()
    with torch.cuda.device(device):  # the driver would open a context on another one
        error = int(torch.cuda.cudart().cudaHostRegister(address, size, 1))  # for all devices
    if error:
        _forget_last_error(device)
        warnings.warn(
            f"the driver does not lock {size / 2**20:.0f} MiB of host memory for checkpoints (CUDA error {error}): "
            "copies from the GPU take longer",
            stacklevel=2,
        )
    unlock = weakref.finalize(owner, _unlock, None if error else address, os.getpid())
    unlock.atexit = False  # the driver may be gone by then
    return unlock


def _forget_last_error(device: torch.device) -> None:
    """Let the launch of a kernel see the error that the driver keeps, so that training does not."""
    with suppress(RuntimeError):
        torch.ones((), device=device)


def _unlock(address: int | None, process: int) -> None:
    if address is not None and process == os.getpid():
        torch.cuda.cudart().cudaHostUnregister(address)


def size_on_gpus(tensors: Iterable[Any]) -> int:
    """Return the bytes of the largest of *tensors* on a GPU; 0 without one."""
    return max((tensor.nbytes for tensor in tensors if isinstance(tensor, torch.Tensor) and tensor.is_cuda), default=0)


def _pages(size: int) -> torch.Tensor:
    """Memory of *size* bytes that worker processes do not inherit: the next save would have to copy shared pages."""
    memory = mmap.mmap(-1, max(size, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_DONTFORK)
    return torch.frombuffer(memory, dtype=torch.uint8)


def _tensors(state: Any) -> list[torch.Tensor]:
    """Strided tensors in dictionaries, lists and tuples."""
    tensors: list[torch.Tensor] = []
    waiting = [state]
    while waiting:
        value = waiting.pop()
        if isinstance(value, torch.Tensor):
            if type(value) in (torch.Tensor, torch.nn.Parameter) and value.layout == torch.strided:
                tensors.append(value)
        elif isinstance(value, dict):
            waiting.extend(value.values())
        elif isinstance(value, (list, tuple)):
            waiting.extend(value)
    return tensors
