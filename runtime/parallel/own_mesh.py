"""Meshes that scripts bring along in their models: the ranks are laid out accordingly."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from orc.runtime.core.topology import DATA_DIMENSIONS, dimension_of

if TYPE_CHECKING:
    from torch import nn

    from orc.runtime.core.context import RunContext


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
        whole = _whole(mesh)
        dims = [dimension_of(name) for name in whole.mesh_dim_names or () if whole.size() == ctx.world_size]
        if dims and None not in dims and not {*dims} <= {*DATA_DIMENSIONS}:
            ctx.set_topology(whole, by="the mesh of the model")
            return


def _whole(mesh: Any) -> Any:
    """The mesh of which *mesh* is a part."""
    if hasattr(mesh, "_get_root_mesh"):
        return mesh._get_root_mesh()
    from torch.distributed import device_mesh  # before torch 2.10

    return device_mesh._mesh_resources.get_root_mesh(mesh)
