"""Mixed precision with float16: losses are scaled, so that small gradients do not vanish.

Source: Micikevicius et al., Mixed Precision Training, arXiv:1710.03740, section 3.2.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from orc.runtime.core.handlers import GradScalerKwargs
from orc.runtime.parallel.precision import Precision
from orc.runtime.parallel.shards import local_part


class LossScaler(torch.amp.GradScaler):
    """torch's, for gradients that are cut over ranks too, alone or beside whole ones: all ranks see every overflow.

    torch's own takes no list of both, and asks the other ranks as the first gradient of a list is cut.
    """

    def _unscale_grads_(
        self, optimizer: torch.optim.Optimizer, inv_scale: torch.Tensor, found_inf: torch.Tensor, allow_fp16: bool
    ) -> dict[torch.device, torch.Tensor]:
        every = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        cut = [parameter for parameter in every if hasattr(parameter, "device_mesh")]
        if not cut:
            return super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)
        rest = [parameter for parameter in every if not hasattr(parameter, "device_mesh")]
        whole: Any = SimpleNamespace(param_groups=[{"params": rest}])
        overflows = [found_inf, *super()._unscale_grads_(whole, inv_scale, found_inf, allow_fp16).values()]
        held: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
        for gradient in (local_part(parameter.grad) for parameter in cut if parameter.grad is not None):
            if gradient.dtype == torch.float16 and not allow_fp16:
                raise ValueError("Attempting to unscale FP16 gradients.")
            held.setdefault((gradient.device, gradient.dtype), []).append(gradient)
        for (device, _), gradients in held.items():
            overflows.append(torch.zeros((), dtype=torch.float32, device=device))
            torch._amp_foreach_non_finite_check_and_unscale_(gradients, overflows[-1], inv_scale.to(device))
        worst = torch.stack([overflow.to(found_inf.device) for overflow in overflows]).amax()
        dist.all_reduce(worst, dist.ReduceOp.MAX)
        return {worst.device: worst}


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
        return LossScaler(device.type, **kwargs)


PRECISION = FP16
