"""Copies of models whose parameters are cut: gradients are averaged over them in buckets, while backward goes on.

`torch.nn.parallel.DistributedDataParallel` takes plain parameters only, and would put local tensors in the place of
DTensors; here the parameters stay what they are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn

from orc.runtime.core.handlers import DistributedDataParallelKwargs
from orc.runtime.parallel import sharding
from orc.runtime.parallel.base import Parallelizer, Request
from orc.runtime.parallel.ddp import Setting
from orc.runtime.parallel.shards import local_part

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from orc.runtime.core.context import RunContext


class Averaging:
    """Averaging of the gradients of *parameters* over *group*, in buckets of *limit* bytes.

    A bucket travels when all before it have, so that every rank sends the same ones in the same order; what no rank has
    a gradient for counts as zero.
    """

    def __init__(self, parameters: list[nn.Parameter], group: ProcessGroup, limit: int) -> None:
        self.synchronise = True
        self._group = group
        self._buckets: list[list[nn.Parameter]] = []
        self._bucket_of: dict[int, int] = {}
        full: dict[Any, tuple[int, int]] = {}  # the open bucket of each kind, and its bytes
        for parameter in reversed(parameters):  # about the order in which backward is done with them
            bucket, size = full.get((parameter.dtype, parameter.device), (-1, limit))
            if size >= limit:
                self._buckets.append([])
                bucket, size = len(self._buckets) - 1, 0
            self._buckets[bucket].append(parameter)
            self._bucket_of[id(parameter)] = bucket
            full[parameter.dtype, parameter.device] = bucket, size + local_part(parameter).nbytes
            parameter.register_post_accumulate_grad_hook(self._ready)
        self._missing: list[int] = []
        self._works: list[tuple[int, Tensor, Any]] = []
        self._backward = -1  # the one that is going on

    def _ready(self, parameter: Tensor) -> None:
        if not self.synchronise:
            return
        backward = torch._C._current_graph_task_id()
        if backward != self._backward:  # also after one that broke off, which never finished
            self._backward, self._works, self._missing = backward, [], [len(bucket) for bucket in self._buckets]
            torch.autograd.Variable._execution_engine.queue_callback(self._finish)
        self._missing[self._bucket_of[id(parameter)]] -= 1
        while len(self._works) < len(self._buckets) and self._missing[len(self._works)] <= 0:
            self._send()

    def _send(self) -> None:
        bucket = self._buckets[len(self._works)]
        parts = [
            torch.zeros_like(local_part(parameter)) if parameter.grad is None else local_part(_alike(parameter))
            for parameter in bucket
        ]
        flat = torch.cat([part.reshape(-1) for part in parts]).div_(self._group.size())
        self._works.append((len(self._works), flat, dist.all_reduce(flat, group=self._group, async_op=True)))

    def _finish(self) -> None:
        self._backward = -1
        while len(self._works) < len(self._buckets):
            self._send()
        for index, flat, work in self._works:
            work.wait()
            bucket = self._buckets[index]
            for parameter, part in zip(
                bucket, flat.split([local_part(parameter).numel() for parameter in bucket]), strict=True
            ):
                if parameter.grad is None:
                    if not part.any():
                        continue  # no copy has used it
                    parameter.grad = torch.zeros_like(parameter)
                gradient = local_part(parameter.grad)
                gradient.copy_(part.view_as(gradient))
        self._works = []


_averaged: WeakKeyDictionary[nn.Module, Averaging] = WeakKeyDictionary()


class Replicas(Parallelizer):
    """Averaged gradients of models that are cut along ``tp``, and copied along the dimensions of losses."""

    name = "replicas"
    order = 400
    default = True
    synchronizes = True
    conflicts: tuple[str, ...] = ("fsdp2",)

    def wanted(self, model: nn.Module, ctx: RunContext, request: Request) -> bool:
        """With several copies of a model that is cut and trained."""
        topology = ctx.topology
        return (
            topology.loss_size > 1
            and topology.size("tp") > 1
            and not request.evaluation
            and any(parameter.requires_grad for parameter in model.parameters())
        )

    def apply(self, model: nn.Module, ctx: RunContext, request: Request) -> nn.Module:
        """Give all copies the values of the first, and let backward average their gradients."""
        options: DistributedDataParallelKwargs = request.options.get("ddp") or DistributedDataParallelKwargs()
        group = ctx.topology.loss_group
        assert group is not None
        sharding.place([*model.parameters(), *model.buffers()], ctx.device, ctx, synchronise=True)
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        _averaged[model] = Averaging(trained, group, options.bucket_cap_mb * 2**20)
        return model

    def no_sync(self, model: nn.Module) -> Setting | None:
        """Accumulate locally."""
        averaging = _averaged.get(model)
        return None if averaging is None else Setting(averaging, "synchronise", False)

    def sync_in_backward(self, model: nn.Module) -> Setting | None:
        """Let the next backward average what has been accumulated."""
        averaging = _averaged.get(model)
        return None if averaging is None else Setting(averaging, "synchronise", True)


def _alike(parameter: Any) -> Any:
    """The gradient of *parameter*, cut as it is: backward may leave it whole, or in parts to be summed."""
    gradient = parameter.grad
    if getattr(gradient, "placements", None) != getattr(parameter, "placements", None):
        parameter.grad = gradient = gradient.redistribute(placements=parameter.placements)
    return gradient


PARALLELIZER = Replicas()
