"""`ParallelismConfig`: over how many processes each kind of parallelism spreads a run, and the options of each kind.

What is not given comes from ``PARALLELISM_CONFIG_*`` variables, and is the documented default otherwise: sizes are 1.
Torch-free until a mesh is made.
"""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from orc.runtime.core.config import ConfigError
from orc.runtime.core.errors import TopologyError
from orc.runtime.core.parallelism_settings import BACKENDS, PARSERS, USE_PARALLELISM_CONFIG, size, variable
from orc.runtime.core.parsing import switched_on, truth
from orc.runtime.core.topology import DATA_DIMENSIONS, DIMENSIONS, JOINED, join_dimensions, sizes_of_mesh

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from orc.runtime.core.context import RunContext

VARIABLES = {f"{name}_size": variable(f"{name}_size") for name in DIMENSIONS}


def setting(given: Any, variable: str, default: Any, parse: Callable[[Any], Any], field: str) -> Any:
    """Return *given*, parsed; without it the environment's value in *variable*, else *default*.

    Raises:
        ConfigError: the value cannot be used; it names *field* or *variable*.
    """
    value, source = (os.environ.get(variable), variable) if given is None else (given, field)
    if value is None:
        return default
    try:
        return parse(value)
    except ValueError as error:
        raise ConfigError(f"{source}={value!r}: {error}") from None


@dataclass
class TorchTensorParallelConfig:
    """Options of tensor parallelism (``ParallelismConfig(tp_handler=...)``).

    Attributes:
        enable_async_tp: let ``torch.compile`` overlap the exchanges with the products around them; for models that are
            compiled, on GPUs. Else ``PARALLELISM_CONFIG_ENABLE_ASYNC_TP``.
        plan: how each module is cut, by its name, in which ``*`` stands for one level: a style by name (``colwise``,
            ``rowwise``, ...) or a ``ParallelStyle`` of torch. It takes the place of the model's own plan.

    Raises:
        ConfigError: a value cannot be used.
    """

    enable_async_tp: bool | None = None
    plan: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        self.enable_async_tp = setting(
            self.enable_async_tp, "PARALLELISM_CONFIG_ENABLE_ASYNC_TP", False, truth, "enable_async_tp"
        )
        if self.plan is not None and not isinstance(self.plan, Mapping):
            raise ConfigError(f"plan is a {type(self.plan).__name__}, not a mapping from names of modules to styles")


@dataclass
class TorchContextParallelConfig:
    """Options of context parallelism (``ParallelismConfig(cp_handler=...)``).

    Attributes:
        cp_comm_strategy: how keys and values travel: ``allgather`` (all at once) or ``alltoall`` (round the ring). Else
            ``PARALLELISM_CONFIG_CP_COMM_STRATEGY``.

    Raises:
        ConfigError: a value cannot be used.
    """

    cp_comm_strategy: str | None = None

    def __post_init__(self) -> None:
        variable, parse = "PARALLELISM_CONFIG_CP_COMM_STRATEGY", PARSERS["cp_comm_strategy"]
        self.cp_comm_strategy = setting(self.cp_comm_strategy, variable, "allgather", parse, "cp_comm_strategy")


@dataclass
class DeepSpeedSequenceParallelConfig:
    """Options of sequence parallelism by attention heads (``ParallelismConfig(sp_handler=...)``).

    Attributes:
        sp_seq_length: the length of all sequences; not needed where it varies. Else
            ``PARALLELISM_CONFIG_SP_SEQ_LENGTH``.
        sp_seq_length_is_variable: the length varies from batch to batch. Else
            ``PARALLELISM_CONFIG_SP_SEQ_LENGTH_IS_VARIABLE``.
        sp_attn_implementation: attention that each process computes over whole sequences: ``sdpa``,
            ``flash_attention_2`` or ``flash_attention_3``. Else ``PARALLELISM_CONFIG_SP_ATTN_IMPLEMENTATION``.

    Raises:
        ConfigError: a value cannot be used, or the length neither varies nor is given.
    """

    sp_seq_length: int | None = None
    sp_seq_length_is_variable: bool | None = None
    sp_attn_implementation: str | None = None

    def __post_init__(self) -> None:
        prefix = "PARALLELISM_CONFIG_SP_"
        self.sp_seq_length = setting(self.sp_seq_length, f"{prefix}SEQ_LENGTH", None, size, "sp_seq_length")
        self.sp_seq_length_is_variable = setting(
            self.sp_seq_length_is_variable, f"{prefix}SEQ_LENGTH_IS_VARIABLE", True, truth, "sp_seq_length_is_variable"
        )
        self.sp_attn_implementation = setting(
            self.sp_attn_implementation,
            f"{prefix}ATTN_IMPLEMENTATION",
            "sdpa",
            PARSERS["sp_attn_implementation"],
            "sp_attn_implementation",
        )
        if not self.sp_seq_length_is_variable and self.sp_seq_length is None:
            raise ConfigError("sp_seq_length_is_variable=False needs the length: give sp_seq_length too")


@dataclass
class TorchTensorParallelPlugin:
    """Older form of ``ParallelismConfig(tp_size=...)`` (``Accelerator(torch_tp_plugin=...)``).

    Attributes:
        tp_size: processes that share the matrices of each layer.
        torch_device_mesh: a mesh of the script's own, instead.

    Raises:
        ConfigError: *tp_size* is no whole number of at least 1.
    """

    tp_size: int = 1
    torch_device_mesh: Any = None

    def __post_init__(self) -> None:
        try:
            self.tp_size = size(self.tp_size)
        except ValueError as error:
            raise ConfigError(f"TorchTensorParallelPlugin: tp_size={self.tp_size!r}: {error}") from None


_HANDLERS = {
    "tp_handler": TorchTensorParallelConfig,
    "cp_handler": TorchContextParallelConfig,
    "sp_handler": DeepSpeedSequenceParallelConfig,
}


@dataclass
class ParallelismConfig:
    """Sizes of the kinds of parallelism; their product is the number of processes.

    Attributes:
        dp_replicate_size: copies of the model, each trained on other samples.
        dp_shard_size: processes over which each copy is sharded (FSDP), each with other samples.
        tp_size: processes that share the matrices of each layer (tensor parallelism); they have the same batch.
        cp_size: processes that share each sequence (context parallelism); they have the same batch.
        cp_backend: what computes it: ``torch``.
        sp_size: processes that share each sequence by attention heads (sequence parallelism); the same batch.
        sp_backend: what computes it: ``deepspeed``, or ``torch``, which needs no DeepSpeed.
        tp_handler: options of tensor parallelism; a handler has no effect where the size is 1.
        cp_handler: options of context parallelism.
        sp_handler: options of sequence parallelism.
        device_mesh: a mesh of the script's own, with names like those of the sizes, which has their place.
        pp_size: processes that hold one stage of the layers each (pipeline parallelism); they have the same batch.
        pp_handler: options of pipeline parallelism.

    Raises:
        ConfigError: a size, or the variable it comes from, is no whole number of at least 1, or contradicts the mesh;
            or both *cp_size* and *sp_size* cut the sequence.
        TopologyError: *device_mesh* has a dimension that there is not.
        TypeError: a handler is of another class.
    """

    dp_replicate_size: int | None = None
    dp_shard_size: int | None = None
    tp_size: int | None = None
    cp_size: int | None = None
    cp_backend: str | None = None
    sp_size: int | None = None
    sp_backend: str | None = None
    tp_handler: TorchTensorParallelConfig | None = None
    cp_handler: TorchContextParallelConfig | None = None
    sp_handler: DeepSpeedSequenceParallelConfig | None = None
    device_mesh: DeviceMesh | None = None
    pp_size: int | None = None
    pp_handler: Any = None

    def __post_init__(self) -> None:
        meshed = None if self.device_mesh is None else sizes_of_mesh(self.device_mesh, "ParallelismConfig(device_mesh)")
        for field, in_environment in VARIABLES.items():
            value, source = getattr(self, field), field
            if value is None and meshed is None:
                value, source = os.environ.get(in_environment, 1), in_environment
            if meshed is not None:
                of_mesh = meshed.get(field.removesuffix("_size"), 1)
                if value not in (None, of_mesh):
                    raise ConfigError(f"{field}={value!r} contradicts device_mesh, which has {of_mesh}; leave it out")
                value = of_mesh
            try:
                setattr(self, field, size(value))
            except ValueError as error:
                raise ConfigError(f"{source}={value!r}: {error}") from None
        for field, names in BACKENDS.items():
            setattr(self, field, setting(getattr(self, field), variable(field), names[0], PARSERS[field], field))
        if self.size("cp") > 1 and self.size("sp") > 1:
            raise ConfigError(
                f"cp_size={self.cp_size} and sp_size={self.sp_size} are two ways to cut the sequence; choose one"
            )
        for field, kind in _HANDLERS.items():
            handler = getattr(self, field)
            if handler is not None and not isinstance(handler, kind):
                raise TypeError(f"{field} is a {type(handler).__name__}, not a {kind.__name__}")
            if handler is None and self.size(field.removesuffix("_handler")) > 1:
                setattr(self, field, kind())

    def size(self, dim: str) -> int:
        """Return the number of processes along *dim* (``tp``, for example)."""
        return int(getattr(self, f"{dim}_size"))

    @property
    def sizes(self) -> dict[str, int]:
        """The dimensions with more than one process, outermost first."""
        return {name: self.size(name) for name in DIMENSIONS if self.size(name) > 1}

    @property
    def handlers(self) -> dict[str, Any]:
        """Options of each kind by its dimension."""
        return {name: getattr(self, f"{name}_handler") for name in ("pp", "tp", "cp", "sp")}

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

    @property
    def pp_enabled(self) -> bool:
        """`True` if layers are dealt out in stages."""
        return self.size("pp") > 1

    # ---- names of dimensions, as the mesh has them

    @property
    def active_mesh_dims(self) -> list[str]:
        """The dimensions with more than one process, outermost first."""
        return list(self.sizes)

    @property
    def dp_dim_names(self) -> list[str]:
        """The active dimensions along which samples differ."""
        return self._active(DATA_DIMENSIONS)

    @property
    def non_dp_dim_names(self) -> list[str]:
        """The active dimensions along which samples are the same."""
        return self._active(name for name in DIMENSIONS if name not in DATA_DIMENSIONS)

    @property
    def dp_shard_cp_dim_names(self) -> list[str]:
        """The active dimensions over which FSDP cuts parameters."""
        return self._active(JOINED["dp_shard_cp"])

    @property
    def dp_cp_dim_names(self) -> list[str]:
        """The active dimensions along which losses differ, and are averaged."""
        return self._active(JOINED["dp_cp"])

    @property
    def fsdp_dim_names(self) -> list[str]:
        """Dimensions of the mesh for FSDP: ``dp_replicate``, then `dp_shard_cp_dim_names`, joined if it is two."""
        shards = self.dp_shard_cp_dim_names
        return self._active(["dp_replicate"]) + (["dp_shard_cp"] if len(shards) > 1 else shards)

    @property
    def model_shard_dim_names(self) -> list[str]:
        """The active dimensions along which processes hold different parts of the model."""
        return self._active(("pp", "dp_shard", "cp", "tp") if self.dp_shard_enabled else ("pp", "tp"))

    def _active(self, names: Iterable[str]) -> list[str]:
        chosen = set(names)
        return [name for name in self.sizes if name in chosen]

    # ---- the mesh

    def build_device_mesh(self, device_type: str) -> DeviceMesh:
        """Return a mesh over the process group, with the dimensions of `sizes` (``dp_replicate`` where all are 1).

        Several dimensions have a name together where at least two of them are active: ``dp`` (``dp_replicate``,
        ``dp_shard``), ``dp_shard_cp`` and ``dp_cp``. A *device_mesh* of the script's own is returned as it is. Every
        process makes the same call; the Accelerator makes its own: `Accelerator.torch_device_mesh`.

        Args:
            device_type: ``cuda``, ``cpu``, ...

        Raises:
            TopologyError: the run has another number of processes than `total_size`.
        """
        if self.device_mesh is not None:
            return self.device_mesh
        import torch.distributed as dist
        from torch.distributed.device_mesh import init_device_mesh

        world_size = dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))
        if self.total_size != world_size:
            raise TopologyError(
                f"{self._shown()} makes {self.total_size} processes, but the run has {world_size}; change the "
                f"sizes, or launch {self.total_size}"
            )
        sizes = self.sizes or {"dp_replicate": 1}
        return join_dimensions(init_device_mesh(device_type, tuple(sizes.values()), mesh_dim_names=tuple(sizes)))

    def get_device_mesh(self, device_type: str | None = None) -> DeviceMesh:
        """Return the mesh of the run that has this layout, else one that `build_device_mesh` makes for *device_type*.

        Raises:
            ConfigError: no run has this layout yet, and *device_type* is missing.
        """
        from orc.runtime.core.context import peek_context

        ctx = peek_context()
        if ctx is not None and ctx.topology_chosen and self._laid_out(ctx):
            return ctx.topology.mesh
        if device_type is None and self.device_mesh is None:
            raise ConfigError(
                "no Accelerator has laid out the processes with this ParallelismConfig yet: make it first, or say for "
                "which devices the mesh is: get_device_mesh('cuda')"
            )
        return self.build_device_mesh(device_type or "")

    def lay_out(self, ctx: RunContext, *, sharded: bool) -> None:
        """Set the topology of *ctx*; nothing where every size is 1. *sharded*: something shards models.

        Raises:
            TopologyError: the sizes do not make the number of processes.
            ConfigError: *dp_shard_size* without something that shards.
        """
        if not self.sizes:
            return
        topology = ctx.set_topology(
            self.sizes if self.device_mesh is None else self.device_mesh, by="parallelism_config"
        )
        if topology.size("dp_shard") > 1 and not sharded:
            raise ConfigError(
                f"dp_shard_size={self.dp_shard_size} shards the model, and a FullyShardedDataParallelPlugin says how: "
                "pass fsdp_plugin too, or use dp_replicate_size for copies"
            )

    def _laid_out(self, ctx: RunContext) -> bool:
        return all(ctx.topology.size(name) == self.size(name) for name in DIMENSIONS)

    def _shown(self) -> str:
        return " x ".join(f"{name}_size {size}" for name, size in self.sizes.items()) or "every size 1"


def parallelism_of(given: Any, env: Mapping[str, str], plugin: Any = None) -> ParallelismConfig | None:
    """Return *given*, the layout of its older form *plugin*, or that of the variables where *env* turns them on.

    Raises:
        ConfigError: a variable cannot be used, or both *given* and *plugin* are there.
        TypeError: *given* or *plugin* is something else.
    """
    if plugin is not None:
        if not isinstance(plugin, TorchTensorParallelPlugin):
            raise TypeError(f"torch_tp_plugin is a {type(plugin).__name__}, not a TorchTensorParallelPlugin")
        if given is not None:
            raise ConfigError(
                "torch_tp_plugin and parallelism_config both say the layout; give parallelism_config alone"
            )
        better = "parallelism_config=ParallelismConfig(tp_size=...)"
        warnings.warn(f"Accelerator(torch_tp_plugin=...) is the older form of {better}", FutureWarning, stacklevel=4)
        mesh = plugin.torch_device_mesh
        return ParallelismConfig(device_mesh=mesh) if mesh is not None else ParallelismConfig(tp_size=plugin.tp_size)
    if given is None:
        return ParallelismConfig() if switched_on(env, USE_PARALLELISM_CONFIG) else None
    if not isinstance(given, ParallelismConfig):
        raise TypeError(f"parallelism_config is a {type(given).__name__}, not a ParallelismConfig")
    return given
