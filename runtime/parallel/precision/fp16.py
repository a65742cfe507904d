"""Mixed precision with float16: losses are scaled, so that small gradients do not vanish."""

from __future__ import annotations

import torch

from orc.runtime.core.handlers import GradScalerKwargs
from orc.runtime.parallel.precision.base import Precision


class FP16(Precision):
    """Autocast to float16, and a loss scaler."""

    name = "fp16"
    dtype = torch.float16

    def scaler(
        self, device: torch.device, options: GradScalerKwargs | None = None, *, flattened: bool = False
    ) -> torch.amp.GradScaler:
        """The loss scaler."""
        kwargs = options.to_kwargs() if options else {}
        if flattened:
            from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

            return ShardedGradScaler(device.type, **kwargs)
        return torch.amp.GradScaler(device.type, **kwargs)


PRECISION = FP16
