"""Autocast and loss scaling for scripts that write their own loop: what the current context requests."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from orc.runtime.core.config import PRECISIONS
from orc.runtime.core.context import current_context
from orc.runtime.core.enums import DistributedType
from orc.runtime.core.handlers import AutocastKwargs
from orc.runtime.parallel.precision import precision_for


def get_mixed_precision_context_manager(
    native_amp: bool = False, autocast_kwargs: AutocastKwargs | None = None
) -> AbstractContextManager[Any]:
    """An autocast context in the mixed precision that is in force.

    Args:
        native_amp: whether mixed precision is wanted at all; without it the context does nothing.
        autocast_kwargs: options of autocast.
    """
    if not native_amp:
        return nullcontext()
    ctx = current_context()
    return precision_for(PRECISIONS[ctx.config.mixed_precision] or "no").autocast(ctx.device, autocast_kwargs)


def get_grad_scaler(distributed_type: DistributedType | str | None = None, **kwargs: Any) -> torch.amp.GradScaler:
    """Return a gradient scaler for the device of this process.

    Args:
        distributed_type: with ``FSDP`` it is one that agrees over the shards about overflows.
        kwargs: for the scaler (``init_scale``, ``growth_interval``, ...).
    """
    device = current_context().device.type
    if distributed_type == DistributedType.FSDP:
        from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

        return ShardedGradScaler(device=device, **kwargs)
    return torch.amp.GradScaler(device, **kwargs)
