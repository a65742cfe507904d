"""`Topology`: how the run's ranks are laid out over named dimensions, and which of them share a batch.

The ranks are the cells of a grid whose dimensions are, outermost first, those of `DIMENSIONS`. Ranks that differ in a
data dimension (`DATA_DIMENSIONS`) train on different samples; ranks that differ in others alone are *peers*: they
share the work of one batch, so they get the same one, and it counts once. Some peers share it out by tokens: over
`LOSS_DIMENSIONS` each rank has a loss of its own, and gradients are averaged. Importing this needs no torch.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import warnings
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from orc.runtime.core.errors import ContextError, TopologyError
from orc.runtime.core.parallelism_settings import DIMENSIONS as DIMENSIONS

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    from orc.runtime.core.context import RunContext

DATA_DIMENSIONS = ("dp_replicate", "dp_shard")
LOSS_DIMENSIONS = (*DATA_DIMENSIONS, "cp", "sp")
ALIKE_DIMENSIONS = ("tp",)  # ranks along these have the same activations, of which they must drop the same
# Documented names of several dimensions of a mesh as one: those of all data, of all shards, and of all losses.
JOINED = {
    "dp": ("dp_replicate", "dp_shard"),
    "dp_shard_cp": ("dp_shard", "cp"),
    "dp_cp": ("dp_replicate", "dp_shard", "cp"),
}
# What scripts call the dimensions of a mesh of their own.
_ALSO = {
    "dp": "dp_replicate",
    "ddp": "dp_replicate",
    "replicate": "dp_replicate",
    "fsdp": "dp_shard",
    "shard": "dp_shard",
}


class Topology:
    """Layout of a run's ranks, seen from one of them; `RunContext.topology`.

    Args:
        ctx: the run, and the rank that looks.
        sizes: ranks along each named dimension; those that are not named have one. By default all ranks are replicas
            (``dp_replicate``).
        mesh: a mesh of the script's own instead; its names are those of `DIMENSIONS`, or ``dp``, ``ddp``, ``fsdp``. A
            mesh without names has data dimensions only.
        by: who asks, for messages.

    Attributes:
        sizes: ranks along every one of `DIMENSIONS`.
        names: the dimensions of the mesh: those that *sizes* named and those with more than one rank, in order.
        data_rank: which share of the data this rank gets, from 0; the same for peers.
        data_size: the number of shares: the product of the data dimensions.
        loss_size: ranks with a loss of their own, over other samples or other tokens: those that average gradients.

    Raises:
        TopologyError: a dimension that there is not, a size below 1, or sizes whose product is not the number of ranks;
            the same on every rank.
    """

    def __init__(
        self,
        ctx: RunContext,
        sizes: Mapping[str, int] | None = None,
        *,
        mesh: DeviceMesh | None = None,
        by: str = "the run",
    ) -> None:
        self._ctx, self._mesh, self.by = ctx, mesh, by
        self._groups: dict[tuple[str, ...], ProcessGroup | None] = {}
        self._own_names: dict[str, Any] = {}  # dimension -> name or number of it in a mesh of the script's own
        self.used = False  # loaders have taken their share
        if mesh is None:
            named = {"dp_replicate": ctx.world_size} if sizes is None else dict(sizes)
            self.sizes = _checked(named, ctx.world_size, by)
            self.names = tuple(name for name in DIMENSIONS if name in named or self.sizes[name] > 1)
            self._cells: Sequence[int] = range(ctx.world_size)  # the rank in each cell, the last dimension the fastest
        else:
            self.sizes, self._cells, self._own_names = _of_mesh(mesh, ctx, by)
            self.names = tuple(name for name in DIMENSIONS if name in self._own_names)
        self._places = dict(zip(DIMENSIONS, self._places_of(self._cells.index(ctx.rank)), strict=True))
        self.data_size = math.prod(self.sizes[name] for name in DATA_DIMENSIONS)
        self.loss_size = math.prod(self.sizes[name] for name in LOSS_DIMENSIONS)
        self.data_rank = self._places["dp_replicate"] * self.sizes["dp_shard"] + self._places["dp_shard"]

    # ---- data

    def pin_data_share(self) -> tuple[int, int]:
        """Return `data_rank` and `data_size` to something that stays (a loader): from now on they cannot change."""
        self.used = True
        return self.data_rank, self.data_size

    @functools.cached_property
    def data_ranks(self) -> tuple[int, ...]:
        """The `data_rank` of every rank of the run."""
        share_of = {rank: share for ranks in self._ranks_of_groups(DATA_DIMENSIONS) for share, rank in enumerate(ranks)}
        return tuple(share_of[rank] for rank in range(self._ctx.world_size))

    @functools.cached_property
    def data_context(self) -> RunContext:
        """The run as one of this rank and those that have the other shares of the data, for collectives among them.

        The first use is a collective. The run itself, where there are no peers.
        """
        if self.data_size == self._ctx.world_size:
            return self._ctx
        shares, rank = self.data_size, self.data_rank
        return dataclasses.replace(self._ctx, rank=rank, world_size=shares, group=self.data_group, store=None)

    @property
    def data_group(self) -> ProcessGroup | None:
        """The ranks that have one share of the data each, this one among them; see `group`."""
        return self.group(*DATA_DIMENSIONS)

    @property
    def loss_group(self) -> ProcessGroup | None:
        """The ranks whose gradients are averaged, this one among them; see `group`."""
        return self.group(*LOSS_DIMENSIONS)

    @property
    def counts(self) -> bool:
        """`True` on the one rank among its peers that counts what they have in common."""
        return not any(place for name, place in self._places.items() if name not in DATA_DIMENSIONS)

    @property
    def rng_source_rank(self) -> int:
        """The rank whose random numbers this one draws: the first of those along `ALIKE_DIMENSIONS`."""
        return next(ranks[0] for ranks in self._ranks_of_groups(ALIKE_DIMENSIONS) if self._ctx.rank in ranks)

    @property
    def peers(self) -> int:
        """Ranks with the same batch, this one included."""
        return self._ctx.world_size // self.data_size

    # ---- dimensions

    def size(self, *dims: str) -> int:
        """Ranks along *dims* together. Raises `TopologyError` for a dimension that there is not."""
        return math.prod(self.sizes[_known(name)] for name in dims)

    def place(self, dim: str) -> int:
        """This rank's place along *dim*, from 0."""
        return self._places[_known(dim)]

    def group(self, *dims: str) -> ProcessGroup | None:
        """The ranks that differ from this one along *dims* alone; `None` where it is the only one.

        The first call for a combination is a collective: all ranks make it.

        Raises:
            TopologyError: a dimension that there is not.
            ContextError: the process group is closed.
        """
        size = self.size(*dims)
        if size == 1:
            return None
        if size == self._ctx.world_size:
            return self._ctx.require_group(f"the group over {' x '.join(dims)}")
        wide = tuple(name for name in DIMENSIONS if name in dims and self.sizes[name] > 1)
        if wide not in self._groups:
            self._groups[wide] = self._make_group(wide)
        return self._groups[wide]

    @property
    def mesh(self) -> DeviceMesh:
        """The mesh over `names`, with a process group per dimension; the first use makes it, on all ranks together.

        With one process, which has no process group, it opens one of a single rank.

        Raises:
            ContextError: in a simulated run, which has no process groups that a mesh could use.
        """
        if self._mesh is None:
            self._mesh = self._make_mesh()
        return self._mesh

    def submesh(self, *dims: str) -> DeviceMesh:
        """The part of `mesh` along *dims*, in the order of `DIMENSIONS`; they must be among `names`.

        Raises:
            TopologyError: a dimension that the mesh does not have.
        """
        absent = [name for name in dims if name not in self.names]
        if absent:
            raise TopologyError(
                f"the mesh has the dimensions {', '.join(self.names)}, not {', '.join(absent)}; name them in the "
                "ParallelismConfig, or in the mesh that the script brings"
            )
        wanted = tuple(name for name in self.names if name in dims)
        mesh = self.mesh
        if wanted == self.names:
            return mesh
        own = tuple(self._own_names.get(name, name) for name in wanted)
        return mesh[own if len(own) > 1 else own[0]]

    def joined(self, *dims: str, beside: Sequence[str] = ()) -> DeviceMesh:
        """The submesh whose last dimension is *dims* together, after those *beside* it; the first use is a collective.

        Raises:
            TopologyError: a dimension that the mesh does not have, or a torch whose meshes cannot join dimensions.
        """
        if len(dims) == 1:
            return self.submesh(*beside, *dims)
        part = self.submesh(*dims)
        if not hasattr(part, "_flatten"):
            raise TopologyError(f"{' and '.join(dims)} as one dimension need torch 2.6 or later")
        from orc.runtime.core.timeouts import keep_timeout

        flat = part._flatten("_".join(self._own_names.get(name, name) for name in self.names if name in dims))
        keep_timeout([flat.get_group()])
        if not beside:
            return flat
        own = [self._own_names.get(name, name) for name in self.names if name in beside]
        with warnings.catch_warnings():  # torch means to have another form for this, and has none yet
            warnings.filterwarnings("ignore", "Slicing a flattened dim from root mesh will be deprecated")
            return self.mesh[(*own, *(flat.mesh_dim_names or ()))]

    def same(self, other: Topology) -> bool:
        """Return whether *other* is the same layout; the same answer on every rank."""
        return self.sizes == other.sizes and list(self._cells) == list(other._cells)

    def shares_data_like(self, other: Topology) -> bool:
        """Return whether every rank of the run gets the same share of the data in *other*."""
        return self.data_size == other.data_size and self.data_ranks == other.data_ranks

    def __str__(self) -> str:
        """Sizes as messages show them: ``dp_shard 2 x tp 2``."""
        shown = [f"{name} {self.sizes[name]}" for name in DIMENSIONS if self.sizes[name] > 1]
        return " x ".join(shown) or "one rank"

    def __repr__(self) -> str:
        return f"<Topology {self}, by {self.by}>"

    # ---- making

    def _make_mesh(self) -> DeviceMesh:
        ctx = self._ctx
        _refuse_simulated(ctx)
        import torch.distributed as dist
        from torch.distributed.device_mesh import init_device_mesh

        if ctx.world_size > 1:
            ctx.require_group("a device mesh")
        elif not dist.is_initialized():
            from orc.runtime.launch.process_group import open_alone

            open_alone(ctx.device)
        shape = tuple(self.sizes[name] for name in self.names)
        return join_dimensions(init_device_mesh(ctx.device.type, shape, mesh_dim_names=self.names))

    def _make_group(self, dims: tuple[str, ...]) -> ProcessGroup | None:
        subgroup = getattr(self._ctx.group, "subgroup", None)  # of a simulated run
        groups = self._ranks_of_groups(dims)
        if subgroup is not None:
            made: ProcessGroup = subgroup(next(ranks for ranks in groups if self._ctx.rank in ranks))
            return made
        if len(dims) == 1:
            return self.mesh.get_group(self._own_names.get(dims[0], dims[0]))
        import torch.distributed as dist

        from orc.runtime.core.timeouts import asked_timeout

        self._ctx.require_group(f"the group over {' x '.join(dims)}")
        return dist.new_subgroups_by_enumeration(groups, timeout=asked_timeout())[0]  # type: ignore[no-any-return]

    def _ranks_of_groups(self, dims: Collection[str]) -> list[list[int]]:
        """The ranks of every group over *dims*, in the order of their places along them."""
        groups: dict[tuple[int, ...], list[int]] = {}
        for cell, rank in enumerate(self._cells):
            rest = tuple(at for at, name in zip(self._places_of(cell), DIMENSIONS, strict=True) if name not in dims)
            groups.setdefault(rest, []).append(rank)
        return list(groups.values())

    def _places_of(self, cell: int) -> tuple[int, ...]:
        places = []
        for size in reversed(self.sizes.values()):
            cell, place = divmod(cell, size)
            places.append(place)
        return tuple(reversed(places))


def join_dimensions(mesh: DeviceMesh) -> DeviceMesh:
    """Return *mesh*, in which data dimensions, and cp with them, have a name together, see `JOINED`; collective.

    Its groups have the time-out of the run.

    Only where at least two of them have more than one rank; torch 2.4 has no such names.
    """
    from orc.runtime.core.timeouts import keep_timeout

    names = mesh.mesh_dim_names or ()
    wide = {name for name, size in zip(names, mesh.mesh.shape, strict=True) if size > 1}
    groups = mesh.get_all_groups()
    for joined, dims in JOINED.items():
        found = tuple(name for name in names if name in dims and name in wide)
        if len(found) > 1 and hasattr(mesh, "_flatten"):
            groups.append(mesh[found]._flatten(joined).get_group())
    keep_timeout(groups)
    return mesh


def sizes_of_mesh(mesh: DeviceMesh, by: str) -> dict[str, int]:
    """Return the ranks along each dimension of a mesh of the script's own, in the order of the mesh.

    Raises:
        TopologyError: a name that there is not, two of one kind, or more than two dimensions without names.
    """
    shape, names = tuple(mesh.mesh.shape), mesh.mesh_dim_names
    if names is None:
        if len(shape) > 2:
            raise TopologyError(f"{by}: a mesh of {len(shape)} dimensions needs names: mesh_dim_names=...")
        known = DATA_DIMENSIONS[2 - len(shape) :]
    else:
        known = tuple(_known(_ALSO.get(name, name)) for name in names)
        if len(set(known)) < len(known):
            raise TopologyError(f"{by}: the mesh has two dimensions of one kind: {', '.join(names)}")
    return dict(zip(known, shape, strict=True))


def _refuse_simulated(ctx: RunContext) -> None:
    if ctx.mirrored or getattr(ctx.group, "subgroup", None) is not None:
        raise ContextError(
            "a device mesh needs the process group of real processes, and this run is simulated; its topology has "
            "sizes, places and groups: use topology.group(...), or run processes with orc.runtime.testing.run_ranks"
        )


def dimension_of(name: str) -> str | None:
    """Return the dimension that scripts call *name* in a mesh of their own; `None` for a name that there is not."""
    known = _ALSO.get(name, name)
    return known if known in DIMENSIONS else None


def _known(name: str) -> str:
    if name not in DIMENSIONS:
        raise TopologyError(f"there is no dimension {name!r}; there are {', '.join(DIMENSIONS)}")
    return name


def _checked(named: Mapping[str, int], world_size: int, by: str) -> dict[str, int]:
    for name, size in named.items():
        _known(name)
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise TopologyError(f"{by}: {name} is {size!r}, but a dimension has a whole number of ranks, at least 1")
    sizes = {name: named.get(name, 1) for name in DIMENSIONS}
    total = math.prod(sizes.values())
    if total != world_size:
        shown = " x ".join(f"{name} {size}" for name, size in sizes.items() if size > 1) or "every dimension 1"
        raise TopologyError(
            f"{by}: {shown} makes {total} ranks, but the run has {world_size}; change the sizes so that their product "
            f"is {world_size}, or launch {total} processes"
        )
    return sizes


def _of_mesh(mesh: DeviceMesh, ctx: RunContext, by: str) -> tuple[dict[str, int], list[int], dict[str, Any]]:
    """Sizes, the rank in each cell, and what the mesh itself calls each dimension."""
    found, names = sizes_of_mesh(mesh, by), mesh.mesh_dim_names
    known = tuple(found)
    ordered = [name for name in DIMENSIONS if name in known]
    cells: list[int] = mesh.mesh.permute([known.index(name) for name in ordered]).flatten().tolist()
    if sorted(cells) != list(range(ctx.world_size)):
        raise TopologyError(
            f"{by}: the mesh has {len(cells)} of the run's {ctx.world_size} ranks; it must have all of them"
        )
    sizes = dict.fromkeys(DIMENSIONS, 1) | found
    return sizes, cells, dict(zip(known, names or range(len(known)), strict=True))


def sharded(ctx: RunContext, hybrid: bool) -> dict[str, int]:
    """Return the sizes of the dimensions that sharding requires where nothing else has laid out the ranks.

    All ranks hold shards; *hybrid* those of one machine do, and the machines are replicas.

    Raises:
        ContextError: hybrid, and the machines have different numbers of ranks.
    """
    if not hybrid:
        return {"dp_shard": ctx.world_size}
    replicas, rest = divmod(ctx.world_size, ctx.local_world_size)
    if rest:
        raise ContextError(
            f"a hybrid sharding strategy needs equally many ranks on every machine: {ctx.world_size} ranks are no "
            f"multiple of the {ctx.local_world_size} on this one"
        )
    return {"dp_replicate": replicas, "dp_shard": ctx.local_world_size}
