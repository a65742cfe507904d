"""Parameters that are cut over ranks as DTensors: over which dimensions, the part of this rank, and the whole.

Scripts bring meshes along in models that they have cut themselves: the ranks are laid out accordingly.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from orc.runtime.core.topology import DATA_DIMENSIONS, dimension_of

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.distributed.tensor import DTensor

    from orc.runtime.core.context import RunContext


def spread_over(parameters: Iterable[Tensor]) -> set[str]:
    """Return the dimensions of the topology over which some of *parameters* are cut or copied as DTensors.

    A mesh without names, or with others than a topology's, is one of data, as scripts make it for ``fully_shard``.
    """
    meshes = {mesh for parameter in parameters if (mesh := getattr(parameter, "device_mesh", None)) is not None}
    names = [name for mesh in meshes for name in mesh.mesh_dim_names or ("dp_shard",)]
    return {dimension_of(name) or "dp_shard" for name in names}


def local_part(tensor: Any) -> Tensor:
    """Return what this rank holds of *tensor*, outside of autograd: of a DTensor its part, else all of it."""
    held = tensor.detach()
    part: Tensor = held.to_local() if hasattr(held, "to_local") else held
    return part


def replicated(tensor: Tensor, mesh: Any) -> DTensor:
    """Return *tensor*, which all ranks of *mesh* have alike, as a DTensor over it."""
    from torch.distributed.tensor import DTensor, Replicate

    return DTensor.from_local(tensor, mesh, [Replicate()] * mesh.ndim, run_check=False)


def whole(data: Any, *, keep: bool = True, on_cpu: bool = False) -> Any:
    """Return *data* (any nesting) with each DTensor gathered from its shards; all processes call it.

    With *on_cpu* all tensors come to host memory. Without *keep* this rank takes part, and gets empty dictionaries.
    """
    if isinstance(data, torch.Tensor):
        if hasattr(data, "full_tensor"):
            data = data.full_tensor()
        if not keep:
            return None
        return data.detach().cpu() if on_cpu else data
    if isinstance(data, Mapping):
        values = {key: whole(value, keep=keep, on_cpu=on_cpu) for key, value in data.items()}
        if not keep:
            return {}
        # Of the same class, without calling its constructor: state dicts carry metadata in an attribute.
        state = copy.copy(data) if isinstance(data, dict) else {}
        state.update(values)
        return state
    if type(data) in (list, tuple):
        return type(data)(whole(value, keep=keep, on_cpu=on_cpu) for value in data)
    return data


def follow_mesh(model: nn.Module, ctx: RunContext) -> None:
    """Lay the ranks out as the mesh does on which the script has cut *model*, unless a layout was chosen.

    A mesh of data alone needs nothing, and one without names, or with others than a topology's, says nothing.

    Raises:
        SettingConflict: loaders were prepared already, and would have to share the data out otherwise.
    """
    if ctx.topology_chosen or not ctx.distributed:
        return
    for parameter in model.parameters():
        mesh = getattr(parameter, "device_mesh", None)
        if mesh is None:
            continue
        whole = _root(mesh)
        dims = [dimension_of(name) for name in whole.mesh_dim_names or () if whole.size() == ctx.world_size]
        if dims and None not in dims and not {*dims} <= {*DATA_DIMENSIONS}:
            ctx.set_topology(whole, by="the mesh of the model")
            return


def _root(mesh: Any) -> Any:
    """The mesh of which *mesh* is a part."""
    if hasattr(mesh, "_get_root_mesh"):
        return mesh._get_root_mesh()
    from torch.distributed import device_mesh  # before torch 2.10

    return device_mesh._mesh_resources.get_root_mesh(mesh)
