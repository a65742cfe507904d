"""The documented option objects of an Accelerator: keyword handlers and plug-ins. Torch-free."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from orc.runtime.core.enums import DynamoBackend, StrEnum

if TYPE_CHECKING:
    import torch


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


SaveHook = Callable[["list[torch.nn.Module]", "list[dict[str, torch.Tensor]]", str], None]
LoadHook = Callable[["list[torch.nn.Module]", str], None]
