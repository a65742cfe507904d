"""Sharded data parallelism, version 1: ``torch.distributed.fsdp.FullyShardedDataParallel``, flattened parameters."""

from __future__ import annotations

import warnings
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, cast

import torch

from orc.runtime.core.errors import ContextError
from orc.runtime.parallel import sharding
from orc.runtime.parallel.ddp import Setting
from orc.runtime.parallel.replacements import named_parameters, note_shards, replaced

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import BackwardPrefetch, FullyShardedDataParallel, ShardingStrategy

    from orc.runtime.core.context import RunContext
    from orc.runtime.parallel.base import Request
    from orc.runtime.parallel.fsdp_plugin import FullyShardedDataParallelPlugin

_CHECKPOINTED = "_checkpoint_wrapped_module."  # in names of modules


class FSDP1(sharding.FullySharded):
    """`FullyShardedDataParallel` around every unit of the model and around the model itself."""

    name = "fsdp1"
    conflicts = (*sharding.FullySharded.conflicts, "pp", "tensor", "context", "sequence")

    def apply(self, model: nn.Module, ctx: RunContext, request: Request) -> nn.Module:
        """Wrap *model*."""
        from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
        from torch.distributed.fsdp.wrap import CustomPolicy

        plugin: FullyShardedDataParallelPlugin = request.options["fsdp"]
        ignored = sharding.ignored_modules(model, plugin)
        missing = sharding.agree_on_values(model, ctx, plugin)
        trained = sharding.Trained(model, request.mixed_precision)
        # What has no values gets memory of the host that costs nothing, as nothing is written to it before it moves.
        every = missing.allocate([*model.parameters(), *model.buffers()], torch.device("cpu"), trained.dtype)
        trained.convert(every)
        chosen = sharding.choose_units(model, plugin, ignored)
        synchronise = bool(plugin.sync_module_states)
        if synchronise and ctx.device.type == "cpu":  # which FSDP refuses to do in host memory
            sharding.place([*model.parameters(), *model.buffers()], ctx.device, ctx, synchronise=True)
            synchronise = False
        inner, names = set(chosen[:-1]), named_parameters(model)
        modules = {module: name for name, module in model.named_modules()}
        mesh = sharding.data_mesh(ctx)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*NO_SHARD.*deprecated", FutureWarning)  # documented here
            wrapped = FullyShardedDataParallel(
                model,
                device_mesh=mesh,
                sharding_strategy=_strategy(cast("ShardingStrategy", plugin.sharding_strategy), mesh),
                cpu_offload=None if ctx.device.type == "cpu" else plugin.cpu_offload,  # it is there already
                auto_wrap_policy=CustomPolicy(lambda module: module in inner) if inner else None,
                backward_prefetch=cast("BackwardPrefetch | None", plugin.backward_prefetch),
                mixed_precision=plugin.mixed_precision_policy,
                ignored_modules=ignored or None,
                device_id=ctx.device,
                sync_module_states=synchronise,
                forward_prefetch=bool(plugin.forward_prefetch),
                limit_all_gathers=plugin.limit_all_gathers,
                use_orig_params=bool(plugin.use_orig_params),
            )
        if not plugin.use_orig_params:
            _note_flattened(wrapped, names, modules)
        if plugin.sharding_strategy is not ShardingStrategy.NO_SHARD:
            note_shards(_managed(wrapped, ignored), ctx.topology.group("dp_shard"))
        return wrapped

    def no_sync(self, model: nn.Module) -> AbstractContextManager[Any]:
        """Accumulate whole gradients on each rank; nothing travels."""
        return cast("FullyShardedDataParallel", model).no_sync()

    def sync_in_backward(self, model: nn.Module) -> AbstractContextManager[Any]:
        """Let the next backward reduce what has been accumulated."""
        return _sync_in_backward(model)


def _strategy(asked: ShardingStrategy, mesh: DeviceMesh | None) -> ShardingStrategy:
    """Return *asked*, or its name where the model has copies: on a mesh of two dimensions.

    Raises:
        ContextError: it shards nothing, and there are ranks to shard over.
    """
    from torch.distributed.fsdp import ShardingStrategy

    if mesh is None or mesh.ndim == 1:
        return asked
    if asked is ShardingStrategy.NO_SHARD:
        raise ContextError("NO_SHARD shards nothing: leave dp_shard_size out, or choose another sharding_strategy")
    # torch takes the others for the names of a mesh of one dimension, and would not average over the copies.
    hybrid = {
        ShardingStrategy.FULL_SHARD: ShardingStrategy.HYBRID_SHARD,
        ShardingStrategy.SHARD_GRAD_OP: ShardingStrategy._HYBRID_SHARD_ZERO2,
    }
    return hybrid.get(asked, asked)


def _units(model: nn.Module) -> list[Any]:
    from torch.distributed.fsdp import FullyShardedDataParallel

    return FullyShardedDataParallel.fsdp_modules(model)


@contextmanager
def _sync_in_backward(model: nn.Module) -> Iterator[None]:
    with ExitStack() as block:
        for unit in _units(model):
            block.enter_context(Setting(unit, "_sync_gradients", True))
        yield


def _managed(wrapped: nn.Module, ignored: list[nn.Module]) -> list[nn.Parameter]:
    whole = {parameter for module in ignored for parameter in module.parameters()}
    return [parameter for parameter in wrapped.parameters() if parameter not in whole]


def _note_flattened(wrapped: nn.Module, names: dict[str, nn.Parameter], modules: dict[nn.Module, str]) -> None:
    """Note which flat parameter each parameter of the model has become a part of."""
    for unit in _units(wrapped):
        handle = unit._handle
        if handle is None:
            continue
        flat = handle.flat_param
        for part in flat._param_infos:
            prefix = modules[part.module]
            name = f"{prefix}.{part.param_name}" if prefix else part.param_name
            name = name.replace(_CHECKPOINTED, "")
            replaced({name: names[name]}, {name: flat})


PARALLELIZER = FSDP1()
