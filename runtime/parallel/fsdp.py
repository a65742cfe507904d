"""Base of the parallelizers of both versions of sharded data parallelism. Does not import torch's FSDP."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn

    from orc.runtime.core.context import RunContext
    from orc.runtime.parallel.base import Request
    from orc.runtime.parallel.fsdp_plugin import FullyShardedDataParallelPlugin


def is_instance(model: nn.Module, name: str) -> bool:
    """Return whether *model* is an instance of torch's class *name* of FSDP; it is not where that is not loaded."""
    kind = getattr(sys.modules.get("torch.distributed.fsdp"), name, None)  # another thread may be loading it
    return kind is not None and isinstance(model, kind)


def inside(model: nn.Module) -> nn.Module:
    """Return the module with the parameters of *model*, inside what earlier parallelizers put around it."""
    from orc.runtime.parallel import parallelizers

    while True:
        inner = next(
            (unwrapped for parallelizer in parallelizers() if (unwrapped := parallelizer.unwrap(model)) is not None),
            None,
        )
        if inner is None:
            return model
        model = inner


class FullySharded:
    """Parallelizer of sharded data parallelism of one version."""

    version: int
    order = 300
    default = False
    needs: tuple[str, ...] = ()
    conflicts: tuple[str, ...] = ("ddp", "xla")
    places_parameters = True
    serves: tuple[str, ...] = ()

    def wanted(self, model: nn.Module, ctx: RunContext, request: Request) -> bool:
        """With a plug-in of this version, for a model that has parameters and is not for evaluation only."""
        plugin = self.plugin(request)
        return (
            plugin is not None
            and plugin.fsdp_version == self.version
            and not request.evaluation
            and next(model.parameters(), None) is not None
        )

    def requires(self, ctx: RunContext) -> str | None:
        """An open process group of the device."""
        if not ctx.compute.device_in_group:
            return "the process group does not reach the tensors of this device"
        return "the process group is not open" if ctx.distributed and ctx.group is None else None

    def plugin(self, request: Request) -> FullyShardedDataParallelPlugin | None:
        """Return the plug-in of the Accelerator that prepares; `None` where it does not shard."""
        plugin: FullyShardedDataParallelPlugin | None = request.options.get("fsdp")
        return plugin
