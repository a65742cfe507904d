"""`ParallelismConfig`: over how many processes each kind of parallelism spreads a run. Torch-free until a mesh is made.

Sizes come from arguments, then from ``PARALLELISM_CONFIG_*`` variables, and are 1 otherwise.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from orc.runtime.core.config import ConfigError
from orc.runtime.core.errors import TopologyError
from orc.runtime.core.parsing import switched_on
from orc.runtime.core.topology import DIMENSIONS

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from orc.runtime.core.context import RunContext

USE_PARALLELISM_CONFIG = "ACCELERATE_USE_PARALLELISM_CONFIG"
VARIABLES = {f"{name}_size": f"PARALLELISM_CONFIG_{name.upper()}_SIZE" for name in DIMENSIONS if name != "pp"}


@dataclass
class ParallelismConfig:
    """Sizes of the kinds of parallelism; their product is the number of processes.

    Attributes:
        dp_replicate_size: copies of the model, each trained on other samples.
        dp_shard_size: processes over which each copy is sharded (FSDP), each with other samples.
        tp_size: processes that share the matrices of each layer (tensor parallelism); they have the same batch.
        cp_size: processes that share each sequence (context parallelism); they have the same batch.
        sp_size: processes that share each sequence by attention heads (sequence parallelism); the same batch.

    Raises:
        ConfigError: a size, or the variable it comes from, is no whole number of at least 1; or both *cp_size* and
            *sp_size* cut the sequence.
    """

    dp_replicate_size: int | None = None
    dp_shard_size: int | None = None
    tp_size: int | None = None
    cp_size: int | None = None
    sp_size: int | None = None

    def __post_init__(self) -> None:
        for field, variable in VARIABLES.items():
            value, source = getattr(self, field), field
            if value is None:
                value, source = os.environ.get(variable, 1), variable
            setattr(self, field, _size(value, source))
        if self.size("cp") > 1 and self.size("sp") > 1:
            raise ConfigError(
                f"cp_size={self.cp_size} and sp_size={self.sp_size} are two ways to cut the sequence; choose one"
            )

    def size(self, dim: str) -> int:
        """Processes along *dim* (``tp``, say)."""
        return int(getattr(self, f"{dim}_size"))

    @property
    def sizes(self) -> dict[str, int]:
        """The dimensions with more than one process, outermost first."""
        return {name: self.size(name) for name in DIMENSIONS if name != "pp" and self.size(name) > 1}

    @property
    def total_size(self) -> int:
        """Processes that all of this needs."""
        return math.prod(self.sizes.values())

    @property
    def data_parallel_size(self) -> int:
        """Shares of the data."""
        return self.size("dp_replicate") * self.size("dp_shard")

    @property
    def non_data_parallel_size(self) -> int:
        """Processes that have the same batch."""
        return self.total_size // self.data_parallel_size

    @property
    def dp_replicate_enabled(self) -> bool:
        """`True` if there are several copies of the model."""
        return self.size("dp_replicate") > 1

    @property
    def dp_shard_enabled(self) -> bool:
        """`True` if copies are sharded."""
        return self.size("dp_shard") > 1

    @property
    def tp_enabled(self) -> bool:
        """`True` if layers are shared by several processes."""
        return self.size("tp") > 1

    @property
    def cp_enabled(self) -> bool:
        """`True` if sequences are cut."""
        return self.size("cp") > 1

    @property
    def sp_enabled(self) -> bool:
        """`True` if attention heads are shared out."""
        return self.size("sp") > 1

    def build_device_mesh(self, device_type: str) -> DeviceMesh:
        """Return a mesh over the process group, with the dimensions of `sizes` (``dp_replicate`` where all are 1).

        Every process makes the same call. The Accelerator makes its own: `Accelerator.torch_device_mesh`.

        Raises:
            TopologyError: the run has another number of processes than `total_size`.
        """
        import torch.distributed as dist
        from torch.distributed.device_mesh import init_device_mesh

        world_size = dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))
        if self.total_size != world_size:
            raise TopologyError(
                f"{self._shown()} makes {self.total_size} processes, but the run has {world_size}; change the "
                f"sizes, or launch {self.total_size}"
            )
        sizes = self.sizes or {"dp_replicate": 1}
        return init_device_mesh(device_type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))

    def lay_out(self, ctx: RunContext, *, sharded: bool) -> None:
        """Set the topology of *ctx*; nothing where every size is 1. *sharded*: something shards models.

        Raises:
            TopologyError: the sizes do not make the number of processes.
            ConfigError: *dp_shard_size* without something that shards.
        """
        if not self.sizes:
            return
        topology = ctx.set_topology(self.sizes, by="parallelism_config")
        if topology.size("dp_shard") > 1 and not sharded:
            raise ConfigError(
                f"dp_shard_size={self.dp_shard_size} shards the model, and a FullyShardedDataParallelPlugin says how: "
                "pass fsdp_plugin too, or use dp_replicate_size for copies"
            )

    def _shown(self) -> str:
        return " x ".join(f"{name}_size {size}" for name, size in self.sizes.items()) or "every size 1"


def _size(value: Any, source: str) -> int:
    try:
        size = int(value) if isinstance(value, str) else value
    except ValueError:
        size = None
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        raise ConfigError(f"{source}={value!r}: expected a whole number of processes, at least 1")
    return size


def parallelism_of(given: Any, env: Mapping[str, str]) -> ParallelismConfig | None:
    """Return *given*, or what the variables say where *env* turns them on.

    Raises:
        ConfigError: a variable cannot be used.
        TypeError: *given* is something else.
    """
    if given is None:
        return ParallelismConfig() if switched_on(env, USE_PARALLELISM_CONFIG) else None
    if not isinstance(given, ParallelismConfig):
        raise TypeError(f"parallelism_config is a {type(given).__name__}, not a ParallelismConfig")
    return given
