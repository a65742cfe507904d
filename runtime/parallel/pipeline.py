"""The options of a pipeline that trains, and the pipeline for inference.

Each process runs a stage of the model, on one micro-batch after the other.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from orc.runtime.collectives.collectives import broadcast
from orc.runtime.collectives.objects import all_gather_pickled
from orc.runtime.collectives.tree import send_to_device
from orc.runtime.core.config import ConfigError
from orc.runtime.core.context import RunContext, current_context
from orc.runtime.core.errors import ContextError, OrcRuntimeError
from orc.runtime.core.parsing import nearest
from orc.runtime.parallel.call_form import CallForm
from orc.runtime.parallel.partition import partition_of
from orc.runtime.parallel.stages import Traced, outputs_of, trace

Model = TypeVar("Model", bound=nn.Module)


_SCHEDULES = ("gpipe", "1f1b", "interleaved_1f1b")


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
        for name, known in (("schedule", _SCHEDULES), ("loss_reduction", ("mean", "sum"))):
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


def prepare_pippy(
    model: Model,
    split_points: str | Sequence[str] = "auto",
    no_split_module_classes: str | Sequence[str] | None = None,
    example_args: Sequence[Any] = (),
    example_kwargs: Mapping[str, Any] | None = None,
    num_chunks: int | None = None,
    gather_output: bool = False,
) -> Model:
    """Return *model* with a forward that runs as a pipeline over all processes, for inference.

    Every process calls this with the same model and example, and later calls the model; the inputs of the first process
    count. The example is traced: later inputs have its shapes and dtypes, but any number of rows (a batch that does not
    fill its micro-batches is padded by its last row, and the padding is cut off the output). With one process the
    model runs as it is, without gradients.

    Args:
        model: the model, on the CPU; it is put into evaluation mode. Each process moves its own stage to its device.
        split_points: names of the modules that begin the second and later stages, one stage for each process; or
            ``"auto"``: where a device map over as many equal devices begins the next one.
        no_split_module_classes: names of classes that ``"auto"`` leaves whole; the model's ``_no_split_modules`` by
            default.
        example_args: positional inputs of one batch. Tensors with as many rows as the first one are cut into
            micro-batches, others go whole with each of them.
        example_kwargs: named inputs of the same batch.
        num_chunks: micro-batches that a batch of the example's size is cut into; one for each process by default. 1:
            one process works at a time.
        gather_output: return the output on all processes, by one more broadcast; otherwise the last one has it, and the
            others get `None`.

    Raises:
        ValueError: the split points, the example or a later input do not fit. On every process.
        OrcRuntimeError: the model cannot be traced, or failed on another process. On every process.
        ContextError: the model is a pipeline already.
    """
    ctx = current_context()
    run: Callable[..., Any]
    if ctx.world_size == 1:
        refuse(model, "prepare_pippy")
        run, points = torch.no_grad()(model.eval().forward), []
    else:
        pipeline, error = None, None
        try:
            refuse(model, "prepare_pippy")
            chunks = ctx.world_size if num_chunks is None else num_chunks
            if chunks < 1:
                raise ValueError(f"num_chunks is {chunks}; a batch is cut into 1 or more")
            form = CallForm(model.eval(), example_args, example_kwargs or {}, chunks)
            traced = trace(model, split_points, no_split_module_classes, form, ctx.world_size)
            pipeline = Pipeline(traced, form, ctx, gather_output)
        except Exception as raised:  # noqa: BLE001 - raised below, on every process
            error = raised
        check_alike(
            "prepare_pippy", ctx, error, pipeline and (pipeline.points, pipeline.form.names, pipeline.form.rows)
        )
        assert pipeline is not None  # otherwise there was an error
        run, points = _like(model.forward, pipeline), pipeline.points
    object.__setattr__(model, "forward", run)
    object.__setattr__(model, "hf_split_points", points)
    return model


def refuse(model: nn.Module, what: str) -> None:
    """Refuse a *model* that no pipeline can be made of; *what* is for messages.

    Raises:
        ContextError: it is a pipeline already.
        ValueError: weights are on the meta device.
    """
    if partition_of(model) is not None or hasattr(model, "hf_split_points"):
        raise ContextError(f"{what}: this model is a pipeline already; prepare a new copy of it")
    if empty := next((name for name, weight in model.named_parameters() if weight.is_meta), None):
        raise ValueError(f"{what}: {empty} is on the meta device; load the weights, on the CPU, first")


def _like(forward: Callable[..., Any], pipeline: Pipeline) -> Callable[..., Any]:
    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        return pipeline(*args, **kwargs)

    return run


def gather_or_raise(what: str, ctx: RunContext, error: Exception | None, facts: Any = None) -> list[Any]:
    """Return the *facts* of every process, or raise on all of them the *error* of the first one that has one."""
    text = None if error is None else f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
    told = all_gather_pickled((text, facts), ctx, what)
    for rank, (failure, _) in enumerate(told):
        if error is not None and failure == text:
            raise error
        if failure is not None:  # what went wrong here may be a consequence
            raise OrcRuntimeError(f"{what} failed on process {rank}: {failure}") from error
    return [fact for _, fact in told]


def check_alike(what: str, ctx: RunContext, error: Exception | None, facts: Any) -> None:
    """Raise on every process the *error* of one, or `ValueError` where *facts* about what they split are not alike."""
    told = gather_or_raise(what, ctx, error, facts)
    if different := [rank for rank, other in enumerate(told) if other != told[0]]:
        raise ValueError(
            f"{what}: process {different[0]} splits another model, or with another example, than process 0: "
            f"{told[different[0]]} and {told[0]}"
        )


class Pipeline:
    """Stage of this process, and the calls that run it together with those of the others."""

    def __init__(self, traced: Traced, form: CallForm, ctx: RunContext, gather_output: bool) -> None:
        self.form, self.points, self.used = form, traced.points, traced.used
        self.ctx, self.gather_output = ctx, gather_output
        self.stage = traced.pipe.build_stage(ctx.rank, ctx.device, ctx.require_group("prepare_pippy"))
        self.error: Exception | None = None
        self._shield(self.stage.submod)
        self._schedule: Any = None
        self._chunks = 0

    def _shield(self, stage: Any) -> None:
        """Let *stage* go on with zeros when it has failed: its neighbours wait for what it sends."""
        forward = stage.forward
        sent = [node.meta["val"] for node in outputs_of(stage.graph)]

        def shielded(*args: Any, **kwargs: Any) -> Any:
            if self.error is None:
                try:
                    return forward(*args, **kwargs)
                except Exception as error:  # noqa: BLE001 - raised when all have finished
                    self.error = error
            return tuple(torch.zeros(val.shape, dtype=val.dtype, device=self.ctx.device) for val in sent)

        stage.forward = shielded

    @torch.no_grad()
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run one batch through all stages; the inputs of the first process count."""
        ctx, rows, self.error = self.ctx, 0, None
        tensors: list[Tensor] = []
        if self.stage.is_first:
            try:
                tensors, rows = self.form.inputs(args, kwargs)
                tensors = send_to_device([tensors[index] for index in self.used], ctx.device)
            except Exception as error:  # noqa: BLE001 - raised below, on every process
                self.error = error
        rows = gather_or_raise("the call of a pipeline", ctx, self.error, rows)[0]
        output = self._run(-(-rows // self.form.rows), tensors)
        leaves = self.form.leaves(output, rows)
        sent = [(leaf.shape, leaf.dtype) for leaf in leaves]
        shapes = gather_or_raise("a stage of a pipeline", ctx, self.error, sent)[-1]
        if not self.gather_output:
            return self.form.result(leaves) if self.stage.is_last else None
        if not self.stage.is_last:
            leaves = [torch.empty(shape, dtype=dtype, device=ctx.device) for shape, dtype in shapes]
        return self.form.result(broadcast(leaves, ctx.world_size - 1, ctx=ctx))

    def _run(self, chunks: int, tensors: Sequence[Tensor]) -> Any:
        from torch.distributed.pipelining import ScheduleGPipe

        if chunks != self._chunks:
            self._schedule, self._chunks = ScheduleGPipe(self.stage, chunks), chunks
        output = self._schedule.step(*tensors)
        self.stage.clear_runtime_states()  # holds every activation that was sent
        return output
