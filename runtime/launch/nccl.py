"""NCCL where the environment and the script leave it open: what it records, and when its collectives end."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup

_RECORDED = "2000"  # collectives: torch's own default, from the version on that records unasked
_NAMES = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")  # the newer; the older, which it warns of


def record_collectives() -> None:
    """Have torch record the collectives of NCCL, unless the environment says how many; before the group is opened."""
    if not any(name in os.environ for name in _NAMES):
        import torch._C._distributed_c10d as c10d

        os.environ[_NAMES[not hasattr(c10d, "_dump_fr_trace_json")]] = _RECORDED


def collectives_end_after_s(group: ProcessGroup | None, device: torch.device) -> float | None:
    """Return how many seconds ranks wait for each other in the collectives of *group* before an error ends them.

    `None` where that is not known, or there is no group.
    """
    if group is None or all(carried.type != device.type for carried in group._device_types):
        return None  # a group of threads, or one of another library
    options = getattr(group._get_backend(device), "options", None)  # gloo's and NCCL's
    limit = getattr(options, "_timeout", None)
    return limit.total_seconds() if isinstance(limit, timedelta) else None
