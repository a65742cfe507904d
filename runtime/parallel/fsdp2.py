"""Sharded data parallelism, version 2: ``torch.distributed.fsdp.fully_shard``, parameters as DTensors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from orc.runtime.core.topology import LOSS_DIMENSIONS
from orc.runtime.parallel import inside, sharding
from orc.runtime.parallel.base import Request, shards_problem
from orc.runtime.parallel.shards import spread_over

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor, nn

    from orc.runtime.core.context import RunContext
    from orc.runtime.parallel.fsdp_plugin import FullyShardedDataParallelPlugin


class _Synchronised:
    """Block in which backward of *model* reduces gradients, or does not; afterwards it does."""

    __slots__ = ("_inside", "_model")

    def __init__(self, model: Any, inside: bool) -> None:
        self._model, self._inside = model, inside

    def __enter__(self) -> None:
        self._model.set_requires_gradient_sync(self._inside)

    def __exit__(self, *exc: object) -> None:
        self._model.set_requires_gradient_sync(True)


class FSDP2(sharding.FullySharded):
    """``fully_shard`` on every unit of the model, inner ones first, and on the model itself."""

    name = "fsdp2"

    def requires(self, ctx: RunContext) -> str | None:
        """An open process group that gathers shards of the device."""
        return shards_problem(ctx) or super().requires(ctx)

    def apply(self, model: nn.Module, ctx: RunContext, request: Request) -> nn.Module:
        """Shard *model* in place, one unit at a time: no more than one is whole on the device."""
        self._shard(inside(model), ctx, request)
        return model

    def _shard(self, model: nn.Module, ctx: RunContext, request: Request) -> None:
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        plugin: FullyShardedDataParallelPlugin = request.options["fsdp"]
        ignored = sharding.ignored_modules(model, plugin)
        missing = sharding.agree_on_values(model, ctx, plugin)
        trained = sharding.Trained(model, request.mixed_precision)
        chosen = sharding.choose_units(model, plugin, ignored)
        whole = {
            parameter: None for module in ignored for parameter in module.parameters()
        }  # in the order of all ranks
        synchronise, averaged = bool(plugin.sync_module_states), {*LOSS_DIMENSIONS}

        def place(tensors: Iterable[Tensor]) -> list[Tensor]:
            placed = missing.allocate(tensors, ctx.device)
            sharding.place(placed, ctx.device, ctx, synchronise=synchronise)
            trained.convert(placed)
            return placed

        left_whole = set(place(whole))
        place({id(buffer): buffer for buffer in model.buffers()}.values())
        options: dict[str, Any] = {
            "mesh": sharding.data_mesh(ctx),
            "reshard_after_forward": plugin.reshard_after_forward,
            "mp_policy": plugin.mixed_precision_policy or MixedPrecisionPolicy(),
            "offload_policy": plugin.cpu_offload,
        }
        if left_whole:
            options["ignored_params"] = left_whole
        for unit in chosen:
            own = [
                parameter
                for parameter in unit.parameters()
                if not averaged & spread_over([parameter]) and parameter not in left_whole
            ]
            placed = place(own)
            fully_shard(unit, **options)
            sharding.let_go(placed)
        if plugin.forward_prefetch:
            _prefetch(model, chosen)

    def no_sync(self, model: nn.Module) -> _Synchronised | None:
        """Accumulate whole gradients on each rank; nothing travels."""
        return _Synchronised(model, inside=False) if _is_sharded(model) else None

    def sync_in_backward(self, model: nn.Module) -> _Synchronised | None:
        """Let the next backward reduce what has been accumulated."""
        return _Synchronised(model, inside=True) if _is_sharded(model) else None


def _is_sharded(model: nn.Module) -> bool:
    from torch.distributed import fsdp

    kind = getattr(fsdp, "FSDPModule", None)  # torch 2.6
    return kind is not None and isinstance(model, kind)


def _prefetch(model: nn.Module, chosen: list[Any]) -> None:
    """Let every unit gather the next one's parameters; units run in the order in which the model holds them."""
    order = {module: index for index, module in enumerate(model.modules())}
    inner = sorted(chosen[:-1], key=lambda unit: order[unit])
    for unit, following in zip([chosen[-1], *inner], inner, strict=False):
        unit.set_modules_to_forward_prefetch([following])


PARALLELIZER = FSDP2()
