"""`PipelineParallelConfig`: how a model is trained as a pipeline of stages. Torch-free."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from orc.runtime.core.config import ConfigError
from orc.runtime.core.parsing import nearest

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
