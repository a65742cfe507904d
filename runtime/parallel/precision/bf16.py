"""Mixed precision with bfloat16: the range of float32, so that nothing needs scaling."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

import torch

from orc.runtime.core.errors import LaunchError
from orc.runtime.parallel.precision import Precision

if TYPE_CHECKING:
    from orc.runtime.core.context import RunContext


class BF16(Precision):
    """Autocast to bfloat16."""

    name = "bf16"
    dtype = torch.bfloat16

    def check(self, ctx: RunContext) -> None:
        """Raise `LaunchError` on a GPU that is too old for bfloat16, and warn on one that emulates it (V100, T4)."""
        if ctx.device.type != "cuda" or torch.cuda.is_bf16_supported(including_emulation=False):
            return
        gpu = torch.cuda.get_device_name(ctx.device)
        if not torch.cuda.is_bf16_supported():
            raise LaunchError(f"mixed_precision={self.name} needs a newer GPU than {gpu}; use fp16")
        if ctx.is_local_main:
            warnings.warn(
                f"mixed_precision={self.name}: {gpu} has no bfloat16 and emulates it, which is slower than float32; "
                "fp16 is fast there",
                stacklevel=2,
            )


PRECISION = BF16
