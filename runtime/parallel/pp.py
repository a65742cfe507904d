"""Pipeline parallelism: each process trains the layers of one stage or several, on one micro-batch after the other."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from orc.runtime.core.config import ConfigError
from orc.runtime.core.parsing import nearest
from orc.runtime.parallel.base import Parallelizer, Request

if TYPE_CHECKING:
    from torch import nn

    from orc.runtime.core.context import RunContext


SCHEDULES = ("gpipe", "1f1b", "interleaved_1f1b")


@dataclass
class PipelineParallelConfig:
    """Options of pipeline parallelism, for ``ParallelismConfig(pp_size=..., pp_handler=...)``.

    Attributes:
        loss_fn: ``loss_fn(output, target)`` of a micro-batch, a scalar.
        example_args: positional inputs of one batch, with which the model is traced. Later batches have as many rows or
            fewer.
        example_kwargs: named inputs of the same batch.
        num_microbatches: parts into which a batch is cut; one for each stage by default.
        split_points: names of the modules that begin the second and later stages, or ``"auto"``: stages of about equal
            memory.
        no_split_module_classes: names of classes that ``"auto"`` leaves whole; the model's ``_no_split_modules`` by
            default.
        schedule: ``"gpipe"`` (Huang et al., arXiv:1811.06965, section 2), ``"1f1b"`` or ``"interleaved_1f1b"``
            (Narayanan et al., arXiv:2104.04473, sections 2.2.1 and 2.2.2).
        stages_per_process: stages that each process runs; more than one with ``"interleaved_1f1b"`` alone, which has 2
            by default.
        loss_reduction: ``"mean"`` if *loss_fn* averages over the rows that it gets, ``"sum"`` if it adds them up.
        activation_checkpointing: compute the activations of a stage again in backward instead of keeping them.

    Raises:
        ConfigError: an option has a value that there is not.
    """

    loss_fn: Callable[[Any, Any], Any] | None = None
    example_args: Sequence[Any] = ()
    example_kwargs: Mapping[str, Any] = field(default_factory=dict)
    num_microbatches: int | None = None
    split_points: str | Sequence[str] = "auto"
    no_split_module_classes: str | Sequence[str] | None = None
    schedule: str = "1f1b"
    stages_per_process: int | None = None
    loss_reduction: str = "mean"
    activation_checkpointing: bool = False

    def __post_init__(self) -> None:
        if not callable(self.loss_fn):
            raise ConfigError(
                "PipelineParallelConfig needs loss_fn: a function of a micro-batch's output and target that returns a "
                "scalar; forward and backward are one step of a pipeline, so that it computes the loss by itself"
            )
        for name, known in (("schedule", SCHEDULES), ("loss_reduction", ("mean", "sum"))):
            value = getattr(self, name)
            if value not in known:
                raise ConfigError(f"{name}={value!r}: choose from {', '.join(known)}{nearest(str(value), known)}")
        interleaved = self.schedule == "interleaved_1f1b"
        if self.stages_per_process is None:
            self.stages_per_process = 2 if interleaved else 1
        for name in ("num_microbatches", "stages_per_process"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise ConfigError(f"{name}={value!r}: expected a whole number, at least 1")
        if interleaved != (self.stages_per_process > 1):
            raise ConfigError(
                f"stages_per_process={self.stages_per_process} with schedule={self.schedule!r}: interleaved_1f1b has "
                "several stages on each process, the other schedules have one"
            )

    def microbatches(self, processes: int) -> int:
        """Return the parts of a batch in a pipeline over so many *processes*."""
        return self.num_microbatches or processes * (self.stages_per_process or 1)


class PipelineParallel(Parallelizer):
    """Stages over the dimension ``pp`` of the topology; a model that computes its loss by itself where it is 1."""

    name = "pp"
    order = 50
    serves: tuple[str, ...] = ("pp",)
    conflicts: tuple[str, ...] = ("xla",)
    places_parameters = True

    def wanted(self, model: nn.Module, ctx: RunContext, request: Request) -> bool:
        """For a model that is trained."""
        return not request.evaluation and next(model.parameters(), None) is not None

    def requires(self, ctx: RunContext) -> str | None:
        """No other way to share the work of one batch, and nothing that scales losses."""
        if not ctx.compute.device_in_group:
            return "the process group does not reach the tensors of this device"
        if ctx.topology.size("pp") == 1:
            return None
        if others := [name for name in ("tp", "cp", "sp") if ctx.topology.size(name) > 1]:
            return (
                f"{' and '.join(others)} cannot be combined with pp: stages are traced as one process computes them; "
                "combine pp with dp_replicate or dp_shard"
            )
        if importlib.util.find_spec("torch.distributed.pipelining") is None:
            return "this torch has no torch.distributed.pipelining; install 2.4 or newer"
        if ctx.config.mixed_precision == "fp8":
            return (
                "layers that compute in fp8 cannot be traced into stages; share the work by dp_shard_size, cp_size or "
                "sp_size, or use bf16"
            )
        if ctx.config.mixed_precision == "fp16":
            return "fp16 scales losses, and a pipeline has run backward when its loss is known; use bf16"
        return "the process group is not open" if ctx.group is None else None

    def apply(self, model: nn.Module, ctx: RunContext, request: Request) -> nn.Module:
        """Cut *model*, and keep the stages of this process."""
        from orc.runtime.parallel.pipeline_model import PipelineModel, into_stages
        from orc.runtime.parallel.replacements import move

        config: Any = request.options.get("pp")
        if config is None:
            raise ConfigError(
                f"pp_size={ctx.topology.size('pp')} needs pp_handler=PipelineParallelConfig(loss_fn=..., "
                "example_args=...) in the ParallelismConfig: a pipeline computes the loss by itself"
            )
        if not isinstance(config, PipelineParallelConfig):
            raise TypeError(f"pp_handler is a {type(config).__name__}, not a PipelineParallelConfig")
        if ctx.topology.size("pp") > 1:
            return into_stages(model, config, ctx, place=request.placement)
        if request.placement and request.options.get("fsdp") is None:  # which places the parameters in pieces
            model = move(model, ctx.device)
        return PipelineModel(model, config, None)


PARALLELIZER = PipelineParallel()
