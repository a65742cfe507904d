"""The explicit context that every internal of the runtime takes: rank, device and configuration.

There is one process default, made on first use from the launch environment; `use_context` puts another one in its
place for a while (tests, simulations of other ranks). `PartialState` and its relatives are views of the current one.

The protocols below are the contract between the core (Accelerator, engine) and the parts that hold the state of a
training run (data, checkpoint, resilience).
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from orc.runtime.core.accumulation import GradientRecord
from orc.runtime.core.compute import TORCH, Compute
from orc.runtime.core.config import PRECISIONS, RuntimeConfig, check, resolve
from orc.runtime.core.enums import DistributedType
from orc.runtime.core.errors import ContextError, SettingConflict

if TYPE_CHECKING:
    from typing import Self  # newer than the oldest Python of a rank

    import torch
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    from orc.runtime.core.environment import LaunchEnvironment
    from orc.runtime.core.store import Store
    from orc.runtime.core.topology import Topology


class TrainingLibrary(Protocol):
    """Plug-in of a library that trains in torch's place: the settings of one run, for the engine that uses it.

    Attributes:
        engine: name of the library (`orc.runtime.core.libraries`).
        title: name of the library, for messages.
        distributed_type: kind of the run; empty where it is that of the device.
        last_is_main: the main process is the last one, not the first.
    """

    engine: ClassVar[str]
    title: ClassVar[str]
    distributed_type: ClassVar[str]
    last_is_main: ClassVar[bool]

    def apply_accumulation(self, gradient: GradientRecord) -> None:
        """Bring the library's own number of batches per optimizer step into force, where it has one."""
        ...

    def agreed(self) -> Mapping[str, Any]:
        """Return the settings, by name, that all ranks must have alike."""
        ...


@dataclass(repr=False, eq=False)
class _Settings:
    """The settings of a process, which change until an Accelerator has chosen."""

    config: RuntimeConfig
    fixed: bool = False  # an Accelerator has chosen
    debug: bool | None = None  # set by the script, in place of the configuration's
    forgotten: bool = False  # `_reset_state` was called: views of the context answer no more
    topology: Topology | None = None  # None: nobody has asked
    chosen: bool = False  # the topology was set, it is not just the default
    library: Any = None  # a TrainingLibrary, which then trains
    fsdp_plugin: Any = None  # models are sharded as it says


@dataclass(frozen=True, repr=False, eq=False)
class RunContext:
    """Process of a run: its ranks, device and process group.

    Ranks count from 0. ``backend`` and ``group`` are `None` in a single process, which needs no
    ``torch.distributed`` at all. ``env`` holds the platform's facts, among them the orc job.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node_rank: int
    device: torch.device
    backend: str | None
    env: LaunchEnvironment
    group: ProcessGroup | None = None
    store: Store | None = None  # where the ranks leave each other messages
    key: bytes = field(default=b"", repr=False)  # of the run; empty where ranks are threads of one process
    mirrored: bool = False  # a fake context without peers: they would have what this process has
    compute: Compute = TORCH  # what computes in this process
    gradient: GradientRecord = field(default_factory=GradientRecord)
    _settings: _Settings = field(default_factory=lambda: _Settings(resolve({}, os.environ)))

    def __reduce__(self) -> tuple[Callable[..., RunContext], tuple[Any, ...]]:
        # A pickle goes to a worker process: it says who this process is, not how to talk to its peers.
        facts = {name: getattr(self, name) for name in _FACTS}
        return _carried, (facts, self.gradient.settings(), self.config if self.configured else None)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self  # a copy of what belongs to a run belongs to the same run

    @property
    def config(self) -> RuntimeConfig:
        """The resolved configuration, with provenance."""
        return self._settings.config

    @property
    def configured(self) -> bool:
        """`True` once an Accelerator has chosen the settings."""
        return self._settings.fixed

    @property
    def debug(self) -> bool:
        """`True` if the operands of collectives are compared across the ranks first."""
        settings = self._settings
        return bool(settings.config.debug_mode) if settings.debug is None else settings.debug

    def set_debug(self, value: bool) -> None:
        """Set to *value* whether operands are compared from here on; on all ranks together."""
        self._settings.debug = bool(value)

    @property
    def forgotten(self) -> bool:
        """`True` once the state of this process was reset."""
        return self._settings.forgotten

    @property
    def library(self) -> Any:
        """The plug-in of a library that trains in torch's place, a `TrainingLibrary`; `None` where torch does."""
        return self._settings.library

    def library_of(self, engine: str) -> Any:
        """Return the plug-in of the library behind *engine*; `None` where another one trains, or torch."""
        library = self._settings.library
        return library if library is not None and library.engine == engine else None

    def use_library(self, plugin: TrainingLibrary) -> None:
        """Let a library train, as *plugin* sets."""
        self._settings.library = plugin

    @property
    def is_main_process(self) -> bool:
        """The process that speaks for the run to the script: rank 0, unless a library's results are on the last."""
        return self.is_last if self.library is not None and self.library.last_is_main else self.is_main

    @property
    def is_local_main_process(self) -> bool:
        """The same for its machine."""
        last = self.library is not None and self.library.last_is_main
        return self.local_rank == self.local_world_size - 1 if last else self.is_local_main

    @property
    def distributed(self) -> bool:
        """More than one process."""
        return self.world_size > 1

    @property
    def is_main(self) -> bool:
        """Rank 0."""
        return self.rank == 0

    @property
    def is_local_main(self) -> bool:
        """Rank 0 of its machine."""
        return self.local_rank == 0

    @property
    def is_last(self) -> bool:
        """The highest rank."""
        return self.rank == self.world_size - 1

    @property
    def distributed_type(self) -> DistributedType:
        """Kind of distributed run; a single process that computes through torch_xla is ``XLA``, too."""
        if self.library is not None and self.library.distributed_type:
            return DistributedType(self.library.distributed_type)
        if self.fsdp_plugin is not None:
            return DistributedType.FSDP
        return self.compute.distributed_type(self.world_size, self.device)

    @property
    def topology(self) -> Topology:
        """The layout of the ranks; until `set_topology`, all of them are replicas."""
        settings = self._settings
        if settings.topology is None:
            from orc.runtime.core.topology import Topology

            settings.topology = Topology(self)
        return settings.topology

    @property
    def topology_chosen(self) -> bool:
        """`True` once the layout has been set."""
        return self._settings.chosen

    def set_topology(self, layout: Mapping[str, int] | DeviceMesh, *, by: str) -> Topology:
        """Choose the layout of the ranks, once; return the topology.

        Args:
            layout: ranks along each named dimension, or a mesh of the script's own.
            by: who asks (``fsdp_plugin``), for messages.

        Raises:
            TopologyError: the ranks cannot be laid out so.
            SettingConflict: another layout was chosen before, or loaders were made already that give each rank another
                share of the data.
        """
        from orc.runtime.core.topology import Topology

        wanted = Topology(self, layout, by=by) if isinstance(layout, Mapping) else Topology(self, mesh=layout, by=by)
        settings = self._settings
        current = settings.topology
        if current is not None and settings.chosen:
            if not current.same(wanted):
                raise SettingConflict(
                    f"{by} lays the ranks out as {wanted}, but {current.by} has laid them out as {current} in this "
                    "process already; give one of them, or call AcceleratorState._reset_state()"
                )
            return current
        if current is not None and current.used and not current.shares_data_like(wanted):
            raise SettingConflict(
                f"{by} lays the ranks out as {wanted}, but loaders of this process already share the data out over "
                f"{current.data_size} ranks; ask for it before anything is prepared"
            )
        settings.topology, settings.chosen = wanted, True
        return wanted

    @functools.cached_property
    def control_device(self) -> torch.device:
        """Device that collects small control messages (sizes, flags): the CPU when the group has a backend for it."""
        import torch

        return torch.device("cpu") if self._carries_cpu_tensors else self.device

    @functools.cached_property
    def _carries_cpu_tensors(self) -> bool:
        import torch.distributed as dist

        return self.group is None or "cpu:" in str(dist.get_backend_config(self.group))

    @property
    def hosts_meet(self) -> bool:
        """`True` if `control_group` carries messages between the hosts, which then wait for no device to send them.

        The groups of a part of the run have none beside them.
        """
        import torch.distributed as dist

        return self._carries_cpu_tensors or (self.compute.collectives is None and self.group is dist.group.WORLD)

    def control_group(self, what: str) -> ProcessGroup:
        """Return a group of all processes that carries tensors on the CPU: the run's own, or one beside it.

        A group that the script opened with NCCL alone has no backend for them. The other is made at the first call,
        which all processes make together.

        Args:
            what: what needs the group, for the message.
        """
        group = self.require_group(what)
        return group if self._carries_cpu_tensors else self._beside

    @functools.cached_property
    def _beside(self) -> ProcessGroup:
        import torch.distributed as dist

        from orc.runtime.core.timeouts import asked_timeout

        group: ProcessGroup = dist.new_group(backend="gloo", timeout=asked_timeout())
        return group

    def require_group(self, what: str) -> ProcessGroup:
        """Return the process group. Raises `ContextError` when it was closed or never made.

        Args:
            what: what needs the group, for the message.
        """
        if self.group is None or not _is_open(self.group):
            raise ContextError(
                f"{what} needs the process group of {self.world_size} processes, but it is closed; "
                "call it before end_training(), which comes once, after a script's last training, and inside the "
                "process that was launched. AcceleratorState._reset_state(True) begins anew with the next Accelerator"
            )
        return self.group

    def barrier(self) -> None:
        """Wait until every process of the run has come here; nothing with one process."""
        if self.world_size == 1:
            return
        import torch.distributed as dist

        group = self.require_group("a barrier")
        dist.barrier(group, device_ids=[self.device.index] if self.backend == "nccl" else None)

    def configure(self, arguments: Mapping[str, Any]) -> RuntimeConfig:
        """Resolve the configuration with a script's *arguments* (`None`: not given), once.

        Returns:
            The configuration, which every later call returns too.

        Raises:
            ConfigError: an unknown key or a bad value.
            SettingConflict: it is resolved already and an argument contradicts it.
        """
        given = {name: value for name, value in arguments.items() if value is not None}
        if not self._settings.fixed:
            self._settings.config = resolve(given, os.environ)
            self._settings.fixed = True
            return self.config
        for name, value in given.items():
            wanted, current = check(name, value), getattr(self.config, name)
            if wanted != current:
                raise SettingConflict(
                    f"{name} is {current!r} in this process already (from {self.config.source(name)}) and cannot "
                    f"become {wanted!r}: pass it to the first Accelerator, or call AcceleratorState._reset_state()"
                )
        return self.config

    @property
    def fsdp_plugin(self) -> Any:
        """Options of sharded data parallelism; `None` where models are not sharded."""
        return self._settings.fsdp_plugin

    def shard(self, plugin: Any) -> None:
        """Shard models as *plugin* sets, over all ranks unless a layout was chosen already.

        Raises:
            ContextError: the ranks cannot be laid out so.
        """
        from orc.runtime.core.topology import sharded

        if self.library is not None:
            raise ContextError(f"fsdp_plugin and {self.library.title} are two ways to train one model; choose one")
        if not self._settings.chosen:
            self.set_topology(sharded(self, plugin.hybrid), by="fsdp_plugin")
        if half := PRECISIONS[self.config.mixed_precision]:
            plugin.set_mixed_precision(half)
        self._settings.fsdp_plugin = plugin

    @classmethod
    def fake(cls, rank: int = 0, world_size: int = 1, **options: Any) -> RunContext:
        """Return the context of one rank of a run that does not exist, for tests; see `testing.fake_context`.

        Args:
            world_size: the number of ranks of that run.
            options: further fields of the context.
        """
        from orc.runtime.testing import fake_context

        return fake_context(rank, world_size, **options)

    def unconfigure(self) -> None:
        """Let the next Accelerator choose its settings again; the process group stays."""
        self._settings.config = resolve({}, os.environ)
        self._settings.fixed, self._settings.debug = False, None
        self._settings.topology, self._settings.chosen = None, False
        self._settings.library = self._settings.fsdp_plugin = None
        self.gradient.reset()


_FACTS = ("rank", "world_size", "local_rank", "local_world_size", "node_rank", "device", "backend", "env", "compute")


def _carried(facts: dict[str, Any], accumulation: dict[str, Any], config: RuntimeConfig | None) -> RunContext:
    """The context of the process that unpickles, or a picture of the one that pickled, without its process group."""
    here = peek_context()
    if here is not None:
        return here
    picture = RunContext(**facts)
    for name, value in accumulation.items():
        setattr(picture.gradient, name, value)
    if config is not None:
        picture._settings.config, picture._settings.fixed = config, True
    return picture


def _is_open(group: ProcessGroup) -> bool:
    import torch.distributed as dist

    if getattr(group, "is_open", False):  # an in-memory group, which torch.distributed does not know
        return True
    return dist.is_initialized() and (group is dist.group.WORLD or dist.get_rank(group) >= 0)


_override: ContextVar[RunContext | None] = ContextVar("orc_run_context", default=None)
_default: RunContext | None = None


def peek_context() -> RunContext | None:
    """The current context if there is one; never makes one."""
    return _override.get() or _default


def current_context(**options: Any) -> RunContext:
    """Return the current context; the first call makes it, of *options* (see `process_group.open_context`).

    Raises:
        ContextError: *options* have ``cpu``, and the process computes on another device already.
    """
    global _default
    context = peek_context()
    if context is None:
        from orc.runtime.launch.process_group import open_context

        context = _default = open_context(os.environ, **options)
    if options.get("cpu") and context.device.type != "cpu":
        raise ContextError(
            f"cpu=True was asked for, but this process already computes on {context.device}; ask for it first, or set "
            "ORC_USE_CPU=1"
        )
    return context


@contextlib.contextmanager
def use_context(context: RunContext) -> Iterator[RunContext]:
    """Make *context* the current one inside the block."""
    token = _override.set(context)
    try:
        yield context
    finally:
        _override.reset(token)


def reset_default() -> None:
    """Forget the process default; the next use makes a new one. An open process group stays and is used again."""
    global _default
    if _default is not None:
        _default._settings.forgotten = True
    _default = None
