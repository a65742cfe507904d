"""Parameters that are cut over ranks: DTensors, and plain tensors that FSDP version 1 has cut."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING, Any

from torch.utils.weak import WeakIdKeyDictionary

from orc.runtime.core.topology import dimension_of

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup

# parameter -> the group whose ranks have other parameters of its model, and whether it counts here
_stages: WeakIdKeyDictionary = WeakIdKeyDictionary()
_groups: WeakIdKeyDictionary = WeakIdKeyDictionary()  # parameter -> the group; does not keep the parameters alive


def note_shards(parameters: Iterable[Tensor], group: ProcessGroup | None) -> None:
    """Note that every rank of *group* holds a part of each of *parameters*; `None` is a group of one rank."""
    if group is not None:
        for parameter in parameters:
            _groups[parameter] = group


def spread_over(parameters: Iterable[Tensor]) -> set[str]:
    """Return the dimensions of the topology over which some of *parameters* are cut or copied as DTensors.

    A mesh without names, or with others than a topology's, is one of data, as scripts make it for ``fully_shard``.
    """
    found: set[str] = set()
    for mesh in {mesh for one in parameters if (mesh := getattr(one, "device_mesh", None)) is not None}:
        names = mesh.mesh_dim_names or ("dp_shard",)
        found.update(dimension_of(name) or "dp_shard" for name in names)
    return found


def local_part(tensor: Any) -> Tensor:
    """Return what this rank holds of *tensor*, outside of autograd: of a DTensor its part, else all of it."""
    held = tensor.detach()
    part: Tensor = held.to_local() if hasattr(held, "to_local") else held
    return part


def shard_group(parameter: Tensor) -> ProcessGroup | None:
    """Return the group over which *parameter* was noted to be cut."""
    group: ProcessGroup | None = _groups.get(parameter) if len(_groups) else None
    return group


def note_stage(parameters: Iterable[Tensor], group: ProcessGroup, elsewhere: Collection[int]) -> None:
    """Note that the ranks of *group* have other parameters of the same model.

    Those of *parameters* whose ids are in *elsewhere* another rank has too, and counts.
    """
    for parameter in parameters:
        _stages[parameter] = (group, id(parameter) not in elsewhere)


def stage_group(parameter: Tensor) -> tuple[ProcessGroup, bool] | None:
    """Return the group whose ranks have other parameters of the same model, and whether *parameter* counts here."""
    found: tuple[ProcessGroup, bool] | None = _stages.get(parameter) if len(_stages) else None
    return found


def take_place(old: Tensor, new: Tensor) -> None:
    """Note of *new* what was noted of *old*, which it replaces."""
    if len(_stages) and old in _stages:
        _stages[new] = _stages[old]
