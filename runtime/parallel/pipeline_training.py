"""Models that are cut into the stages of a pipeline that trains: each process keeps its own stages alone.

A model is traced in training and in evaluation. What is left of it runs the traced stages with the parameters that it
has at that moment, because sharding exchanges them between two calls.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from orc.runtime.core.context import RunContext
from orc.runtime.parallel.call_form import CallForm
from orc.runtime.parallel.partition import Partition, keep_only
from orc.runtime.parallel.pipeline import PipelineParallelConfig, refuse
from orc.runtime.parallel.precision.forward import unwrap_forward
from orc.runtime.parallel.replacements import named_parameters, note_stages
from orc.runtime.parallel.stages import Traced, outputs_of, trace

_PREFIX = "model."  # of names in the trace


class Cut:
    """Model that is traced and cut, and where its stages and parameters belong.

    Args:
        model: the whole model, on the CPU.
        config: how.
        ctx: the run.

    Attributes:
        form: of the calls.
        chunks: micro-batches of a batch.
        used: places of the inputs that the first stage takes.
        outputs: examples of the tensors in the output.
        partition: who has which parameters.
        facts: what all processes must have alike.
        stages: torch's stages of this process by number; for training and for evaluation each has its own buffers.

    Raises:
        ValueError: the example, the split points or the model do not fit.
        OrcRuntimeError: the model cannot be traced.
    """

    def __init__(self, model: nn.Module, config: PipelineParallelConfig, ctx: RunContext) -> None:
        refuse(model, "prepare")
        topology = ctx.topology
        size, place, group = topology.size("pp"), topology.place("pp"), topology.group("pp")
        count = size * (config.stages_per_process or 1)
        self.chunks = config.microbatches(size)
        self.form = CallForm(model, config.example_args, config.example_kwargs, self.chunks)
        self._check(config, count)
        traced = self._trace_modes(model, config, count, "process" if count == size else "stages")
        names = [_names(traced.values(), number) for number in range(count)]
        self.used = traced[True].used
        self.facts = (traced[True].points, self.form.names, self.form.rows, sorted(model.state_dict()), self.chunks)
        ranks = dataclasses.replace(ctx, rank=place, world_size=size, group=group, store=None)
        self.partition, self._kept = _placed(model, names, ranks)
        last = traced[True].pipe.get_stage_module(count - 1).graph
        self.outputs = [node.meta["val"] for node in outputs_of(last)]
        own = range(place, count, size)
        self.stages: dict[bool, dict[int, Any]] = {
            mode: {number: whole.pipe.build_stage(number, ctx.device, group) for number in own}
            for mode, whole in traced.items()
        }

    def _check(self, config: PipelineParallelConfig, count: int) -> None:
        form, chunks = self.form, self.chunks
        if form.batch % chunks:
            raise ValueError(
                f"the example has {form.batch} rows, which {chunks} micro-batches do not divide; give an example "
                "of a whole batch, or another num_microbatches"
            )
        if "target" in form.signature.parameters:
            raise ValueError(
                "forward of the model has an argument `target`, which is the pipeline's for the loss; rename it"
            )
        if config.schedule != "gpipe" and chunks < count:
            raise ValueError(
                f"schedule={config.schedule!r} needs at least as many micro-batches as there are stages, "
                f"{count}: num_microbatches is {chunks}"
            )

    def _trace_modes(
        self, model: nn.Module, config: PipelineParallelConfig, count: int, runs: str
    ) -> dict[bool, Traced]:
        modes = {module: module.training for module in model.modules()}
        points, whole = config.split_points, config.no_split_module_classes
        traced = {}
        unwrap_forward(model)
        try:
            for mode in (True, False):
                if not (mode and model.training):
                    model.train(mode)
                traced[mode] = trace(model, points, whole, self.form, count, runs)
        finally:
            for module, training in modes.items():
                module.training = training
        passed = [[_received(traced[mode], number) for number in range(count)] for mode in (True, False)]
        if traced[True].points != traced[False].points or passed[0] != passed[1]:
            raise ValueError(
                "in evaluation the model passes other tensors from stage to stage than in training; choose other "
                "split_points, where it computes the same in both"
            )
        return traced

    def keep_own_stages(self, model: nn.Module, device: torch.device, checkpointing: bool) -> StageForward:
        """Let *model* forget what the other processes have; returns its new forward, which torch's stages call."""
        bodies = {}
        for mode, stages in self.stages.items():
            for number, stage in stages.items():
                body = bodies[number, mode] = Body(stage.submod, model)
                body.release()
                stage.submod = Stage(model, number, stage.submod.graph)
        parameters = named_parameters(model)
        group = self.partition.ctx.require_group("a pipeline")
        note_stages(parameters, self._kept & parameters.keys(), self.partition.elsewhere, group)
        keep_only(model, self._kept)
        return StageForward(model, bodies, device, checkpointing)


def _names(modes: Iterable[Traced], number: int) -> set[str]:
    """Return the parameters and buffers that stage *number* uses in any of *modes*, by the names of the model."""
    names: set[str] = set()
    for traced in modes:
        stage = traced.pipe.get_stage_module(number)
        for named in (stage.named_parameters, stage.named_buffers):
            names |= {name.removeprefix(_PREFIX) for name, _ in named(remove_duplicate=False)}
    return names


def _received(traced: Traced, number: int) -> list[Any]:
    graph = traced.pipe.get_stage_module(number).graph
    return [(n.meta["val"].shape, n.meta["val"].dtype) for n in graph.nodes if n.op == "placeholder"]


def _placed(model: nn.Module, names: Sequence[set[str]], ranks: RunContext) -> tuple[Partition, set[str]]:
    """Assign the parameters and buffers, of which each stage uses those in *names*, to the processes of *ranks*.

    Returns:
        Who has which, and the names of those that stay here.
    """
    parameters = named_parameters(model)
    tensors = {**parameters, **dict(model.named_buffers(remove_duplicate=False))}
    first: dict[int, str] = {}
    for name, tensor in tensors.items():
        first.setdefault(id(tensor), name)
    homes: dict[str, set[int]] = {name: set() for name in first.values()}
    for number, used in enumerate(names):
        for name in used & tensors.keys():
            homes[first[id(tensors[name])]].add(number % ranks.world_size)
        if not any(parameters[name].requires_grad for name in used & parameters.keys()):
            raise ValueError(
                f"stage {number} has no parameter that is trained, so that nothing can be sent back through it; "
                "choose other split_points"
            )
    partition = Partition(
        ranks,
        list(model.state_dict()),
        {name: first[id(tensor)] for name, tensor in tensors.items() if first[id(tensor)] != name},
        {name: sorted(places) for name, places in homes.items() if len(places) > 1 and name in parameters},
    )
    # What no stage uses is of the first one.
    kept = {name for name, tensor in tensors.items() if ranks.rank in (homes[first[id(tensor)]] or {0})}
    return partition, kept


class Body:
    """Traced stage of *model*, whose tensors are found by their names each time."""

    def __init__(self, traced: fx.GraphModule, model: nn.Module) -> None:
        self.traced = traced
        self.results = [node.meta["val"] for node in outputs_of(traced.graph)]
        self._links: list[tuple[dict[str, Any], dict[str, Any], str]] = []
        own = dict(model.named_modules())
        for path, module in traced.named_modules():
            if hasattr(module, "_run_with_interpreter"):
                module._run_with_interpreter = False  # the code that was made of the graph, which takes less time
            if not f"{path}.".startswith(_PREFIX) or (home := own.get(path[len(_PREFIX) :])) is None:
                continue
            for kind in ("_parameters", "_buffers"):
                table, source = getattr(module, kind), getattr(home, kind)
                self._links += [(table, source, key) for key in table if key in source]

    def bind(self, instead: Mapping[int, Tensor]) -> None:
        """Take the tensors that the model has now, or what stands for one of them (by its ``id``)."""
        for table, source, key in self._links:
            table[key] = instead.get(id(source[key]), source[key])

    def release(self) -> None:
        """Forget the tensors until the next call."""
        for table, _, key in self._links:
            table[key] = None

    def bound(self) -> list[Tensor]:
        """Return the tensors that it runs with."""
        return [table[key] for table, _, key in self._links]


class StageForward:
    """Forward of a model of which stages alone are left: runs the stage of a number, on one micro-batch.

    A stage that has failed goes on with zeros, and its gradients are zeros: its neighbours wait for what it sends, and
    those that share its parameters for its gradients. The first error is kept.
    """

    def __init__(
        self, model: nn.Module, bodies: Mapping[tuple[int, bool], Body], device: torch.device, checkpointing: bool
    ) -> None:
        self._model, self._bodies, self._device, self._checkpointing = model, bodies, device, checkpointing
        self.error: Exception | None = None
        self.instead: dict[int, Tensor] = {}

    def __call__(self, number: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Return what stage *number* makes of *tensors*."""
        body = self._bodies[number, self._model.training]
        body.bind(self.instead)
        if self.error is None:
            try:
                output = self._run(body, tensors)
                output = (output,) if isinstance(output, Tensor) else output
                # Of the dtypes that the next stage expects, also in mixed precision.
                return tuple(tensor.to(like.dtype) for tensor, like in zip(output, body.results, strict=True))
            except Exception as error:  # noqa: BLE001 - raised on every process when all have finished
                self.error = error
        return self._zeros(body, tensors)

    def _run(self, body: Body, tensors: tuple[Tensor, ...]) -> Any:
        if not (self._checkpointing and torch.is_grad_enabled()):
            return body.traced(*tensors)
        from torch.utils.checkpoint import checkpoint

        return checkpoint(body.traced, *tensors, use_reentrant=False)

    def _zeros(self, body: Body, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        results = [torch.zeros(val.shape, dtype=val.dtype, device=self._device) for val in body.results]
        if not torch.is_grad_enabled():
            return tuple(results)
        anchor = torch.zeros((), device=self._device)
        for tensor in (*body.bound(), *tensors):
            if tensor.requires_grad and tensor.numel():
                anchor = anchor + tensor.reshape(-1)[:1].sum().float() * 0
        return tuple(result + anchor.to(result.dtype) if result.is_floating_point() else result for result in results)


class Stage(nn.Module):
    """Stage as a schedule sees it: a module with a graph, which calls *model* for stage *number*."""

    def __init__(self, model: nn.Module, number: int, graph: fx.Graph) -> None:
        super().__init__()
        object.__setattr__(self, "model", model)  # its parameters are not of the stage: nothing is to move them
        self.number, self.graph = number, graph

    def forward(self, *tensors: Tensor) -> Any:
        """Return the tensors of the next stage, or of the output."""
        run: Callable[..., Any] = self.__dict__["model"]
        return run(self.number, *tensors)
