"""Replicas: every process holds the whole model, gradients are averaged during backward."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from torch.nn.parallel import DistributedDataParallel

from orc.runtime.core.handlers import DistributedDataParallelKwargs
from orc.runtime.parallel.base import Parallelizer, Request

if TYPE_CHECKING:
    from torch import nn

    from orc.runtime.core.context import RunContext


class Setting:
    """Block in which the attribute *name* of *owner* is *value*, afterwards as before.

    No generator: it is entered on most steps of an accumulating loop.
    """

    __slots__ = ("_before", "_name", "_owner", "_value")

    def __init__(self, owner: object, name: str, value: bool) -> None:
        self._owner, self._name, self._value = owner, name, value

    def __enter__(self) -> None:
        self._before = getattr(self._owner, self._name)
        setattr(self._owner, self._name, self._value)

    def __exit__(self, *exc: object) -> None:
        setattr(self._owner, self._name, self._before)


class DDP(Parallelizer):
    """`torch.nn.parallel.DistributedDataParallel`."""

    name = "ddp"
    order = 400
    default = True
    synchronizes = True

    def wanted(self, model: nn.Module, ctx: RunContext, request: Request) -> bool:
        """With several processes, for a model that is trained and has something to train."""
        return (
            ctx.topology.loss_size > 1
            and ctx.compute.device_in_group
            and not request.evaluation
            and request.strategy in ("auto", self.name)
            and not isinstance(model, DistributedDataParallel)
            and any(parameter.requires_grad for parameter in model.parameters())
        )

    def apply(self, model: nn.Module, ctx: RunContext, request: Request) -> nn.Module:
        """Wrap *model*."""
        options: DistributedDataParallelKwargs = request.options.get(self.name) or DistributedDataParallelKwargs()
        hooks = ("comm_hook", "comm_wrapper", "comm_state_option")
        kwargs: dict[str, Any] = {k: v for k, v in options.to_kwargs().items() if k not in hooks}
        if ctx.device.type == "cuda" and all(p.device == ctx.device for p in model.parameters()):
            kwargs["device_ids"] = [ctx.device.index]
        group = ctx.topology.loss_group
        with warnings.catch_warnings():
            # Documented here, deprecated by torch 2.13, which has nothing that does the same yet.
            warnings.filterwarnings("ignore", "`broadcast_buffers` is deprecated", FutureWarning)
            wrapped = DistributedDataParallel(model, process_group=group, **kwargs)
        if group is not None and any(options.to_kwargs().keys() & set(hooks)):
            from orc.runtime.parallel.compression import compress_gradients

            compress_gradients(wrapped, group, options)
        return wrapped

    def no_sync(self, model: nn.Module) -> Setting | None:
        """Accumulate locally. Must cover forward too: that is where DDP decides."""
        ours = isinstance(model, DistributedDataParallel)
        return Setting(model, "require_backward_grad_sync", False) if ours else None

    def sync_in_backward(self, model: nn.Module) -> contextlib.AbstractContextManager[Any] | None:
        """Let the next backward average the accumulated gradients."""
        return _sync_in_backward(model) if isinstance(model, DistributedDataParallel) else None


@contextlib.contextmanager
def _sync_in_backward(model: DistributedDataParallel) -> Iterator[None]:
    with Setting(model, "require_backward_grad_sync", True), Setting(model, "require_forward_param_sync", True):
        # What forward would have done, had it known: an empty list means that every parameter takes part.
        model.reducer.prepare_for_backward([])
        yield


PARALLELIZER = DDP()
