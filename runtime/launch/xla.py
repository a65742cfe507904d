"""The one place that talks to torch_xla: device, meeting, steps, collectives, copies to the host.

torch_xla only traces what a script does; a *step* (`Xla.mark`) runs what was traced. Two rules follow. Between two
steps all processes must trace the same collectives, and whatever only some processes look at must have been run before:
so every collective here is a step of its own. What is to be saved is brought up to date on all processes, too.

torch_xla has to be made for the torch that is installed (2.9 for 2.9); it is imported when it is needed, and never
where it is not asked for.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

from orc.runtime.core.compute import Compute, Leaves
from orc.runtime.core.enums import DistributedType
from orc.runtime.core.environment import LaunchEnvironment
from orc.runtime.core.errors import LaunchError
from orc.runtime.launch.device import may_be_xla

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn
    from torch.optim import Optimizer

T = TypeVar("T")

INIT_METHOD = "xla://"
_HOW = (
    "one process for each chip needs `launcher: xla` in the job file or torchrun on every machine, as many processes "
    "as there are chips, and no SPMD"
)


@dataclass(frozen=True, repr=False, eq=False)
class Modules:
    """The parts of torch_xla that are used here."""

    root: Any  # torch_xla
    model: Any  # torch_xla.core.xla_model
    runtime: Any  # torch_xla.runtime


def wanted(env: Mapping[str, str]) -> bool:
    """Return whether this process is to compute through torch_xla.

    It is where ``PJRT_DEVICE`` says so, and on the machine of a TPU that has torch_xla.

    Raises:
        LaunchError: ``PJRT_DEVICE`` asks for it, but torch_xla is not installed.
    """
    from orc.runtime.core.availability import is_torch_xla_available

    if not may_be_xla(env):
        return False
    if is_torch_xla_available():
        return True
    if asked := env.get("PJRT_DEVICE"):
        raise LaunchError(
            f"PJRT_DEVICE={asked} asks for PyTorch/XLA, but torch_xla is not installed in the Python of this process; "
            "install the torch_xla that was made for the torch there, or unset PJRT_DEVICE"
        )
    return False


def load() -> Modules:
    """torch_xla. Raises `LaunchError` when it does not fit the torch that is installed."""
    modules = Modules(_imported("torch_xla"), xla_model(), _imported("torch_xla.runtime"))
    _imported("torch_xla.distributed.xla_backend")  # it knows how to meet at xla://
    return modules


def launch(function: Callable[..., Any], args: tuple[Any, ...] = (), *, one: bool = False) -> None:
    """Run ``function(*args)`` in one process for each chip of this machine, forked from this one; with *one*, in it."""
    load().root.launch(_without_index, args=(function, *args), start_method="fork", debug_single_process=one)


def _without_index(_index: int, function: Callable[..., Any], *args: Any) -> None:
    function(*args)


def xla_model() -> Any:
    """``torch_xla.core.xla_model``. Raises `LaunchError` as `load` does."""
    return _imported("torch_xla.core.xla_model")


def _imported(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except (ImportError, OSError) as error:
        from importlib import metadata

        import torch

        try:
            version = metadata.version("torch_xla")
        except metadata.PackageNotFoundError:
            version = "of unknown version"
        raise LaunchError(
            f"torch_xla {version} cannot be loaded beside torch {torch.__version__}: {error}; both need the same major "
            "and minor version (torch_xla 2.9 with torch 2.9)"
        ) from error


def open_xla(
    launch: LaunchEnvironment, *, timeout: timedelta | None = None, init_method: str | None = None
) -> tuple[Xla, LaunchEnvironment]:
    """Meet the peers and take this process's device; what comes back is the place that torch_xla gives it.

    Processes that ``torch_xla.launch`` has started have no variables of a launch: torch_xla knows who they are.
    Control messages travel over gloo, tensors through XLA.

    Raises:
        LaunchError: torch_xla cannot work here, or counts other processes than were launched.
    """
    import torch.distributed as dist

    modules = load()
    runtime = modules.runtime
    if runtime.is_spmd():
        raise LaunchError(
            "SPMD mode of torch_xla is on: there one process sees the devices of all, and the script shards by itself; "
            "orc.runtime trains with one process per chip (launcher: xla without processes: host)"
        )
    kind = runtime.device_type()
    if launch.world_size > 1 and kind == "CPU":
        raise LaunchError(
            f"{launch.world_size} processes were launched with PJRT_DEVICE=CPU: on the CPU torch_xla does not add up "
            "what several processes have, and says nothing; start one process, or train without torch_xla "
            "(ORC_USE_CPU=1)"
        )
    several = launch.world_size > 1 if launch.platform != "single" else runtime.world_size() > 1
    if several and not dist.is_initialized():
        options: dict[str, Any] = {"timeout": timeout} if timeout is not None else {}
        try:
            # It sets torch_xla up as well, and has to come before the device is touched.
            dist.init_process_group("gloo", init_method=init_method or INIT_METHOD, **options)
        except (dist.DistError, RuntimeError, ValueError) as error:
            raise LaunchError(
                f"rank {launch.rank} of {launch.world_size} could not join its peers over torch_xla: {error}; {_HOW}"
            ) from error
    if dist.is_initialized() and "gloo" not in str(dist.get_backend_config()):
        raise LaunchError(
            f"the script has opened a process group of backend {dist.get_backend()}: orc.runtime sends control "
            'messages over gloo; let the Accelerator open it, or use init_process_group("gloo", init_method="xla://")'
        )
    size = int(runtime.world_size())
    counts = {"were launched": launch.world_size} if launch.platform != "single" else {}
    if dist.is_initialized():
        counts["have met"] = dist.get_world_size()
    for what, count in counts.items():
        if count != size:
            raise LaunchError(
                f"torch_xla's world is of size {size}, but {count} process(es) {what}: what each of them has would not "
                f"be added up; {_HOW}"
            )
    return Xla(modules), _place(launch, runtime, size)


def _place(launch: LaunchEnvironment, runtime: Any, size: int) -> LaunchEnvironment:
    """*launch* with XLA's ordinal as the rank: collectives are in that order."""
    rank = int(runtime.global_ordinal())
    if launch.platform != "single":
        return replace(launch, rank=rank)
    local = min(int(runtime.local_process_count()), size)
    return replace(
        launch,
        rank=rank,
        world_size=size,
        local_rank=int(runtime.local_ordinal()) % local,
        local_world_size=local,
        node_rank=int(runtime.host_index()),
    )


class Xla(Compute):
    """torch_xla, as one process uses it. All methods but `broadcast_parameters` work with any number of processes."""

    library = "torch_xla"
    engine = replicas = "xla"
    device_in_group = False

    def __init__(self, modules: Modules) -> None:
        self._root, self._model, self._runtime = modules.root, modules.model, modules.runtime
        self.device: torch.device = self._root.device()
        self.world_size = int(self._runtime.world_size())
        self._reduced: set[int] = set()  # optimizers whose gradients are averaged, and that have not stepped since
        self.collectives = self
        self._mark: Callable[[], None] = getattr(self._root, "sync", None) or self._model.mark_step

    @property
    def kind(self) -> str:
        """Type of the device that computes, such as ``TPU`` or ``CPU``."""
        return str(self._runtime.device_type())

    def distributed_type(self, world_size: int, device: torch.device) -> DistributedType:
        """``XLA``, for a single process too."""
        return DistributedType.XLA

    def supports_bf16(self, ignore_tpu: bool = False) -> bool:
        """On a TPU always, unless it is to be ignored."""
        return not ignore_tpu if self.kind == "TPU" else super().supports_bf16(ignore_tpu)

    def mark(self) -> None:
        """Run what was traced so far."""
        self._mark()

    # training

    def choose_precision(self, mixed_precision: str, downcast: bool) -> None:
        """Tell torch_xla how floating-point numbers are kept; before the first tensor is made.

        With bf16 the documented variables: ``XLA_USE_BF16`` keeps float and double as bfloat16, ``XLA_DOWNCAST_BF16``
        (*downcast*) float as bfloat16 and double as float32. torch_xla reads nothing else.

        Raises:
            LaunchError: fp16 on a TPU, which has none.
        """
        if mixed_precision == "fp16":
            raise LaunchError(f"mixed_precision=fp16 is not for {self.kind} over torch_xla; choose bf16 or no")
        if mixed_precision == "bf16":
            os.environ["XLA_DOWNCAST_BF16" if downcast else "XLA_USE_BF16"] = "1"
            os.environ["XLA_USE_BF16" if downcast else "XLA_DOWNCAST_BF16"] = "0"

    def broadcast_parameters(self, model: nn.Module) -> None:
        """Give all processes the parameters and buffers of rank 0."""
        self._model.broadcast_master_param(model)

    def reduce_gradients(self, optimizers: Sequence[Optimizer]) -> None:
        """Average the gradients of *optimizers* over the processes, once until they step."""
        for optimizer in optimizers:
            if id(optimizer) not in self._reduced:
                self._reduced.add(id(optimizer))
                self._model.reduce_gradients(optimizer)

    def step(self, optimizer: Optimizer, closure: Callable[[], Any] | None, *, barrier: bool) -> Any:
        """Average the gradients, update the parameters and, with *barrier*, run it all."""
        options = {} if closure is None else {"closure": closure}
        if id(optimizer) not in self._reduced:
            return self._model.optimizer_step(optimizer, barrier=barrier, optimizer_args=options)
        self._reduced.discard(id(optimizer))
        result = optimizer.step(**options)
        if barrier:
            self.mark()
        return result

    def forget(self, optimizer: Optimizer) -> None:
        """The gradients of *optimizer* are new ones."""
        self._reduced.discard(id(optimizer))

    # collectives, see `Carrier`

    def gather(self, leaves: Leaves) -> Leaves:
        """Each of *leaves* of all processes, joined along the first dimension."""
        full = [leaf for leaf in leaves if leaf.numel()]
        rows = [_numbers(leaf).reshape(leaf.shape or (1,)) for leaf in full]
        gathered = iter(self._apart(lambda: [self._model.all_gather(row, dim=0) for row in rows]))
        return [
            next(gathered).to(leaf.dtype)
            if leaf.numel()
            else leaf.new_empty((self.world_size * leaf.shape[0], *leaf.shape[1:]))
            for leaf in leaves
        ]

    def reduce(self, leaves: Leaves, reduction: str, scale: float) -> Leaves:
        """The sum or mean over the processes of each of *leaves*, times *scale*; they stay as they are."""
        numbers = [_numbers(leaf) for leaf in leaves]
        scaled = [tensor if tensor.is_floating_point() or scale == 1 else tensor.float() for tensor in numbers]
        totals = self._apart(lambda: [self._model.all_reduce("sum", tensor, scale=scale) for tensor in scaled])
        return [total / self.world_size for total in totals] if reduction == "mean" else totals

    def broadcast(self, leaves: Leaves, source: int) -> Leaves:
        """*leaves*, filled in place with those of rank *source*."""
        self._apart(lambda: self._model.collective_broadcast(list(leaves), root_ordinal=source))
        return leaves

    def _apart(self, collective: Callable[[], T]) -> T:
        # Processes may have traced different things before, and only some may look at the result.
        self.mark()
        result = collective()
        self.mark()
        return result

    # state

    def to_cpu(self, data: Any) -> Any:
        """*data* (any nesting) with copies of its tensors in host memory; call it on all processes.

        What is pending runs first: a process that copied alone would run other collectives than its peers.
        """
        import torch

        from orc.runtime.collectives.tree import recursively_apply

        def copy(tensor: Tensor) -> Tensor:
            return tensor.detach().to("cpu")

        self.mark()
        return recursively_apply(copy, data, test_type=lambda leaf: isinstance(leaf, torch.Tensor))

    def rng_state(self) -> int:
        """The state of the device's random number generator."""
        return int(self._model.get_rng_state())

    def set_rng_state(self, state: int) -> None:
        """Put the device's random number generator there."""
        self._model.set_rng_state(state)


def _numbers(leaf: Tensor) -> Tensor:
    # XLA's collectives are for numbers; sums of truth values stay counts, as everywhere.
    import torch

    return leaf.to(torch.int64) if leaf.dtype == torch.bool else leaf
