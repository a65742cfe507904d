"""Time-outs of process groups: those beside the run's own get the one that was asked for, which torch forgets."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from datetime import timedelta
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def asked_timeout() -> timedelta | None:
    """Return the time-out of collectives in the process group of all ranks; `None` where it is torch's default."""
    import torch.distributed as dist
    from torch.distributed.constants import default_pg_nccl_timeout, default_pg_timeout

    group = dist.group.WORLD
    for backend in () if group is None else _backends(group):
        found: timedelta | None = getattr(getattr(backend, "options", None), "_timeout", None)
        if found is not None and found not in (default_pg_timeout, default_pg_nccl_timeout):
            return found
    return None


def keep_timeout(groups: Iterable[ProcessGroup]) -> None:
    """Give *groups*, which torch has made for a mesh, the time-out that was asked for."""
    import torch.distributed as dist

    timeout = asked_timeout()
    if timeout is None:
        return
    for group in groups:
        for backend in () if group is dist.group.WORLD else _backends(group):
            if hasattr(backend, "_set_default_timeout"):
                backend._set_default_timeout(timeout)


def _backends(group: ProcessGroup) -> Iterator[Any]:
    for device in group._device_types:
        yield group._get_backend(device)
