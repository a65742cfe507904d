"""Values behind a model's parameters in its optimizer: float32 copies of 16-bit weights, and moments, whole or sharded.

Megatron-LM's optimizer keeps a float32 copy of every weight of 16 bits, which is what it trains. Its distributed
optimizer gives each data parallel process a range of the elements of some parameters.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor, nn


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
