"""Steps of sharding before anything is cut: ranks agree on a model, which gets values, units, a mesh and its device.

A model may come without values (``meta``), or with those of rank 0 only.

Sources: Rajbhandari et al., ZeRO, arXiv:1910.02054, section 5; copies of shards (HSDP): Zhao et al., PyTorch FSDP,
arXiv:2304.11277, section 3.2.2.
"""

from __future__ import annotations

import functools
import math
import re
import warnings
from collections.abc import Callable, Collection, Iterable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from orc.runtime.collectives.objects import all_gather_pickled
from orc.runtime.core.errors import ContextError
from orc.runtime.core.topology import LOSS_DIMENSIONS
from orc.runtime.memory.sizes import named_module_tensors
from orc.runtime.parallel.base import Parallelizer, Request
from orc.runtime.parallel.shards import local_part
from orc.runtime.parallel.wrap_policy import units

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from orc.runtime.core.context import RunContext
    from orc.runtime.parallel.fsdp_plugin import FullyShardedDataParallelPlugin


# Names (several where a tensor is shared), shape and type of every parameter and buffer, in order.
Spec = list[tuple[tuple[str, ...], tuple[int, ...], str]]


class FullySharded(Parallelizer):
    """Parallelizer of sharded data parallelism of one version."""

    order = 300
    conflicts: tuple[str, ...] = ("ddp", "xla")
    places_parameters = True
    synchronizes = True

    def wanted(self, model: nn.Module, ctx: RunContext, request: Request) -> bool:
        """For a model that has parameters and is not for evaluation only."""
        return not request.evaluation and next(model.parameters(), None) is not None

    def requires(self, ctx: RunContext) -> str | None:
        """An open process group of the device; none with one process."""
        if not ctx.compute.device_in_group:
            return "the process group does not reach the tensors of this device"
        return super().requires(ctx) if ctx.distributed else None


def data_mesh(ctx: RunContext) -> DeviceMesh:
    """Return the mesh to shard over: the ranks that share out samples or tokens, after those of the replicas if any."""
    topology = ctx.topology
    over = [name for name in ("dp_shard", "cp", "sp") if name in topology.names]
    if not over:
        raise ContextError(f"the ranks are laid out as {topology} by {topology.by}, without dp_shard to shard over")
    return topology.joined(*over, beside=("dp_replicate",) if topology.size("dp_replicate") > 1 else ())


def ignored_modules(model: nn.Module, plugin: FullyShardedDataParallelPlugin) -> list[nn.Module]:
    """Return the modules of *model* that stay whole: those given, or those whose names match the expression.

    Raises:
        ValueError: no name matches.
    """
    given = plugin.ignored_modules
    if given is None:
        return []
    if not isinstance(given, str):
        return list(given)
    modules = [module for name, module in model.named_modules() if re.fullmatch(given, name)]
    if not modules:
        raise ValueError(f"ignored_modules={given!r} matches the name of no module")
    return modules


class Trained:
    """The type in which parameters are trained: float32 instead of 16 bits where *precision* is mixed.

    The optimizer steps in full precision. It says so of *model*, once.
    """

    def __init__(self, model: nn.Module, precision: str) -> None:
        self._mixed = precision != "no"
        low = sum(self.dtype(parameter) != parameter.dtype for parameter in model.parameters())
        if low:
            warnings.warn(
                f"{low} parameters of 16 bits are trained in mixed precision: they become float32, and "
                "checkpoints have them so",
                stacklevel=2,
            )

    def dtype(self, tensor: Tensor) -> torch.dtype:
        """The type of *tensor* in training."""
        low = self._mixed and tensor.requires_grad and tensor.dtype in (torch.float16, torch.bfloat16)
        return torch.float32 if low else tensor.dtype

    def convert(self, tensors: Iterable[Tensor]) -> None:
        """Give *tensors*, which are whole, their type in training, in place and where they are."""
        for tensor in tensors:
            if (dtype := self.dtype(tensor)) != tensor.dtype:
                tensor.data = tensor.data.to(dtype)


def let_go(tensors: Iterable[Tensor]) -> None:
    """Let go of the memory of *tensors*, in whose places are shards now: an optimizer may hold them until the last is.

    They keep their shapes; values that somebody reads nevertheless are not numbers.
    """
    for tensor in tensors:
        held: Any = tensor if (cut := getattr(tensor, "_local_tensor", None)) is None else cut
        nothing = held.new_full((), math.nan if held.is_floating_point() else 0).expand(held.shape)
        if cut is None:
            tensor.data = nothing
        else:
            tensor._local_tensor = nothing  # type: ignore[attr-defined]


def choose_units(
    model: nn.Module, plugin: FullyShardedDataParallelPlugin, ignored: Collection[nn.Module]
) -> list[nn.Module]:
    """Return the units of *model*, itself the last; with activation checkpointing they recompute in backward.

    A model with an attribute ``one_unit`` (the reason) is one unit: its modules are not called one by one.

    Raises:
        ValueError: the policy names classes that *model* does not have, or units that share parameters; or units are
            asked for in a model that is one.
    """
    if reason := getattr(model, "one_unit", None):
        if plugin.auto_wrap_policy is not None or plugin.activation_checkpointing:
            raise ValueError(
                f"the model is {reason}, which is one unit of FSDP: leave auto_wrap_policy and "
                "activation_checkpointing out of the plug-in; "
                "PipelineParallelConfig(activation_checkpointing=True) recomputes whole stages"
            )
        return [model]
    plugin.set_auto_wrap_policy(model)
    chosen = units(model, plugin.auto_wrap_policy, ignored)
    return _checkpointed(model, chosen) if plugin.activation_checkpointing else chosen


def _checkpointed(model: nn.Module, chosen: list[nn.Module]) -> list[nn.Module]:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
        CheckpointImpl,
        CheckpointWrapper,
        apply_activation_checkpointing,
        checkpoint_wrapper,
    )

    inner = set(chosen[:-1])
    if not inner:
        warnings.warn("activation_checkpointing has no effect without units: choose an auto_wrap_policy", stacklevel=2)
        return chosen
    wrap = functools.partial(checkpoint_wrapper, checkpoint_impl=CheckpointImpl.NO_REENTRANT)
    apply_activation_checkpointing(model, checkpoint_wrapper_fn=wrap, check_fn=lambda module: module in inner)
    wrappers = {
        module._checkpoint_wrapped_module: module for module in model.modules() if isinstance(module, CheckpointWrapper)
    }
    return [wrappers.get(unit, unit) for unit in chosen]


def place(
    tensors: Iterable[Tensor],
    device: torch.device,
    ctx: RunContext,
    *,
    synchronise: bool,
    dims: Collection[str] = LOSS_DIMENSIONS,
) -> None:
    """Put *tensors* on *device*, in place; with *synchronise* with the values of the first rank along *dims*."""
    kept = list(tensors)
    for tensor in kept:
        if tensor.device != device or not (hasattr(tensor, "to_local") or tensor.is_contiguous()):
            tensor.data = tensor.data.to(device).contiguous()
    group = ctx.topology.group(*dims) if synchronise and ctx.world_size > 1 else None
    if group is None:
        return
    source = dist.get_global_rank(group, 0)
    held = [local_part(tensor) for tensor in kept]
    works: list[Any] = [dist.broadcast(tensor, source, group, async_op=True) for tensor in held]
    for work in works:
        work.wait()


# ---- agreeing on a model, and giving it values


def agree_on_model(model: nn.Module, ctx: RunContext, prepare: Callable[[], None]) -> None:
    """Check on all ranks that they have the same model, whose values rank 0 has or makes in *prepare*.

    Shared tensors that another rank holds apart, as models made on ``meta`` do, are shared again as on rank 0.

    Raises:
        ContextError: on every rank, with the first reason of any.
    """
    problem, spec = None, _described(model)
    if ctx.is_main:
        try:
            prepare()
        except Exception as error:  # noqa: BLE001 - param_init_fn is the script's; the others must not wait
            ours = isinstance(error, (ValueError, RuntimeError))
            problem = f"rank 0: {error}" if ours else f"rank 0: {type(error).__name__}: {error}"
    if ctx.world_size == 1:
        if problem:
            raise ContextError(problem)
        return
    answers = all_gather_pickled((problem, spec), ctx, "sharding a model")
    wanted: Spec = answers[0][1]
    for rank, (said, theirs) in enumerate(answers):
        if said:
            raise ContextError(said)
        if (difference := _difference(wanted, theirs)) is not None:
            raise ContextError(f"the model of rank {rank} is not that of rank 0: {difference}")
    if spec != wanted:
        _share(model, wanted)


def _described(model: nn.Module) -> Spec:
    names: dict[Tensor, list[str]] = {}
    for named in (model.named_parameters, model.named_buffers):
        for name, tensor in named(remove_duplicate=False):
            names.setdefault(tensor, []).append(name)
    return [(tuple(own), tuple(tensor.shape), str(tensor.dtype)) for tensor, own in names.items()]


def _difference(wanted: Spec, theirs: Spec) -> str | None:
    ours, others = (
        {name: f"{dtype} {list(shape)}" for names, shape, dtype in spec for name in names} for spec in (wanted, theirs)
    )
    name = next((name for name in [*ours, *others] if ours.get(name) != others.get(name)), None)
    return name and f"{name} is {others.get(name, 'missing')} instead of {ours.get(name, 'missing')}"


def _share(model: nn.Module, wanted: Spec) -> None:
    for (first, *others), _, _ in wanted:
        path, _, leaf = first.rpartition(".")
        tensor = getattr(model.get_submodule(path), leaf)
        for name in others:
            path, _, leaf = name.rpartition(".")
            module = model.get_submodule(path)
            (module._parameters if leaf in module._parameters else module._buffers)[leaf] = tensor


def initialize(model: nn.Module, init_fn: Callable[[nn.Module], None] | None) -> None:
    """Give every module of *model* that has no values some: by *init_fn*, else by its ``reset_parameters``.

    Raises:
        ValueError: a module without values has neither.
    """
    empty = [module for module in model.modules() if any(tensor.is_meta for _, tensor in named_module_tensors(module))]
    if not empty:
        return
    Missing(model).allocate([*model.parameters(), *model.buffers()], torch.device("cpu"))
    for module in empty:
        if init_fn is not None:
            init_fn(module)
        elif callable(reset := getattr(module, "reset_parameters", None)):
            with torch.no_grad():
                reset()
        else:
            raise ValueError(
                f"{type(module).__name__} has parameters or buffers without values (on `meta`) and no "
                "reset_parameters(); give param_init_fn, or make the model with values on rank 0"
            )


class Missing:
    """The parameters and buffers of *model* that have no values, and the modules that hold them.

    Shared ones stay shared, whatever is put around modules meanwhile.
    """

    def __init__(self, model: nn.Module) -> None:
        self._holders: dict[Tensor, list[tuple[dict[str, Any], str]]] = {}
        for module in model.modules():
            for held in (module._parameters, module._buffers):
                for name, tensor in held.items():
                    if tensor is not None and tensor.is_meta:
                        self._holders.setdefault(tensor, []).append((held, name))

    def allocate(
        self, tensors: Iterable[Tensor], device: torch.device, dtype: Callable[[Tensor], torch.dtype] | None = None
    ) -> list[Tensor]:
        """Return *tensors* with uninitialised memory of *device* in the place of those without values.

        *dtype* says of which type it is; as before unless given. The CPU's costs nothing until it is written to.
        """
        return [self._allocated(tensor, device, dtype) if tensor in self._holders else tensor for tensor in tensors]

    def _allocated(self, tensor: Tensor, device: torch.device, dtype: Callable[[Tensor], torch.dtype] | None) -> Tensor:
        made = torch.empty_like(tensor, device=device, dtype=dtype and dtype(tensor))
        if isinstance(tensor, nn.Parameter):
            made = nn.Parameter(made, requires_grad=tensor.requires_grad)
        for held, name in self._holders.pop(tensor):
            held[name] = made
        return made


def agree_on_values(model: nn.Module, ctx: RunContext, plugin: FullyShardedDataParallelPlugin) -> Missing:
    """Let all ranks agree on *model*; returns what has no values here, which come from rank 0 later.

    Raises:
        ContextError: the ranks have different models, or no rank has values; the same on all.
    """
    missing = any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))

    def values_of_rank_0() -> None:
        if missing and not plugin.sync_module_states:
            raise ValueError("the model has no values (on `meta`): sync_module_states must be on to share rank 0's")
        initialize(model, plugin.param_init_fn)

    agree_on_model(model, ctx.topology.data_context, values_of_rank_0)  # with those that share the shards
    return Missing(model)
