"""Fresh host memory for large tensors, in huge pages: touching 50 MB page by page takes longer than copying them."""

from __future__ import annotations

import math
import mmap

import torch
from torch import Tensor

# Below, malloc keeps what was freed and hands it out again (its M_MMAP_THRESHOLD grows to 32 MiB at most).
_LEAST_BYTES = 32 << 20
_ADVICE = getattr(mmap, "MADV_HUGEPAGE", None)  # Linux has it


def new_empty(like: Tensor, shape: torch.Size | tuple[int, ...] | None = None) -> Tensor:
    """Return a contiguous tensor of *like*'s dtype and device with memory of its own, not initialised.

    Args:
        like: a tensor.
        shape: its shape; without it, that of *like*.
    """
    shape = like.shape if shape is None else shape
    size = math.prod(shape) * like.dtype.itemsize
    if _ADVICE is not None and size >= _LEAST_BYTES and like.device.type == "cpu":
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # ends with the tensor
        try:
            memory.madvise(_ADVICE)
        except OSError:  # a kernel without huge pages
            memory.close()
        else:
            return torch.frombuffer(memory, dtype=like.dtype).view(shape)
    return torch.empty(shape, dtype=like.dtype, device=like.device)
