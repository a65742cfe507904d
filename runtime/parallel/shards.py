"""Parameters that are cut over a process group without saying so themselves, as those of FSDP version 1."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from torch.utils.weak import WeakIdKeyDictionary

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup

_groups: WeakIdKeyDictionary = WeakIdKeyDictionary()  # parameter -> the group; does not keep the parameters alive


def note_shards(parameters: Iterable[Tensor], group: ProcessGroup | None) -> None:
    """Note that every rank of *group* holds a part of each of *parameters*; `None` is a group of one rank."""
    if group is not None:
        for parameter in parameters:
            _groups[parameter] = group


def shard_group(parameter: Tensor) -> ProcessGroup | None:
    """Return the group over which *parameter* was noted to be cut."""
    group: ProcessGroup | None = _groups.get(parameter) if len(_groups) else None
    return group
