"""Configurations that `load_and_quantize_model` takes: which layers to quantize, and how."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from orc.runtime.core.availability import is_4bit_bnb_available, is_8bit_bnb_available, is_torchao_available

if TYPE_CHECKING:
    from orc.runtime.weights.quantization.scheme import Scheme

_SHORT = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
_GROUP_SIZES = (32, 64, 128, 256)


@dataclass
class BnbQuantizationConfig:
    """Linear layers in eight or four bits by bitsandbytes.

    Args:
        load_in_8bit: quantize to eight bits.
        llm_int8_threshold: inputs above it are outliers, whose columns compute in sixteen bits (eight bits only).
        load_in_4bit: quantize to four bits.
        bnb_4bit_quant_type: ``"fp4"``, or ``"nf4"`` for weights that are normally distributed.
        bnb_4bit_use_double_quant: quantize the constants of quantization too.
        bnb_4bit_compute_dtype: data type of the computation: ``"fp32"``, ``"fp16"``, ``"bf16"`` or torch's own.
        torch_dtype: of the layers that are not quantized; by default float16 with eight bits, and what computes with
            four.
        skip_modules: names of modules that are not quantized (``"lm_head"``, ``"h.0"``); by default the output layer,
            and layers that share their weight with another module.
        keep_in_fp32_modules: names of modules that are not quantized and stay in float32.

    Raises:
        ValueError: values that are none; all of them are listed.
    """

    load_in_8bit: bool = False
    llm_int8_threshold: float = 6.0
    load_in_4bit: bool = False
    bnb_4bit_quant_type: str = "fp4"
    bnb_4bit_use_double_quant: bool = False
    bnb_4bit_compute_dtype: str | torch.dtype = "fp16"
    torch_dtype: torch.dtype | str | None = None
    skip_modules: Sequence[str] | None = None
    keep_in_fp32_modules: Sequence[str] | None = None

    def __post_init__(self) -> None:
        wrong = _not_flags(self, "load_in_8bit", "load_in_4bit", "bnb_4bit_use_double_quant")
        if not wrong and self.load_in_8bit == self.load_in_4bit:
            both = "not both" if self.load_in_8bit else "neither was given"
            wrong.append(f"load_in_8bit and load_in_4bit: choose one of them ({both})")
        threshold = self.llm_int8_threshold
        if not isinstance(threshold, (int, float)) or isinstance(threshold, bool) or threshold < 0:
            wrong.append(f"llm_int8_threshold={threshold!r} is no number from 0 on")
        if self.bnb_4bit_quant_type not in ("fp4", "nf4"):
            wrong.append(f"bnb_4bit_quant_type={self.bnb_4bit_quant_type!r} is neither 'fp4' nor 'nf4'")
        compute = _dtype(self.bnb_4bit_compute_dtype, "bnb_4bit_compute_dtype", wrong)
        rest = _dtype(self.torch_dtype, "torch_dtype", wrong)
        wrong += _not_lists(self, "skip_modules", "keep_in_fp32_modules")
        _refuse(self, wrong)
        self.bnb_4bit_compute_dtype = compute or torch.float16
        self.torch_dtype = rest or (torch.float16 if self.load_in_8bit else self.bnb_4bit_compute_dtype)

    def scheme(self) -> Scheme:
        """Return how layers are quantized.

        Raises:
            ImportError: bitsandbytes is not installed, or too old.
        """
        there = is_8bit_bnb_available() if self.load_in_8bit else is_4bit_bnb_available()
        if not there:
            raise ImportError("BnbQuantizationConfig needs bitsandbytes: pip install bitsandbytes")
        from orc.runtime.weights.quantization import bnb

        if self.load_in_8bit:
            return bnb.EightBit(self.llm_int8_threshold)
        assert isinstance(self.bnb_4bit_compute_dtype, torch.dtype)
        assert isinstance(self.torch_dtype, torch.dtype)
        return bnb.FourBit(
            self.bnb_4bit_quant_type, self.bnb_4bit_use_double_quant, self.bnb_4bit_compute_dtype, self.torch_dtype
        )


@dataclass
class TorchAoQuantizationConfig:
    """Linear layers in eight or four bits by torchao: weights only, the computation is in `torch_dtype`.

    Args:
        weights: ``"int8"`` (a scale for each row) or ``"int4"`` (a scale for each group of columns).
        group_size: columns of a group: 32, 64, 128 or 256 (four bits only).
        torch_dtype: of the computation, and of the layers that are not quantized; bfloat16 by default.
        skip_modules: names of modules that are not quantized; by default as in `BnbQuantizationConfig`.
        keep_in_fp32_modules: names of modules that are not quantized and stay in float32.

    Raises:
        ValueError: values that are none; all of them are listed.
    """

    weights: str = "int8"
    group_size: int = 128
    torch_dtype: torch.dtype | str | None = None
    skip_modules: Sequence[str] | None = None
    keep_in_fp32_modules: Sequence[str] | None = None

    def __post_init__(self) -> None:
        wrong: list[str] = []
        if self.weights not in ("int8", "int4"):
            wrong.append(f"weights={self.weights!r} is neither 'int8' nor 'int4'")
        if self.group_size not in _GROUP_SIZES:
            wrong.append(f"group_size={self.group_size!r} is none of {', '.join(map(str, _GROUP_SIZES))}")
        rest = _dtype(self.torch_dtype, "torch_dtype", wrong)
        wrong += _not_lists(self, "skip_modules", "keep_in_fp32_modules")
        _refuse(self, wrong)
        self.torch_dtype = rest or torch.bfloat16

    def scheme(self) -> Scheme:
        """Return how layers are quantized.

        Raises:
            ImportError: torchao is not installed.
        """
        if not is_torchao_available():
            raise ImportError("TorchAoQuantizationConfig needs torchao: pip install torchao")
        from orc.runtime.weights.quantization import ao

        assert isinstance(self.torch_dtype, torch.dtype)
        return ao.WeightOnly(self.weights, self.group_size, self.torch_dtype)


QuantizationConfig = BnbQuantizationConfig | TorchAoQuantizationConfig


def _not_flags(config: Any, *names: str) -> list[str]:
    return [f"{name}={value!r} is no bool" for name in names if not isinstance(value := getattr(config, name), bool)]


def _not_lists(config: Any, *names: str) -> list[str]:
    wrong = []
    for name in names:
        value = getattr(config, name)
        listed = isinstance(value, (list, tuple, set)) and all(isinstance(item, str) for item in value)
        if value is not None and not listed:
            wrong.append(f"{name}={value!r} is no list of names")
    return wrong


def _dtype(value: Any, name: str, wrong: list[str]) -> torch.dtype | None:
    dtype = value
    if isinstance(value, str):
        dtype = _SHORT.get(value) or getattr(torch, value.removeprefix("torch."), value)
    if dtype is None or (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        return dtype
    wrong.append(f"{name}={value!r} is none of 'fp32', 'fp16', 'bf16' and no floating-point dtype of torch")
    return None


def _refuse(config: Any, wrong: Sequence[str]) -> None:
    if wrong:
        raise ValueError(f"{type(config).__name__}: {'; '.join(wrong)}")
