"""Whole states of a model that is cut over tensor parallel processes and stages, under Transformers' names.

Weights and the optimizer's moments have the same shapes, so both go the same way. That makes checkpoints independent of
the layout: they load at other degrees, in one process, and in Transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor, nn

from orc.runtime.engine.megatron.gpt2 import EMBEDDING, HEAD, Gpt2, Weight

Take = Callable[[nn.Parameter], Tensor]


def parameter_of(pieces: Sequence[nn.Module], weight: Weight) -> nn.Parameter | None:
    """Return this process's part of *weight*; `None` on other stages."""
    if weight.stage != parallel_state.get_pipeline_model_parallel_rank():
        return None
    return pieces[weight.piece].get_parameter(weight.ours)


def gathered(layout: Gpt2, pieces: Sequence[nn.Module], take: Take) -> dict[str, Tensor]:
    """Return by Transformers' names what *take* says of each parameter, whole, on the CPU of every rank. Collective.

    Args:
        layout: of the model.
        pieces: this process's.
        take: a tensor of the parameter's shape: itself, or a moment of the optimizer.
    """
    found = {}
    stages = parallel_state.get_pipeline_model_parallel_group()
    ranks = dist.get_process_group_ranks(stages)
    for weight in layout.weights():
        parameter = parameter_of(pieces, weight)
        if parameter is not None:
            whole = layout.to_theirs(_whole(parameter, take(parameter).detach()), weight.form).contiguous()
        if len(ranks) > 1:
            if parameter is None:
                whole = torch.empty(layout.shapes[weight.theirs], device=layout.device)
            whole = whole.float()
            dist.broadcast(whole, ranks[weight.stage], group=stages)
        found[weight.theirs] = whole.to("cpu", copy=True)
    if layout.tied and HEAD in layout.shapes:
        found[HEAD] = found[EMBEDDING]
    return found


def scattered(
    layout: Gpt2, pieces: Sequence[nn.Module], state: Mapping[str, Tensor], put: Callable[[nn.Parameter, Tensor], None]
) -> None:
    """Call *put* with each parameter here and its part of the whole *state*, which every rank has."""
    for weight in (*layout.weights(), *layout.copies()):
        parameter = parameter_of(pieces, weight)
        if parameter is not None:
            whole = layout.to_ours(state[weight.theirs], weight.form)
            put(parameter, _part(parameter, whole))


def problem(layout: Gpt2, state: Mapping[str, Any]) -> str | None:
    """Return why the whole *state* does not fit the model; `None` where it does."""
    wanted = [weight.theirs for weight in layout.weights()]
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
