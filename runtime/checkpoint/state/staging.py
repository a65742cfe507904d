"""Copies of a state that training cannot change any more, in memory that is used again for the next one."""

from __future__ import annotations

import copy
import mmap
import os
from typing import Any

import torch

from orc.runtime.checkpoint.storage.copying import Copies

_ALIGNMENT = 64  # bytes; every dtype can be viewed at such a place
Place = tuple[int, torch.dtype, torch.Size, tuple[int, ...], torch.device]


class Stage:
    """Host memory for one state at a time, pinned where it comes from a GPU. It grows to the largest and is kept."""

    def __init__(self) -> None:
        self._block: torch.UntypedStorage | None = None
        self._pinned = False
        self._process = 0

    def take(self, state: Any) -> Any:
        """A copy of *state* (any nesting) with its tensors in this memory; the copy before is overwritten.

        Tensors that were one (tied weights) are one in the copy. Returns when the copy is complete.
        """
        found: dict[int, Place] = {}
        tensors: dict[Place, torch.Tensor] = {}
        for tensor in _tensors(state):
            place = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), tensor.device)
            found[id(tensor)] = place
            tensors.setdefault(place, tensor)
        copies = self._copy(tensors)
        # Everything that is no tensor of the usual kind is copied the usual way.
        return copy.deepcopy(state, {key: copies[place] for key, place in found.items()})

    def _copy(self, tensors: dict[Place, torch.Tensor]) -> dict[Place, torch.Tensor]:
        spans: dict[Place, tuple[int, int]] = {}
        at = 0
        for place, tensor in tensors.items():
            size = tensor.numel() * tensor.element_size()
            spans[place] = (at, at + size)
            at += -(-size // _ALIGNMENT) * _ALIGNMENT
        foreign = [device for (_, _, _, _, device) in tensors if device.type == "cuda"]
        block = self._reserve(at, bool(foreign))
        copies: dict[Place, torch.Tensor] = {}
        with Copies() as under_way:
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

    def _reserve(self, size: int, pinned: bool) -> torch.UntypedStorage:
        block = self._block if self._process == os.getpid() else None
        if block is None or block.nbytes() < size or (pinned and not self._pinned):
            block = self._block = None  # the old memory goes before the new one comes
            fresh = torch.empty(size, dtype=torch.uint8, pin_memory=True) if pinned else _pages(size)
            block = self._block = fresh.untyped_storage()
            self._pinned, self._process = pinned, os.getpid()
        return block


def _pages(size: int) -> torch.Tensor:
    """Memory of *size* bytes that worker processes do not inherit: the next save would have to copy shared pages."""
    memory = mmap.mmap(-1, max(size, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_DONTFORK)
    return torch.frombuffer(memory, dtype=torch.uint8)


def _tensors(state: Any) -> list[torch.Tensor]:
    """Strided tensors in dictionaries, lists and tuples."""
    found: list[torch.Tensor] = []
    waiting = [state]
    while waiting:
        value = waiting.pop()
        if isinstance(value, torch.Tensor):
            if type(value) in (torch.Tensor, torch.nn.Parameter) and value.layout == torch.strided:
                found.append(value)
        elif isinstance(value, dict):
            waiting.extend(value.values())
        elif isinstance(value, (list, tuple)):
            waiting.extend(value)
    return found
