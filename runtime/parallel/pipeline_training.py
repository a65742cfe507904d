"""Pipelines that train are made here: a model is traced and cut, and each process keeps its stages alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from orc.runtime.core.context import RunContext
from orc.runtime.core.errors import ContextError
from orc.runtime.parallel.call_form import CallForm
from orc.runtime.parallel.partition import Partition, keep_only, partition_of, set_partition
from orc.runtime.parallel.pipeline import gather_or_raise
from orc.runtime.parallel.pipeline_config import PipelineParallelConfig
from orc.runtime.parallel.pipeline_model import PipelineModel, StageRunner
from orc.runtime.parallel.precision.forward import AutocastForward, unwrap_forward
from orc.runtime.parallel.replacements import move, named_parameters, note_stages
from orc.runtime.parallel.stage_body import Body, Stage, StageForward
from orc.runtime.parallel.stages import Traced, trace


def into_stages(model: nn.Module, config: PipelineParallelConfig, ctx: RunContext, *, place: bool) -> PipelineModel:
    """Return *model* as a pipeline over the processes of the dimension ``pp``, each of which keeps its own stages.

    Args:
        model: the whole model, on the CPU.
        config: how.
        ctx: the run.
        place: put the stages of this process on its device.

    Raises:
        ValueError: the example, the split points or the model do not fit. On every process.
        OrcRuntimeError: the model cannot be traced, or another process failed. On every process.
    """
    topology = ctx.topology
    processes = topology.size("pp")
    group = topology.group("pp")
    mine = dataclasses.replace(ctx, rank=topology.place("pp"), world_size=processes, group=group, store=None)
    chunks = config.microbatches(processes)
    autocast = model.forward if isinstance(model.forward, AutocastForward) else None
    cut: _Cut | None = None
    error: Exception | None = None
    try:
        cut = _Cut(model, config, ctx, mine, chunks)
    except Exception as raised:  # noqa: BLE001 - raised below, on every process
        error = raised
    told = gather_or_raise("prepare", ctx, error, None if cut is None else cut.facts)
    if different := [rank for rank, other in enumerate(told) if other != told[0]]:
        raise ValueError(
            f"process {different[0]} splits another model, or with another example, than process 0: "
            f"{told[different[0]]} and {told[0]}"
        )
    assert cut is not None  # otherwise there was an error
    forward = cut.keep_own_stages(model, ctx, config)
    if autocast is not None:
        autocast.original = forward
    object.__setattr__(model, "forward", autocast or forward)
    # A stage is gathered whole when it runs: nothing calls the modules inside.
    object.__setattr__(model, "one_unit", "a stage of a pipeline")
    set_partition(model, cut.partition)
    if place:
        move(model, ctx.device)
    _share_values(model, cut.partition)
    runner = StageRunner(
        model,
        forward,
        cut.form,
        cut.used,
        {mode: cut.stages(model, mode) for mode in (True, False)},
        cut.outputs,
        config,
        ctx,
        cut.partition,
        chunks,
    )
    cut.forget()
    return PipelineModel(model, config, runner)


class _Cut:
    """Model traced in training and in evaluation, and where its stages and parameters belong."""

    def __init__(
        self, model: nn.Module, config: PipelineParallelConfig, ctx: RunContext, mine: RunContext, chunks: int
    ) -> None:
        _refuse(model)
        self._ctx, self._mine = ctx, mine
        self.count = mine.world_size * (config.stages_per_process or 1)
        self.form = CallForm(model, config.example_args, config.example_kwargs, chunks)
        if self.form.batch % chunks:
            raise ValueError(
                f"the example has {self.form.batch} rows, which {chunks} micro-batches do not divide; give an example "
                "of a whole batch, or another num_microbatches"
            )
        if "target" in self.form.signature.parameters:
            raise ValueError(
                "forward of the model has an argument `target`, which is the pipeline's for the loss; rename it"
            )
        if config.schedule != "gpipe" and chunks < self.count:
            raise ValueError(
                f"schedule={config.schedule!r} needs at least as many micro-batches as there are stages, "
                f"{self.count}: num_microbatches is {chunks}"
            )
        self._traced = self._trace_modes(model, config)
        self.used = self._traced[True].used
        names = {number: self._names(number) for number in range(self.count)}
        self.facts = (self._traced[True].points, self.form.names, self.form.rows, sorted(model.state_dict()), chunks)
        self._numbers = [number for number in names if number % mine.world_size == mine.rank]
        self._kept = self._place(model, names)
        last = self._traced[True].pipe.get_stage_module(self.count - 1).graph
        end: Any = next(node for node in last.nodes if node.op == "output").args[0]
        self.outputs = [node.meta["val"] for node in ([end] if hasattr(end, "meta") else end)]
        self._built = {mode: self._build(mode) for mode in (True, False)}

    def _trace_modes(self, model: nn.Module, config: PipelineParallelConfig) -> dict[bool, Traced]:
        modes = {module: module.training for module in model.modules()}
        runs = "process" if self.count == self._mine.world_size else "stages"
        traced = {}
        unwrap_forward(model)
        try:
            for mode in (True, False):
                if not (mode and model.training):
                    model.train(mode)
                points, whole = config.split_points, config.no_split_module_classes
                traced[mode] = trace(model, points, whole, self.form, self.count, runs=runs, neighbours=True)
                for module, training in modes.items():
                    module.training = training
        finally:
            for module, training in modes.items():
                module.training = training
        passed = [[_received(traced[mode], number) for number in range(self.count)] for mode in (True, False)]
        if traced[True].points != traced[False].points or passed[0] != passed[1]:
            raise ValueError(
                "in evaluation the model passes other tensors from stage to stage than in training; choose other "
                "split_points, where it computes the same in both"
            )
        return traced

    def _names(self, number: int) -> set[str]:
        """Return the parameters and buffers that stage *number* uses, by the names of the model."""
        used_names: set[str] = set()
        for traced in self._traced.values():
            stage = traced.pipe.get_stage_module(number)
            for named in (stage.named_parameters, stage.named_buffers):
                used_names |= {name.removeprefix("model.") for name, _ in named(remove_duplicate=False)}
        return used_names

    def _place(self, model: nn.Module, names: Mapping[int, set[str]]) -> set[str]:
        """Assign the parameters to processes; return the names of those that stay here."""
        size = self._mine.world_size
        parameters = named_parameters(model)
        tensors = {**parameters, **dict(model.named_buffers(remove_duplicate=False))}
        first: dict[int, str] = {}
        for name, tensor in tensors.items():
            first.setdefault(id(tensor), name)
        homes: dict[str, set[int]] = {name: set() for name in first.values()}
        for number, used in names.items():
            for name in used & tensors.keys():
                homes[first[id(tensors[name])]].add(number % size)
        for places in homes.values():
            if not places:  # what no stage uses is of the first one
                places.add(0)
        trained: set[int] = set()
        for number, used in names.items():
            if any(name in parameters and parameters[name].requires_grad for name in used):
                trained.add(number)
        if missing := sorted(set(names) - trained):
            raise ValueError(
                f"stage {missing[0]} has no parameter that is trained, so that nothing can be sent back through it; "
                "choose other split_points"
            )
        self.partition = Partition(
            self._mine,
            list(model.state_dict()),
            {name: first[id(tensor)] for name, tensor in tensors.items() if first[id(tensor)] != name},
            {name: sorted(places) for name, places in homes.items() if len(places) > 1 and name in parameters},
        )
        return {name for name, tensor in tensors.items() if self._mine.rank in homes[first[id(tensor)]]}

    def _build(self, mode: bool) -> dict[int, list[Any]]:
        """Build torch's stages of this process: for training and for evaluation each has its own buffers."""
        pipe, group = self._traced[mode].pipe, self._mine.require_group("a pipeline")
        return {number: [pipe.build_stage(number, self._ctx.device, group)] for number in self._numbers}

    def keep_own_stages(self, model: nn.Module, ctx: RunContext, config: PipelineParallelConfig) -> StageForward:
        """Let *model* forget what the other processes have; returns its new forward."""
        bodies = {
            (number, mode): Body(stage.submod, model)
            for mode, built in self._built.items()
            for number, (stage,) in built.items()
        }
        for body in bodies.values():
            body.release()
        parameters = named_parameters(model)
        group = self._mine.require_group("a pipeline")
        note_stages(parameters, self._kept & parameters.keys(), self.partition.elsewhere, group)
        keep_only(model, self._kept)
        return StageForward(model, bodies, ctx.device, config.activation_checkpointing)

    def stages(self, model: nn.Module, mode: bool) -> list[Any]:
        """Return torch's stages, which call *model*."""
        stages = []
        for number, (stage,) in self._built[mode].items():
            stage.submod = Stage(model, number, stage.submod.graph)
            stages.append(stage)
        return stages

    def forget(self) -> None:
        """Let go of the stages of the others, and the parameters in them."""
        self._traced.clear()


def _received(traced: Traced, number: int) -> list[Any]:
    graph = traced.pipe.get_stage_module(number).graph
    return [(n.meta["val"].shape, n.meta["val"].dtype) for n in graph.nodes if n.op == "placeholder"]


def _refuse(model: nn.Module) -> None:
    if partition_of(model) is not None or hasattr(model, "hf_split_points"):
        raise ContextError("this model is a pipeline already; prepare a new copy of it")
    if empty := next((name for name, weight in model.named_parameters() if weight.is_meta), None):
        raise ValueError(f"{empty} is on the meta device: a pipeline is cut from a model with weights, on the CPU")


def _share_values(model: nn.Module, partition: Partition) -> None:
    """Give parameters that several stages have the values of the first one."""
    own = named_parameters(model)
    for name in sorted(partition.holders):
        places: Iterable[int] = partition.holders[name]
        first, *others = places
        group = partition.ctx.require_group("shared parameters")
        if partition.ctx.rank == first:
            for other in others:
                dist.send(own[name].data.contiguous(), partition.global_rank(other), group)
        elif partition.ctx.rank in others:
            received = torch.empty_like(own[name].data).contiguous()
            dist.recv(received, partition.global_rank(first), group)
            own[name].data.copy_(received)
