"""The documented option objects of an Accelerator: keyword handlers and plug-ins. Torch-free."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from orc.runtime.core.enums import DynamoBackend, StrEnum

if TYPE_CHECKING:
    import torch

_SCHEDULE = ("wait", "warmup", "active")
_SCHEDULE_OPTIONAL = ("repeat", "skip_first", "skip_first_wait")


class KwargsHandler:
    """Base of the option objects in ``kwargs_handlers``."""

    def to_dict(self) -> dict[str, Any]:
        """Return all options by name."""
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}  # type: ignore[arg-type]

    def to_kwargs(self) -> dict[str, Any]:
        """Return only the options that differ from their default."""
        default = type(self)().to_dict()
        return {name: value for name, value in self.to_dict().items() if value != default[name]}


class DDPCommunicationHookType(StrEnum):
    """Gradient compression of data-parallel training."""

    NO = "no"
    FP16 = "fp16"
    BF16 = "bf16"
    POWER_SGD = "power_sgd"
    BATCHED_POWER_SGD = "batched_power_sgd"


@dataclass
class AutocastKwargs(KwargsHandler):
    """Options of ``torch.autocast``."""

    enabled: bool = True
    cache_enabled: bool | None = None


@dataclass
class DistributedDataParallelKwargs(KwargsHandler):
    """Options of ``torch.nn.parallel.DistributedDataParallel``, and of gradient compression (``comm_*``).

    Attributes:
        comm_hook: how gradients travel: ``no``, ``fp16``, ``bf16``, ``power_sgd`` or ``batched_power_sgd``.
        comm_wrapper: cast what the hook gets to ``fp16`` or ``bf16``.
        comm_state_option: options of the hook's state, for PowerSGD those of torch's ``PowerSGDState``
            (``{"matrix_approximation_rank": 2}``).
    """

    dim: int = 0
    broadcast_buffers: bool = True
    bucket_cap_mb: int = 25
    find_unused_parameters: bool = False
    check_reduction: bool = False
    gradient_as_bucket_view: bool = False
    static_graph: bool = False
    comm_hook: DDPCommunicationHookType = DDPCommunicationHookType.NO
    comm_wrapper: DDPCommunicationHookType = DDPCommunicationHookType.NO
    comm_state_option: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.comm_hook = DDPCommunicationHookType(self.comm_hook)
        self.comm_wrapper = DDPCommunicationHookType(self.comm_wrapper)

    @property
    def compresses(self) -> bool:
        """`True` if gradients do not travel as they are."""
        return not self.comm_hook == self.comm_wrapper == DDPCommunicationHookType.NO


@dataclass
class GradScalerKwargs(KwargsHandler):
    """Options of ``torch.amp.GradScaler`` (fp16)."""

    init_scale: float = 65536.0
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    enabled: bool = True


@dataclass
class InitProcessGroupKwargs(KwargsHandler):
    """Options of ``torch.distributed.init_process_group``; ``timeout`` bounds every collective.

    ``backend`` ``nccl`` (the documented default) and `None` both mean what suits the device: gloo on a CPU.
    """

    backend: str | None = "nccl"
    init_method: str | None = None
    timeout: timedelta | None = None


@dataclass
class GradientAccumulationPlugin(KwargsHandler):
    """Options of gradient accumulation.

    Attributes:
        num_steps: batches per optimizer step; `None`: from ``gradient_accumulation_steps``, the environment, or 1.
        adjust_scheduler: the schedule was not shortened for accumulation: calls of ``scheduler.step()`` between two
            updates are counted (``_step_count``) although, like all calls between updates, they do not advance it.
        sync_with_dataloader: the last batch of a pass always synchronises and steps.
        sync_each_batch: synchronise on every batch although the optimizer steps later (less memory with sharding).
    """

    num_steps: int | None = None
    adjust_scheduler: bool = True
    sync_with_dataloader: bool = True
    sync_each_batch: bool = False

    def __post_init__(self) -> None:
        if self.num_steps is not None and self.num_steps < 1:
            raise ValueError(f"GradientAccumulationPlugin: num_steps must be at least 1, not {self.num_steps}")


@dataclass
class ProfileKwargs(KwargsHandler):
    """Options of ``torch.profiler.profile``.

    Attributes:
        activities: what is recorded: ``cpu``, ``cuda``, ``xpu``, ``mtia``, ``hpu``; by default all there is.
        schedule_option: when it is recorded, in calls of ``step()``: ``skip_first`` once, then cycles of ``wait``,
            ``warmup`` and ``active``; ``repeat`` cycles, 0 for as many as there are. Without it, everything.
        on_trace_ready: called with the profiler each time a trace is finished.
        record_shapes: shapes of the operators' inputs.
        profile_memory: memory taken and given back by operators.
        with_stack: source lines.
        with_flops: floating point operations of matrix products and convolutions.
        with_modules: the module that an operator was called from.
        output_trace_dir: where each process writes its trace; see `Accelerator.profile`.

    Raises:
        ValueError: an unknown activity, or a schedule with unknown or missing keys.
    """

    activities: list[str] | None = None
    schedule_option: dict[str, int] | None = None
    on_trace_ready: Callable[..., Any] | None = None
    record_shapes: bool = False
    profile_memory: bool = False
    with_stack: bool = False
    with_flops: bool = False
    with_modules: bool = False
    output_trace_dir: str | os.PathLike[str] | None = None

    def __post_init__(self) -> None:
        if self.schedule_option is not None:
            _check_schedule(self.schedule_option)

    def build(self, *ready: Callable[[torch.profiler.profile], Any]) -> torch.profiler.profile:
        """Return the profiler. *ready* are called when a trace is finished, before ``on_trace_ready``."""
        import torch

        callbacks = [*ready, *([] if self.on_trace_ready is None else [self.on_trace_ready])]

        def finished(profiler: torch.profiler.profile) -> None:
            for callback in callbacks:
                callback(profiler)

        return torch.profiler.profile(
            activities=None if self.activities is None else _activities(self.activities),
            schedule=None if self.schedule_option is None else torch.profiler.schedule(**self.schedule_option),
            on_trace_ready=finished if callbacks else None,
            record_shapes=self.record_shapes,
            profile_memory=self.profile_memory,
            with_stack=self.with_stack,
            with_flops=self.with_flops,
            with_modules=self.with_modules,
        )


@dataclass
class TorchDynamoPlugin(KwargsHandler):
    """Options of ``torch.compile`` for prepared models.

    Attributes:
        backend: a `DynamoBackend`; `None`: ``ORC_DYNAMO_BACKEND``, else none.
        mode: ``default``, ``reduce-overhead``, ``max-autotune``; as `torch.compile` has it.
        fullgraph: raise instead of breaking the graph.
        dynamic: compile for varying shapes.
        options: of the back end.
        disable: leave models as they are.
        use_regional_compilation: compile the repeated blocks of a model (modules of one class in a ``ModuleList``)
            instead of the whole: the compiler meets each kind of block once.
    """

    backend: DynamoBackend | str | None = None
    mode: str | None = None
    fullgraph: bool | None = None
    dynamic: bool | None = None
    options: Any = None
    disable: bool = False
    use_regional_compilation: bool | None = None

    def __post_init__(self) -> None:
        if self.backend is not None:
            try:
                self.backend = DynamoBackend(str(self.backend).upper())
            except ValueError:
                known = ", ".join(str(backend).lower() for backend in DynamoBackend)
                raise ValueError(f"TorchDynamoPlugin: backend {self.backend!r} is not one of {known}") from None

    def to_dict(self) -> dict[str, Any]:
        """Return all options by name, the back end as `torch.compile` spells it."""
        values = super().to_dict()
        return {**values, "backend": None if self.backend is None else str(self.backend).lower()}

    def to_kwargs(self) -> dict[str, Any]:
        """Return the arguments of `torch.compile` that differ from their default."""
        return {name: value for name, value in super().to_kwargs().items() if name != "use_regional_compilation"}


@dataclass
class DataLoaderConfiguration:
    """Options of prepared loaders; see `orc.runtime.prepare_data_loader` for the effect of each."""

    split_batches: bool = False
    dispatch_batches: bool | None = None
    even_batches: bool = True
    use_seedable_sampler: bool = False
    data_seed: int | None = None
    non_blocking: bool = False
    use_stateful_dataloader: bool = False
    prefetch_to_device: bool = True

    def __post_init__(self) -> None:
        if self.use_stateful_dataloader:
            from orc.runtime.core.availability import require_stateful_dataloader

            require_stateful_dataloader()


@dataclass
class ProjectConfiguration:
    """Folders of checkpoints and logs, and options for writing them.

    Attributes:
        project_dir: the project's folder.
        logging_dir: of trackers that write locally; ``project_dir`` when unset.
        automatic_checkpoint_naming: save to ``project_dir/checkpoints/checkpoint_<iteration>``.
        total_limit: how many of those to keep; all when unset.
        iteration: the number of the next one.
        save_on_each_node: write on every machine, not only on the first; checkpoints by `save_state` do so by
            themselves where machines share no directory.
    """

    project_dir: str | os.PathLike[str] | None = None
    logging_dir: str | os.PathLike[str] | None = None
    automatic_checkpoint_naming: bool = False
    total_limit: int | None = None
    iteration: int = 0
    save_on_each_node: bool = False

    def __post_init__(self) -> None:
        if self.total_limit is not None and self.total_limit < 1:
            raise ValueError(f"ProjectConfiguration: total_limit must be at least 1, not {self.total_limit}")
        self.set_directories(self.project_dir)

    def set_directories(self, project_dir: str | os.PathLike[str] | None = None) -> None:
        """Set the project's folder, and the logging folder where none was chosen.

        Args:
            project_dir: the folder.
        """
        self.project_dir = project_dir
        if self.logging_dir is None:
            self.logging_dir = project_dir


def _check_schedule(option: dict[str, int]) -> None:
    unknown = [key for key in option if key not in (*_SCHEDULE, *_SCHEDULE_OPTIONAL)]
    missing = [key for key in _SCHEDULE if key not in option]
    if unknown or missing:
        problem = f"unknown key {unknown[0]!r}" if unknown else f"{', '.join(missing)} missing"
        raise ValueError(
            f"ProfileKwargs: schedule_option: {problem}; it takes wait, warmup, active and, if wanted, "
            f"{', '.join(_SCHEDULE_OPTIONAL)}"
        )


def _activities(names: Sequence[Any]) -> list[Any]:
    from torch.profiler import ProfilerActivity

    known = {name.lower(): activity for name, activity in ProfilerActivity.__members__.items()}
    activities = []
    for name in names:
        activity = known.get(name.lower()) if isinstance(name, str) else name
        if not isinstance(activity, ProfilerActivity):
            raise ValueError(f"ProfileKwargs: unknown activity {name!r}; this torch has {', '.join(known)}")
        activities.append(activity)
    return list(dict.fromkeys(activities))


SaveHook = Callable[["list[torch.nn.Module]", "list[dict[str, torch.Tensor]]", str], None]
LoadHook = Callable[["list[torch.nn.Module]", str], None]
