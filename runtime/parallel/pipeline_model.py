"""Pipelines that train: a call with a target runs forward and backward of all micro-batches and returns the loss."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from orc.runtime.collectives.exchange import all_gather_flat
from orc.runtime.collectives.tree import send_to_device
from orc.runtime.core.context import RunContext
from orc.runtime.core.errors import OrcRuntimeError
from orc.runtime.core.store import StoreError
from orc.runtime.parallel.partition import Partition, set_partition
from orc.runtime.parallel.pipeline import PipelineParallelConfig, check_alike, gather_or_raise
from orc.runtime.parallel.pipeline_training import Cut, StageForward
from orc.runtime.parallel.precision.forward import AutocastForward
from orc.runtime.parallel.replacements import move, named_parameters

_BROKEN = "pipeline/broken"  # on the store: how many processes have seen a schedule fail, and who was the first
_NO_TARGET = "a pipeline in training needs the target of its batch: model(inputs, target=labels) returns the loss"


class PipelineModel(nn.Module):
    """A model that computes its loss by itself, over the stages of *runner*; whole on this process without one.

    ``model(inputs, target=labels)`` is the loss, on every process; in training its ``backward`` adds the gradients.
    ``model(inputs)`` in evaluation is the output, on every process.
    """

    def __init__(self, model: nn.Module, config: PipelineParallelConfig, runner: StageRunner | None) -> None:
        super().__init__()
        self.module = model
        self.config_of_pipeline = config
        self.runner = runner
        self.training = model.training

    def forward(self, *args: Any, target: Any = None, **kwargs: Any) -> Any:
        """Run one batch, the same on all processes of the pipeline.

        Args:
            args: inputs of the model.
            target: what ``loss_fn`` compares the output with; tensors are cut as the inputs are.
            kwargs: inputs by name.

        Returns:
            The loss where there is a *target*, else the output.

        Raises:
            ValueError: an input does not fit the example, or there is no *target* in training. On every process.
            OrcRuntimeError: a stage has failed on another process. On every process.
        """
        trains = self.training and torch.is_grad_enabled()
        if self.runner is not None:
            return self.runner.train(args, kwargs, target) if trains else self.runner.infer(args, kwargs, target)
        if trains and target is None:
            raise ValueError(_NO_TARGET)
        if trains and self.config_of_pipeline.activation_checkpointing:
            from torch.utils.checkpoint import checkpoint

            output = checkpoint(self.module, *args, use_reentrant=False, **kwargs)
        else:
            output = self.module(*args, **kwargs)
        loss_fn = self.config_of_pipeline.loss_fn
        return output if target is None or loss_fn is None else loss_fn(output, target)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)


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
    autocast = model.forward if isinstance(model.forward, AutocastForward) else None
    ctx.topology.group("pp")  # the first call makes it, together with all: before what can fail on one process
    cut: Cut | None = None
    error: Exception | None = None
    try:
        cut = Cut(model, config, ctx)
    except Exception as raised:  # noqa: BLE001 - raised below, on every process
        error = raised
    check_alike("prepare", ctx, error, cut and cut.facts)
    assert cut is not None  # otherwise there was an error
    forward = cut.keep_own_stages(model, ctx.device, config.activation_checkpointing)
    if autocast is not None:
        autocast.original = forward
    object.__setattr__(model, "forward", autocast or forward)
    # A stage is gathered whole when it runs: nothing calls the modules inside.
    object.__setattr__(model, "one_unit", "a stage of a pipeline")
    set_partition(model, cut.partition)
    if place:
        move(model, ctx.device)
    _share_values(model, cut.partition)
    return PipelineModel(model, config, StageRunner(model, forward, cut, config, ctx))


def _share_values(model: nn.Module, partition: Partition) -> None:
    """Give parameters that several stages have the values of the first one."""
    own = named_parameters(model)
    for name in sorted(partition.holders):
        first, *others = partition.holders[name]
        group = partition.ctx.require_group("shared parameters")
        if partition.ctx.rank == first:
            for other in others:
                dist.send(own[name].data.contiguous(), partition.global_rank(other), group)
        elif partition.ctx.rank in others:
            received = torch.empty_like(own[name].data).contiguous()
            dist.recv(received, partition.global_rank(first), group)
            own[name].data.copy_(received)


class StageRunner:
    """Stages of this process, and the schedules that run them together with those of the others.

    Args:
        model: the module with the parameters of these stages.
        forward: its forward.
        cut: the stages.
        config: of the pipeline.
        ctx: the run.
    """

    def __init__(
        self, model: nn.Module, forward: StageForward, cut: Cut, config: PipelineParallelConfig, ctx: RunContext
    ) -> None:
        self._model, self._forward, self._config, self._ctx = model, forward, config, ctx
        self._form, self._used, self._outputs, self._chunks = cut.form, cut.used, cut.outputs, cut.chunks
        self.partition = cut.partition
        self._stages = {mode: list(stages.values()) for mode, stages in cut.stages.items()}
        self._is_first = any(stage.is_first for stage in self._stages[True])
        self._is_last = any(stage.is_last for stage in self._stages[True])
        self._target: Any = None
        self._rows = 0
        self._loss = torch.zeros((), device=ctx.device)
        for stage in self._stages[True]:
            _shield(stage, self)
        self._schedules = {
            True: schedule(config.schedule, self._stages[True], cut.chunks, self._loss_of),
            False: schedule(config.schedule, self._stages[False], cut.chunks, None),
        }

    # ---- one batch

    def train(self, args: Sequence[Any], kwargs: Mapping[str, Any], target: Any) -> Tensor:
        """Run forward and backward of one batch; returns the loss, whose backward adds the gradients."""
        tensors = self._begin(args, kwargs, target, needed=True)
        sharded = self._sharded()
        if sharded:
            self._model.reshard()  # type: ignore[operator]  # an evaluation may have left them whole
        parameters = [parameter for parameter in self._model.parameters() if parameter.requires_grad]
        if sharded:  # torch gives gradients to these very parameters
            before = [parameter.grad for parameter in parameters]
            for parameter in parameters:
                parameter.grad = None
            leaves: Sequence[Tensor] = parameters
        else:  # those of this batch alone, and who watches the parameters sees nothing yet
            leaves = [parameter.detach().requires_grad_() for parameter in parameters]
            self._forward.instead = {id(parameter): leaf for parameter, leaf in zip(parameters, leaves, strict=True)}
        self._loss = torch.zeros((), device=self._ctx.device)
        try:
            self._step(True, tensors)
            gradients = [leaf.grad for leaf in leaves]
        finally:
            self._forward.instead = {}
            self._target = None
            if sharded:
                for parameter, gradient in zip(parameters, before, strict=True):
                    parameter.grad = gradient
        loss = self._told(self._loss)
        gradient_of = dict(zip(map(id, parameters), gradients, strict=True))
        self._join(gradient_of)
        trained = [(parameter, grad) for parameter in parameters if (grad := gradient_of[id(parameter)]) is not None]
        apply: Callable[..., Tensor] = _Gradients.apply
        return apply(loss, [grad for _, grad in trained], *(parameter for parameter, _ in trained))

    @torch.no_grad()
    def infer(self, args: Sequence[Any], kwargs: Mapping[str, Any], target: Any) -> Any:
        """Run one batch forward; returns the loss where there is a *target*, else the output, on every process."""
        tensors = self._begin(args, kwargs, target, needed=False)
        rows, loss = self._rows, torch.zeros((), device=self._ctx.device)
        output = self._step(False, tensors)
        leaves = self._form.leaves(output, rows)
        if target is not None and self._is_last and self._forward.error is None:
            try:
                loss = self._scalar(self._form.result(leaves), send_to_device(target, self._ctx.device))
            except Exception as error:  # noqa: BLE001 - raised below, on every process
                self._forward.error = error
        self._target = None
        loss = self._told(loss)
        if target is not None:
            return loss
        ranks = self.partition.ctx
        group, last = ranks.require_group("the output"), self.partition.global_rank(ranks.world_size - 1)
        if not self._is_last:
            device = self._ctx.device
            leaves = [
                torch.empty((rows, *output.shape[1:]), dtype=output.dtype, device=device) for output in self._outputs
            ]
        leaves = [leaf.contiguous() for leaf in leaves]
        for leaf in leaves:
            dist.broadcast(leaf, last, group)
        return self._form.result(leaves)

    def _begin(self, args: Sequence[Any], kwargs: Mapping[str, Any], target: Any, *, needed: bool) -> list[Tensor]:
        """Return the tensors of a batch. What does not fit is kept: the others have begun."""
        self._forward.error, self._rows, self._target = None, 0, target
        try:
            if needed and target is None:
                raise ValueError(_NO_TARGET)
            tensors, self._rows = self._form.inputs(args, kwargs, self._chunks)
            return list(send_to_device([tensors[index] for index in self._used], self._ctx.device))
        except Exception as error:  # noqa: BLE001 - raised below, on every process
            self._forward.error = error
            return [torch.zeros(self._chunks, device=self._ctx.device) for _ in self._used]

    def _step(self, training: bool, tensors: Sequence[Tensor]) -> Any:
        run = self._schedules[training]
        options: dict[str, Any] = {}
        if training:
            options["target"] = torch.arange(self._chunks) if self._is_last else None
            if "return_outputs" in inspect.signature(run.step).parameters:
                options["return_outputs"] = False
        try:
            output = run.step(*(tensors if self._is_first else ()), **options)
        except Exception as error:
            raise self._broken_off(error) from error
        for stage in self._stages[training]:
            stage.clear_runtime_states()  # holds activations
        return output

    def _broken_off(self, error: Exception) -> OrcRuntimeError:
        """Return what to raise where the schedule itself has failed: neighbours, whose time is up, name who began.

        Nothing makes them fail before: they wait in torch for what this process does not send any more, and gloo can
        close no connection as long as the group lives.
        """
        ctx, store = self._ctx, self._ctx.store
        reason = f"process {ctx.rank} ({type(error).__name__}: {str(error).partition(chr(10))[0]})"
        if store is not None:
            try:
                if store.add(_BROKEN, 1) == 1:
                    store.set(f"{_BROKEN}/by", reason)
                reason = store.get(f"{_BROKEN}/by").decode()
            except StoreError:  # rank 0 is gone: the connection says so
                pass
        return OrcRuntimeError(
            f"the schedule of the pipeline broke off on {reason}. It cannot go on: let the error end the process, "
            "because the other processes wait for it until the time-out of collectives (timeout_s)"
        )

    # ---- loss

    def _loss_of(self, output: Any, number: Tensor) -> Tensor:
        """Return the share that micro-batch *number* has in the loss; rows that fill it up have none."""
        leaves = [output] if isinstance(output, Tensor) else list(output)
        first, size = int(number) * self._form.rows, self._form.rows
        valid = min(max(self._rows - first, 0), size)
        if self._forward.error is None and valid:
            try:
                target = pytree.tree_map(lambda leaf: self._cut(leaf, first, first + valid), self._target)
                target = send_to_device(target, self._ctx.device)
                loss = self._scalar(self._form.result([leaf[:valid] for leaf in leaves]), target)
                if self._config.loss_reduction == "mean" and valid < self._rows:
                    loss = loss * (valid / self._rows)
                self._loss = self._loss + loss.detach()
                return loss
            except Exception as error:  # noqa: BLE001 - raised on every process when all have finished
                self._forward.error = error
        nothing: Tensor = sum(leaf.sum().float() * 0 for leaf in leaves if leaf.requires_grad)  # type: ignore[assignment]
        return nothing

    def _cut(self, tensor: Any, first: int, end: int) -> Any:
        whole = isinstance(tensor, Tensor) and tensor.ndim > 0 and tensor.shape[0] == self._rows
        return tensor[first:end] if whole else tensor

    def _scalar(self, output: Any, target: Any) -> Tensor:
        assert self._config.loss_fn is not None  # checked where it was given
        loss = self._config.loss_fn(output, target)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            shown = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
            raise ValueError(f"loss_fn returns {shown}; it must return a tensor with one element")
        return loss.reshape(())

    def _told(self, loss: Tensor) -> Tensor:
        """Return the loss of the last process of this pipeline, or raise the error of any, on all of them."""
        ctx, error = self._ctx, self._forward.error
        mine = torch.stack([loss.detach().double().cpu(), torch.tensor(float(error is not None), dtype=torch.float64)])
        told = torch.empty(2 * ctx.world_size, dtype=torch.float64, device=ctx.control_device)
        all_gather_flat(told, mine.to(ctx.control_device), ctx.require_group("the loss of a pipeline"))
        losses = told.cpu().view(-1, 2)
        if losses[:, 1].any():
            gather_or_raise("a stage of a pipeline", ctx, error)
        last = self.partition.global_rank(self.partition.ctx.world_size - 1)
        return losses[last, 0].to(ctx.device, torch.get_default_dtype())

    # ---- gradients

    def _sharded(self) -> bool:
        return hasattr(self._model, "set_requires_gradient_sync")

    def _join(self, gradients: dict[int, Tensor | None]) -> None:
        """Add up the *gradients* of parameters that several stages have, on each of them, in place."""
        place, group = self.partition.ctx.rank, None
        own = dict(self._model.named_parameters(remove_duplicate=False))
        for name in sorted(self.partition.holders):
            first, *others = self.partition.holders[name]
            if place not in (first, *others) or id(own[name]) not in gradients:
                continue
            gradient = gradients[id(own[name])]
            if gradient is None:  # another stage may have one, and waits
                gradient = gradients[id(own[name])] = torch.zeros_like(own[name])
            group = group or self.partition.ctx.require_group("shared parameters")
            local = gradient.to_local() if hasattr(gradient, "to_local") else gradient
            if place != first:
                dist.send(local.contiguous(), self.partition.global_rank(first), group)
                dist.recv(local, self.partition.global_rank(first), group)
                continue
            for other in others:
                received = torch.empty_like(local)
                dist.recv(received, self.partition.global_rank(other), group)
                local.add_(received)
            for other in others:
                dist.send(local.contiguous(), self.partition.global_rank(other), group)


class _Gradients(torch.autograd.Function):
    """Loss whose backward gives parameters the gradients that are there already, times its own gradient."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, gradients: list[Tensor], *parameters: Tensor) -> Tensor:
        ctx.gradients = gradients
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, *outputs: Tensor) -> Any:
        gradients, ctx.gradients = ctx.gradients, None
        if gradients is None:
            raise RuntimeError("backward of a pipeline's loss a second time: the gradients were handed out")
        factor = float(outputs[0])
        if factor != 1.0 and gradients:
            torch._foreach_mul_(gradients, factor)
        return (None, None, *gradients)


def schedule(name: str, stages: Sequence[Any], chunks: int, loss: Callable[..., Tensor] | None) -> Any:
    """Return torch's schedule *name* of *stages*, for training with a *loss*; without one it runs forward alone."""
    from torch.distributed import pipelining

    known = {"gpipe": "ScheduleGPipe", "1f1b": "Schedule1F1B", "interleaved_1f1b": "ScheduleInterleaved1F1B"}
    kind = getattr(pipelining, known["gpipe" if loss is None and name == "1f1b" else name])
    options: dict[str, Any] = {} if loss is None else {"loss_fn": loss}
    if "scale_grads" in inspect.signature(kind).parameters:  # what is older never scales
        options["scale_grads"] = False
    return kind(list(stages) if name == "interleaved_1f1b" else stages[0], chunks, **options)


def _shield(stage: Any, runner: StageRunner) -> None:
    """Let *stage* send zeros back when its backward has failed: its neighbours wait for them."""
    backward = stage.backward_one_chunk

    def shielded(number: int, *args: Any, last_backward: bool = False, **kwargs: Any) -> None:
        if runner._sharded():  # gradients are reduced once, when those of all micro-batches are there
            runner._model.set_requires_gradient_sync(last_backward)  # type: ignore[operator]
        try:
            backward(number, *args, last_backward=last_backward, **kwargs)
        except Exception as error:  # noqa: BLE001 - raised on every process when all have finished
            runner._forward.error = runner._forward.error or error.__cause__ or error  # type: ignore[assignment]
            stage.fwd_cache.pop(number, None)
            buffers = [getattr(info, "buffer", None) for info in stage.args_recv_info[number]]
            stage.bwd_cache[number] = tuple(
                torch.zeros_like(buffer) if buffer is not None and buffer.is_floating_point() else None
                for buffer in buffers
            )

    stage.backward_one_chunk = shielded
