"""Models of which each process holds a part alone, as whole parameters (the stages of a pipeline).

Where a parameter lies is said by `Partition`; `whole` brings the values of all parts together.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from orc.runtime.collectives.objects import all_gather_pickled
from orc.runtime.parallel.replacements import order_of

if TYPE_CHECKING:
    from orc.runtime.core.context import RunContext

_ATTRIBUTE = "_orc_partition"


@dataclass(frozen=True, eq=False)
class Partition:
    """Partition of one model over the ranks of a group.

    Attributes:
        ctx: the run as one of the ranks that hold the parts: its rank is the place of the part of this process.
        names: those of the whole state dict, in its order.
        aliases: the names of parameters that have several, with the first name of each.
        holders: the places of those that hold a parameter, by first name; of parameters with several holders.
    """

    ctx: RunContext
    names: Sequence[str]
    aliases: Mapping[str, str] = field(default_factory=dict)
    holders: Mapping[str, Sequence[int]] = field(default_factory=dict)

    def global_rank(self, place: int) -> int:
        """Return the rank in the run of the one at *place*."""
        return dist.get_global_rank(self.ctx.require_group("the parts of a model"), place)

    @property
    def elsewhere(self) -> list[str]:
        """The first names of parameters that an earlier place holds, too."""
        return [name for name, places in self.holders.items() if places[0] != self.ctx.rank]


def set_partition(model: nn.Module, partition: Partition) -> None:
    """Note that *model* has a part of its parameters alone."""
    object.__setattr__(model, _ATTRIBUTE, partition)


def partition_of(model: nn.Module) -> Partition | None:
    """Return what *model*, or the one inside it, was noted to be a part of."""
    return next(
        (partition for module in model.modules() if (partition := module.__dict__.get(_ATTRIBUTE)) is not None), None
    )


def whole_model(partition: Partition, state: Mapping[str, Any], *, keep: bool) -> dict[str, Any]:
    """Return the state dict of the whole model from that of each part; on every process, which calls it.

    Without *keep* this process takes part, and gets an empty one.
    """
    values = whole(partition.ctx, {(name,): value for name, value in state.items()}, keep=keep)
    complete = {}
    for name in partition.names:
        path = next((path for path in ((name,), (partition.aliases.get(name),)) if path in values), None)
        if path is not None:
            complete[name] = values[path]  # one tensor where it is one
    for alias, first in partition.aliases.items():
        if alias in complete and first in complete:
            complete[alias] = complete[first]
    return complete


def whole_optimizer(
    partition: Partition, optimizer: torch.optim.Optimizer, names: Mapping[int, str], *, keep: bool
) -> dict[str, Any]:
    """Return the state of *optimizer* by the positions that all parameters had before it let go of those elsewhere.

    *names* are those of the parameters that it has, by position.

    Raises:
        ValueError: it was made from the parameters of one part.
    """
    state = optimizer.state_dict()
    local = {
        (names[position], key): value for position, values in state["state"].items() for key, value in values.items()
    }
    check_orders(partition.ctx, [optimizer])
    states = whole(partition.ctx, local, keep=keep)
    order = _order(optimizer)
    positions = {name: position for position, name in enumerate(name for group in order for name in group)}
    values: dict[int, dict[str, Any]] = {}
    for (name, key), value in states.items():
        values.setdefault(positions[name], {})[key] = value
    groups, first = [], 0
    for group, members in zip(state["param_groups"], order, strict=True):
        groups.append({**group, "params": list(range(first, first + len(members)))})
        first += len(members)
    return {"state": dict(sorted(values.items())), "param_groups": groups} if keep else {}


def part_of_optimizer(
    optimizer: torch.optim.Optimizer, names: Mapping[int, str], state: Mapping[str, Any]
) -> dict[str, Any]:
    """Return what of the whole *state* belongs to *optimizer*, by its own positions; *names* as for `whole_optimizer`.

    Raises:
        ValueError: the groups of the state have other sizes.
    """
    order = _order(optimizer)
    saved = [len(group["params"]) for group in state["param_groups"]]
    if saved != [len(group) for group in order]:
        raise ValueError(
            f"it has parameter groups of {saved} parameters, the optimizer here has {[len(group) for group in order]}"
        )
    places = [place for group in state["param_groups"] for place in group["params"]]
    by_name = dict(zip((name for group in order for name in group), places, strict=True))
    values = {
        position: state["state"][by_name[name]] for position, name in names.items() if by_name[name] in state["state"]
    }
    groups, first = [], 0
    for saved_group, group in zip(state["param_groups"], optimizer.param_groups, strict=True):
        groups.append({**saved_group, "params": list(range(first, first + len(group["params"])))})
        first += len(group["params"])
    return {"state": values, "param_groups": groups}


def check_orders(ctx: RunContext, optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Raise `ValueError` on all ranks of *ctx* unless each of *optimizers* was made from the whole model on all."""
    orders = [order_of(optimizer) for optimizer in optimizers]
    told = all_gather_pickled(orders, ctx, "comparing optimizers")
    for index, optimizer in enumerate(optimizers):
        if any(other[index] != told[0][index] or other[index] is None for other in told):
            raise ValueError(
                f"{type(optimizer).__name__} was made from the parameters of one stage: its state would have no order "
                "in the whole model. Make it from model.parameters() before prepare, and prepare both"
            )


def _order(optimizer: torch.optim.Optimizer) -> list[list[str]]:
    order = order_of(optimizer)
    if order is None:
        raise ValueError(f"{type(optimizer).__name__} is not prepared: prepare it with its model")
    return order


def whole(ctx: RunContext, local: Mapping[Any, Any], *, keep: bool) -> dict[Any, Any]:
    """Return the values that the ranks of *ctx* have under different keys; tensors on the CPU, without *keep* none.

    The first rank that has a key counts. Shards (DTensors) are gathered from those that share them.
    """
    facts = {key: _fact(value) for key, value in local.items()}
    told = all_gather_pickled(facts, ctx, "gathering the parts of a model")
    group = ctx.require_group("gathering the parts of a model")
    values: dict[Any, Any] = {}
    for place, key, fact in _first(told):
        if not isinstance(fact, tuple):
            values[key] = fact[0]
            continue
        if place == ctx.rank:
            value = local[key]
            value = value.full_tensor() if hasattr(value, "full_tensor") else value
            tensor = value.detach().to(ctx.device).contiguous()
        else:
            tensor = torch.empty(fact[0], dtype=fact[1], device=ctx.device)
        dist.broadcast(tensor, dist.get_global_rank(group, place), group)
        if keep:
            values[key] = (
                tensor.cpu() if tensor.device.type != "cpu" else tensor.clone() if place == ctx.rank else tensor
            )
    return values if keep else {}


def _fact(value: Any) -> tuple[torch.Size, torch.dtype] | list[Any]:
    """Shape and dtype of a tensor; anything else, in a list."""
    return (value.shape, value.dtype) if isinstance(value, Tensor) else [value]


def _first(told: Sequence[Mapping[Any, Any]]) -> Iterator[tuple[int, Any, Any]]:
    seen: set[Any] = set()
    for place, facts in enumerate(told):
        for key, fact in facts.items():
            if key not in seen:
                seen.add(key)
                yield place, key, fact


def keep_only(model: nn.Module, kept: Collection[str]) -> None:
    """Let *model* forget its parameters and buffers but those whose names are *kept*."""
    for prefix, module in model.named_modules():
        for table in (module._parameters, module._buffers):
            for name in table:
                if (f"{prefix}.{name}" if prefix else name) not in kept:
                    table[name] = None
