"""Whole states of a model that is cut over tensor parallel processes and stages, under Transformers' names.

Weights and the optimizer's moments have the same shapes, so both go the same way. That makes checkpoints independent of
the layout: they load at other degrees, in one process, and in Transformers.

Behind parameters are `Masters`: Megatron-LM's optimizer keeps a float32 copy of every weight of 16 bits, which is what
it trains; the distributed one gives each data parallel process a range of the elements of some parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor, nn

from orc.runtime.engine.megatron.layout import Layout, Weight

Take = Callable[[nn.Parameter], Tensor]


def parameter_of(pieces: Sequence[nn.Module], weight: Weight) -> nn.Parameter | None:
    """Return this process's part of *weight*; `None` on other stages."""
    if weight.stage != parallel_state.get_pipeline_model_parallel_rank():
        return None
    return pieces[weight.piece].get_parameter(weight.ours)


def gathered(layout: Layout, pieces: Sequence[nn.Module], take: Take) -> dict[str, Tensor]:
    """Return by Transformers' names the result of *take* for each parameter, whole, on every rank's CPU. Collective.

    It is float32 at every layout and in every precision.

    Args:
        layout: of the model.
        pieces: this process's.
        take: a tensor of the parameter's shape: itself, or a moment of the optimizer.
    """
    weights: dict[str, Tensor] = {}
    stages = parallel_state.get_pipeline_model_parallel_group()
    ranks = dist.get_process_group_ranks(stages)
    for weight in layout.weights():
        parameter = parameter_of(pieces, weight)
        if parameter is not None:
            parts = layout.to_theirs(_whole(parameter, take(parameter).detach().float()), weight)
        for index, name in enumerate(weight.theirs):
            if parameter is not None:
                whole = parts[index].contiguous()
            else:
                whole = torch.empty(layout.shapes[name], device=layout.device)
            if len(ranks) > 1:
                dist.broadcast(whole, ranks[weight.stage], group=stages)
            weights[name] = whole.to("cpu", copy=True)
    return {name: weights[layout.aliases.get(name, name)] for name in layout.shapes}


def scattered(
    layout: Layout,
    pieces: Sequence[nn.Module],
    state: Mapping[str, Tensor],
    put: Callable[[nn.Parameter, Tensor], None],
) -> None:
    """Call *put* with each parameter here and its part of the whole *state*, which every rank has."""
    for weight in (*layout.weights(), *layout.copies()):
        parameter = parameter_of(pieces, weight)
        if parameter is not None:
            whole = layout.to_ours([state[name] for name in weight.theirs], weight)
            put(parameter, _part(parameter, whole))


def problem(layout: Layout, state: Mapping[str, Any]) -> str | None:
    """Return why the whole *state* does not fit the model; `None` where it does."""
    wanted = [name for weight in layout.weights() for name in weight.theirs]
    if missing := [name for name in wanted if name not in state]:
        return f"missing: {', '.join(missing[:5])}"
    if unexpected := sorted(name for name in state if name not in layout.shapes):
        return f"unexpected: {', '.join(unexpected[:5])}"
    for name in wanted:
        if tuple(state[name].shape) != layout.shapes[name]:
            return f"size mismatch of {name}: {list(state[name].shape)}, {list(layout.shapes[name])} here"
    return None


def _whole(parameter: nn.Parameter, value: Tensor) -> Tensor:
    """Return *value* joined over the tensor parallel processes, where *parameter* is cut."""
    group = parallel_state.get_tensor_model_parallel_group()
    size = dist.get_world_size(group)
    if size == 1 or not getattr(parameter, "tensor_model_parallel", False):
        return value
    parts = [torch.empty_like(value, memory_format=torch.contiguous_format) for _ in range(size)]
    dist.all_gather(parts, value.contiguous(), group=group)
    return torch.cat(parts, dim=parameter.partition_dim)  # type: ignore[attr-defined]


def _part(parameter: nn.Parameter, whole: Tensor) -> Tensor:
    """Return this process's part of *whole*."""
    group = parallel_state.get_tensor_model_parallel_group()
    size = dist.get_world_size(group)
    if size == 1 or not getattr(parameter, "tensor_model_parallel", False):
        return whole
    return whole.chunk(size, dim=parameter.partition_dim)[dist.get_rank(group)]  # type: ignore[attr-defined]


class Masters:
    """Tensors that an optimizer trains in the place of parameters.

    Args:
        inner: Megatron-LM's optimizer of one kind of parameters.
        shards: it is the distributed one.
    """

    def __init__(self, inner: Any, shards: bool) -> None:
        self._inner, self._shards = inner, shards

    def of(self, parameter: nn.Parameter) -> Tensor | None:
        """Return the tensor that is trained for *parameter*; `None` where other processes have all of it."""
        if not self._shards:
            master: Tensor = getattr(parameter, "main_param", parameter)
            return master
        place = self._inner.model_param_group_index_map.get(parameter)
        if place is None:
            return None
        group, index = place
        shard: Tensor = self._inner.optimizer.param_groups[group]["params"][index]
        return shard

    def whole(self, parameter: nn.Parameter, value: Tensor | None) -> Tensor:
        """Return all of *value*, of which this process has what belongs to `of`. Collective over the copies."""
        if not self._shards:
            return torch.zeros_like(parameter, dtype=torch.float32) if value is None else value.float()
        joined = torch.zeros(parameter.numel(), device=parameter.device)
        if value is not None:
            joined[self._range(parameter)] = value.float().reshape(-1)
        dist.all_reduce(joined, group=parallel_state.get_data_parallel_group())
        return joined.view_as(parameter)

    def share(self, parameter: nn.Parameter, whole: Tensor) -> Tensor:
        """Return the share of *whole*, of the parameter's shape, that belongs to `of`."""
        return whole.reshape(-1)[self._range(parameter)] if self._shards else whole

    def read(self, parameter: nn.Parameter) -> Tensor:
        """Return the float32 values behind *parameter*. Collective over the copies where they are sharded."""
        main = self.of(parameter)
        return self.whole(parameter, None if main is None else main.detach())

    def write(self, parameter: nn.Parameter, whole: Tensor) -> None:
        """Give *parameter*, and what is behind it, the values *whole*."""
        with torch.no_grad():
            parameter.copy_(whole)
            main = self.of(parameter)
            if main is not None and main is not parameter:
                main.copy_(self.share(parameter, whole))

    def _range(self, parameter: nn.Parameter) -> slice:
        ranges = self._inner._get_model_param_range_map(parameter)["param"]
        return slice(ranges.start, ranges.end)
