"""The documented enumerations of every run; ``accelerator.distributed_type == "MULTI_CPU"`` holds. Torch-free.

They are `str`. Those of one feature are beside it.
"""

from __future__ import annotations

from enum import Enum


class StrEnum(str, Enum):
    """Enumeration whose members are their values, as `enum.StrEnum` of newer Pythons, with the documented `list`."""

    def __str__(self) -> str:
        return str.__str__(self)

    def __format__(self, format_spec: str) -> str:
        return str.__format__(self, format_spec)

    @classmethod
    def list(cls) -> list[str]:
        """Return the values of all members, in order."""
        return [str(member) for member in cls]


class DistributedType(StrEnum):
    """Kinds of distributed runs, by device or engine."""

    NO = "NO"
    MULTI_CPU = "MULTI_CPU"
    MULTI_GPU = "MULTI_GPU"
    MULTI_NPU = "MULTI_NPU"
    MULTI_MLU = "MULTI_MLU"
    MULTI_MUSA = "MULTI_MUSA"
    MULTI_SDAA = "MULTI_SDAA"
    MULTI_XPU = "MULTI_XPU"
    MULTI_HPU = "MULTI_HPU"
    MULTI_NEURON = "MULTI_NEURON"
    DEEPSPEED = "DEEPSPEED"
    FSDP = "FSDP"
    XLA = "XLA"
    TPU = "XLA"  # the older name
    MEGATRON_LM = "MEGATRON_LM"


class DynamoBackend(StrEnum):
    """Back ends of ``torch.compile``."""

    NO = "NO"
    EAGER = "EAGER"
    AOT_EAGER = "AOT_EAGER"
    INDUCTOR = "INDUCTOR"
    AOT_TS_NVFUSER = "AOT_TS_NVFUSER"
    NVPRIMS_NVFUSER = "NVPRIMS_NVFUSER"
    CUDAGRAPHS = "CUDAGRAPHS"
    OFI = "OFI"
    FX2TRT = "FX2TRT"
    ONNXRT = "ONNXRT"
    TENSORRT = "TENSORRT"
    AOT_TORCHXLA_TRACE_ONCE = "AOT_TORCHXLA_TRACE_ONCE"
    TORCHXLA_TRACE_ONCE = "TORCHXLA_TRACE_ONCE"
    TVM = "TVM"
    IPEX = "IPEX"
    HPU_BACKEND = "HPU_BACKEND"


class RNGType(StrEnum):
    """Random number generators that can be kept equal over the ranks."""

    TORCH = "torch"
    CUDA = "cuda"
    MLU = "mlu"
    MPS = "mps"
    MUSA = "musa"
    NPU = "npu"
    SDAA = "sdaa"
    XLA = "xla"
    XPU = "xpu"
    HPU = "hpu"
    GENERATOR = "generator"
