"""Steps of both versions of sharded data parallelism before they shard: choose units and mesh, agree, give values.

Sources: Rajbhandari et al., ZeRO, arXiv:1910.02054, section 5; copies of shards (HSDP): Zhao et al., PyTorch FSDP,
arXiv:2304.11277, section 3.2.2.
"""

from __future__ import annotations

import functools
import math
import re
import warnings
from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from orc.runtime.core.errors import ContextError
from orc.runtime.core.topology import LOSS_DIMENSIONS
from orc.runtime.parallel.base import Parallelizer, Request
from orc.runtime.parallel.materialize import Missing, agree_on_model, initialize
from orc.runtime.parallel.shards import local_part
from orc.runtime.parallel.wrap_policy import units

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from orc.runtime.core.context import RunContext
    from orc.runtime.parallel.fsdp_plugin import FullyShardedDataParallelPlugin


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
