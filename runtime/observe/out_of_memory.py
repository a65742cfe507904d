"""What held a GPU's memory when a script has ended because it ran out: written behind the traceback."""

from __future__ import annotations

import gc
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from types import TracebackType
from typing import Any

import torch

from orc.runtime.observe.device import device_memory

LARGEST = 5  # sizes of blocks that are told
_installed = False


def explain_out_of_memory(device: torch.device) -> None:
    """From now on an uncaught error about the memory of *device* says what held it; once per process."""
    global _installed
    if _installed:
        return
    _installed = True
    outer = sys.excepthook

    def explain(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        outer(kind, error, traceback)  # first: its frames still hold what they held
        if is_out_of_memory(error):
            sys.stderr.write("".join(f"orc: {line}\n" for line in explanation(device)))

    sys.excepthook = explain


def is_out_of_memory(error: BaseException | None) -> bool:
    """Return whether *error*, or what it was raised for, is that of a device without memory."""
    seen: set[int] = set()  # `raise error from error` makes a circle
    while error is not None and id(error) not in seen:
        if isinstance(error, torch.cuda.OutOfMemoryError):
            return True
        seen.add(id(error))
        error = error.__cause__ or error.__context__
    return False


def explanation(device: torch.device) -> list[str]:
    """Return lines about the memory of *device* now: whose it is, what tensors hold of it, the largest blocks."""
    free, total = torch.cuda.mem_get_info(device)
    memory = device_memory(device)
    allocated, reserved = memory["memory_allocated"], memory["memory_reserved"]
    held = holders(device, gc.get_objects())
    rest = max(allocated - sum(held.values()), 0)
    parts = [f"{what} {_size(count)}" for what, count in held.items() if count]
    blocks = Counter(
        int(block["size"])
        for segment in torch.cuda.memory_snapshot()
        if segment["device"] == device.index
        for block in segment["blocks"]
        if block["state"] == "active_allocated"
    )
    largest = [f"{count} × {_size(size)}" for size, count in sorted(blocks.items(), reverse=True)[:LARGEST]]
    return [
        f"memory of {torch.cuda.get_device_name(device)} ({_size(total)}): {_size(allocated)} tensors (at most "
        f"{_size(memory['memory_peak'])}), {_size(max(reserved - allocated, 0))} kept by torch's allocator, "
        f"{_size(max(total - free - reserved, 0))} libraries and other processes, {_size(free)} free",
        f"of the tensors: {', '.join(parts) or 'none that Python knows'}; {_size(rest)} that Python does not see "
        "(activations kept for backward, workspaces)",
        f"largest blocks: {', '.join(largest) or 'none'}",
    ]


def holders(device: torch.device, objects: Iterable[Any]) -> dict[str, int]:
    """Return the bytes on *device* among *objects* of parameters, gradients, the state of optimizers, other tensors.

    Memory that several tensors share counts once, for the first of these.
    """
    tensors: dict[str, list[torch.Tensor]] = {"parameters": [], "gradients": [], "optimizer state": [], "others": []}
    for held in objects:
        kind = type(held)  # proxies answer `isinstance` with what they stand for, and may be woken by it
        if issubclass(kind, torch.Tensor) and isinstance(held, torch.nn.Parameter):
            tensors["parameters"].append(held)
            if held.grad is not None:
                tensors["gradients"].append(held.grad)
        elif issubclass(kind, torch.Tensor):
            tensors["others"].append(held)
        elif issubclass(kind, torch.optim.Optimizer):
            tensors["optimizer state"] += _tensors_in(held.state)
    known: set[int] = set()
    return {what: sum(_new_bytes(tensor, device, known) for tensor in group) for what, group in tensors.items()}


def _tensors_in(state: Any) -> Iterator[torch.Tensor]:
    if isinstance(state, torch.Tensor):
        yield state
    elif isinstance(state, dict):
        for value in state.values():
            yield from _tensors_in(value)


def _new_bytes(tensor: torch.Tensor, device: torch.device, known: set[int]) -> int:
    """Return the bytes of the storage of *tensor* on *device* unless it is *known*, and add it to those."""
    local = getattr(tensor, "_local_tensor", tensor)  # of a DTensor, the part of this rank
    if local.device != device:
        return 0
    try:
        storage = local.untyped_storage()
        place, size = storage.data_ptr(), storage.nbytes()
    except (NotImplementedError, RuntimeError):  # a tensor without memory of its own
        return 0
    if not place or place in known:
        return 0
    known.add(place)
    return size


def _size(count: float) -> str:
    return f"{count / 2**30:.2f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"
