"""Linear layers whose weights torchao keeps in eight or four bits; they compute in the data type of the rest."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from orc.runtime.weights.quantization.scheme import Scheme


@dataclass(frozen=True)
class WeightOnly(Scheme):
    """Weights in whole numbers with a scale for each row (``"int8"``) or group of columns (``"int4"``)."""

    weights: str
    group_size: int
    dtype: torch.dtype

    method = "torchao"
    apart = (*Scheme.apart, "replicas", "ddp", "library", "fsdp2")
    instead = 'use a BnbQuantizationConfig; with weights="int8" of torchao one process trains adapters'

    @property
    def label(self) -> str:  # type: ignore[override]
        """Name in messages."""
        return f"{self.bits}-bit (torchao)"

    @property
    def bits(self) -> int:  # type: ignore[override]
        """Bits of a weight."""
        return int(self.weights.removeprefix("int"))

    @property
    def differentiable(self) -> bool:  # type: ignore[override]
        """`False` for four bits, whose products have no derivative in torch."""
        return self.weights != "int4"

    def problem(self, linear: nn.Linear) -> str | None:
        """Return why *linear* cannot be quantized: its columns are not cut into groups evenly."""
        if self.weights == "int4" and linear.in_features % self.group_size:
            return f"group_size={self.group_size} does not divide its {linear.in_features} columns"
        return None

    def layer(self, linear: nn.Linear, weight: Tensor, device: torch.device) -> nn.Module:
        """Return the quantized layer of *linear* with *weight* on *device*."""
        from torchao.quantization import quantize_

        layer = nn.Linear(linear.in_features, linear.out_features, bias=False, device="meta")
        layer.weight = nn.Parameter(weight.detach().to(device, self.dtype), requires_grad=False)
        quantize_(layer, _workflow(self.weights, self.group_size, device))
        layer.weight.requires_grad_(False)
        layer.bias = linear.bias
        return layer


def _workflow(weights: str, group_size: int, device: torch.device) -> Any:
    """Return torchao's own configuration. What it sets in the compiler, for compiled models, stays the script's."""
    from torchao import quantization

    if weights == "int8":
        return quantization.Int8WeightOnlyConfig(set_inductor_config=False)
    if device.type == "cpu":
        try:  # packed: two weights in a byte
            from torchao.prototype.quantization.int4 import PrototypeInt4WeightOnlyConfig
        except ImportError:
            raise ImportError(
                "weights='int4' on the CPU needs a torchao that packs them there (0.18 does): pip install -U torchao, "
                "or take weights='int8'"
            ) from None
        return PrototypeInt4WeightOnlyConfig(group_size=group_size, set_inductor_config=False)
    return quantization.Int4WeightOnlyConfig(
        group_size=group_size, int4_packing_format="tile_packed_to_4d", set_inductor_config=False
    )
