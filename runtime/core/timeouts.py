"""Time-outs of process groups. torch forgets, in groups for a mesh, what was asked for; and gives NCCL beside gloo that
of gloo, which is longer than NCCL's own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from datetime import timedelta
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup

_asked: WeakKeyDictionary[ProcessGroup, timedelta | None] = WeakKeyDictionary()  # by group of all ranks


def note_timeout(group: ProcessGroup, timeout: timedelta | None) -> None:
    """Note that *group*, of all ranks, was opened by the runtime with *timeout*; `None` is each backend's own."""
    _asked[group] = timeout
    keep_timeout([group])


def asked_timeout() -> timedelta | None:
    """Return the time-out that was asked for in the process group of all ranks; `None` where it is a default."""
    import torch.distributed as dist
    from torch.distributed.constants import default_pg_nccl_timeout, default_pg_timeout

    group = dist.group.WORLD
    if group is None or group in _asked:
        return None if group is None else _asked[group]
    for backend in _backends(group):  # of a group that the script has opened
        timeout: timedelta | None = getattr(getattr(backend, "options", None), "_timeout", None)
        if timeout is not None and timeout not in (default_pg_timeout, default_pg_nccl_timeout):
            return timeout
    return None


def keep_timeout(groups: Iterable[ProcessGroup]) -> None:
    """Give *groups*, which torch has made, the time-out that was asked for; without one, NCCL its own.

    Those beside a group that the script has opened keep torch's defaults.
    """
    import torch.distributed as dist
    from torch.distributed.constants import default_pg_nccl_timeout

    asked = asked_timeout()
    if asked is None and dist.group.WORLD not in _asked:
        return
    for group in groups:
        for backend in _backends(group):
            timeout = asked
            if timeout is None and backend.name() == "nccl":
                timeout = default_pg_nccl_timeout
            # Not where torch wraps the backend: TORCH_DISTRIBUTED_DEBUG=DETAIL.
            if timeout is not None and hasattr(backend, "_set_default_timeout"):
                backend._set_default_timeout(timeout)


def collectives_end_after_s(group: ProcessGroup | None, device: torch.device) -> float | None:
    """Return how many seconds ranks wait for each other in the collectives of *group* before an error ends them.

    `None` where that is not known, or there is no group.
    """
    if group is None or all(carried.type != device.type for carried in group._device_types):
        return None  # a group of threads, or one of another library
    options = getattr(group._get_backend(device), "options", None)  # gloo's and NCCL's
    limit = getattr(options, "_timeout", None)
    return limit.total_seconds() if isinstance(limit, timedelta) else None


def _backends(group: ProcessGroup) -> Iterator[Any]:
    for device in group._device_types:
        yield group._get_backend(device)
