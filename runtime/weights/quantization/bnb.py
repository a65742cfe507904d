"""Linear layers of bitsandbytes: eight bits (LLM.int8) and four (NF4, FP4)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from orc.runtime.weights.quantization.scheme import Scheme

_FORMAT = torch.tensor(0, dtype=torch.uint8)  # by rows, the only one there is


class OffloadedLinear8bitLt(nn.Linear):
    """Linear layer in eight bits whose weight comes for its forward alone.

    A `Linear8bitLt` of bitsandbytes keeps its weight in several places once it was used. Here it is a parameter like
    any other, which hooks bring and take; its scales, a number for each row, stay.
    """

    def __init__(self, linear: nn.Linear, threshold: float, weight: Tensor, scales: Tensor) -> None:
        super().__init__(linear.in_features, linear.out_features, bias=False, device="meta")
        self.threshold = threshold
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.bias = linear.bias
        self.SCB: Tensor
        self.register_buffer("SCB", scales)

    def forward(self, x: Tensor) -> Tensor:
        """Return the layer's result for *x*."""
        import bitsandbytes

        state = bitsandbytes.MatmulLtState()
        state.threshold, state.has_fp16_weights, state.is_training = self.threshold, False, False
        state.CB, state.SCB = self.weight.data, self.SCB
        bias = None if self.bias is None else self.bias.to(x.dtype)
        result: Tensor = bitsandbytes.matmul(x, self.weight, bias=bias, state=state)
        return result

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}weight_format"] = _FORMAT.clone()


@dataclass(frozen=True)
class EightBit(Scheme):
    """Weights in eight bits, a scale for each row; columns of inputs above *threshold* compute in sixteen."""

    threshold: float

    label = "8-bit (bitsandbytes)"
    apart = (*Scheme.apart, "fsdp2")
    instead = "train adapters with DDP or with DeepSpeed below stage 3, or load in four bits for FSDP version 2"
    method = "bitsandbytes"
    offloads = True
    saves = True
    suffixes = (".SCB", ".weight_format")

    def layer(self, linear: nn.Linear, weight: Tensor, device: torch.device) -> nn.Module:
        """Return the quantized layer of *linear* with *weight* on *device*."""
        return self._made(linear, _int8(weight, device))

    def offloaded_layer(self, linear: nn.Linear, weight: Tensor, device: torch.device) -> nn.Module:
        """Return the layer with its weight, quantized on *device*, in host memory."""
        quantized = _int8(weight, device)
        return OffloadedLinear8bitLt(linear, self.threshold, quantized.data.cpu(), quantized.SCB)

    def restored_layer(self, linear: nn.Linear, weight: Tensor, saved: dict[str, Tensor], offloaded: bool) -> nn.Module:
        """Return the layer out of a *weight* in eight bits and its scales."""
        scales = saved[".SCB"]
        if offloaded:
            return OffloadedLinear8bitLt(linear, self.threshold, weight, scales)
        from bitsandbytes.nn import Int8Params

        return self._made(
            linear, Int8Params(weight, requires_grad=False, has_fp16_weights=False, CB=weight, SCB=scales)
        )

    def _made(self, linear: nn.Linear, weight: Any) -> nn.Module:
        from bitsandbytes.nn import Linear8bitLt

        layer: nn.Module = Linear8bitLt(
            linear.in_features, linear.out_features, linear.bias is not None, has_fp16_weights=False,
            threshold=self.threshold, device="meta",
        )  # fmt: skip
        layer.weight, layer.bias = weight, linear.bias
        layer.register_load_state_dict_pre_hook(_scales_at_weight)
        return layer


def _scales_at_weight(layer: Any, *_: Any) -> None:
    """Put the scales where loading a state dict looks for them; the first forward takes them away from there."""
    if layer.weight.SCB is None:
        layer.weight.SCB = layer.state.SCB


def _int8(weight: Tensor, device: torch.device) -> Any:
    from bitsandbytes.nn import Int8Params

    return Int8Params(weight.detach().cpu(), requires_grad=False, has_fp16_weights=False).to(device)  # quantizes


@dataclass(frozen=True)
class FourBit(Scheme):
    """Weights in four bits, a scale for each block of 64."""

    kind: str
    double: bool
    compute_dtype: torch.dtype
    dtype: torch.dtype

    label = "4-bit (bitsandbytes)"
    instead = "train adapters with DDP, FSDP version 2 or DeepSpeed below stage 3"
    method = "bitsandbytes"
    bits = 4

    def layer(self, linear: nn.Linear, weight: Tensor, device: torch.device) -> nn.Module:
        """Return the quantized layer of *linear* with *weight* on *device*."""
        from bitsandbytes.nn import Linear4bit, Params4bit

        layer: nn.Module = Linear4bit(
            linear.in_features, linear.out_features, linear.bias is not None, compute_dtype=self.compute_dtype,
            compress_statistics=self.double, quant_type=self.kind, device="meta",
        )  # fmt: skip
        layer.weight = Params4bit(
            weight.detach().to(self.dtype), requires_grad=False, compress_statistics=self.double,
            quant_type=self.kind, module=layer,
        ).to(device)  # fmt: skip
        layer.bias = linear.bias
        layer.register_load_state_dict_pre_hook(_weight_of_state)
        if linear.in_features % 64 or linear.out_features % 32:
            layer.support_avx512bf16_for_cpu = False  # type: ignore[assignment]  # its kernel packs whole blocks alone
        return layer


def _weight_of_state(layer: Any, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Make the weight of a checkpoint's *state*, and the constants beside it, the weight of *layer*."""
    name = f"{prefix}weight"
    beside = {key.removeprefix(f"{name}."): state.pop(key) for key in list(state) if key.startswith(f"{name}.")}
    if beside and name in state:
        from bitsandbytes.nn import Params4bit

        layer.weight = Params4bit.from_prequantized(
            state[name].clone(), beside, requires_grad=False, device=layer.weight.device, module=layer
        )
        state[name] = layer.weight
