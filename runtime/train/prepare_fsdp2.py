"""Sharding one model by itself, as scripts do that are written for version 2 of FSDP."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn

    from orc.runtime.accelerator import Accelerator


def fsdp2_prepare_model(accelerator: Accelerator, model: nn.Module) -> nn.Module:
    """Return *model* sharded by FSDP 2, as `Accelerator.prepare` does it.

    Args:
        accelerator: the Accelerator, which was made with a plug-in of FSDP 2.
        model: the model.

    Raises:
        ValueError: the Accelerator has no plug-in of FSDP 2.
    """
    if not accelerator.is_fsdp2:
        raise ValueError(
            "fsdp2_prepare_model: pass Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2))"
        )
    return accelerator.prepare_model(model)
