"""The documented option objects of prepared models: keyword handlers of autocast and of DDP. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from orc.runtime.core.enums import StrEnum
from orc.runtime.core.handlers import KwargsHandler


class DDPCommunicationHookType(StrEnum):
    """Gradient compression of data-parallel training."""

    NO = "no"
    FP16 = "fp16"
    BF16 = "bf16"
    POWER_SGD = "power_sgd"
    BATCHED_POWER_SGD = "batched_power_sgd"


@dataclass
class AutocastKwargs(KwargsHandler):
    """Options of ``torch.autocast``."""

    enabled: bool = True
    cache_enabled: bool | None = None


@dataclass
class DistributedDataParallelKwargs(KwargsHandler):
    """Options of ``torch.nn.parallel.DistributedDataParallel``, and of gradient compression (``comm_*``).

    Attributes:
        comm_hook: how gradients travel: ``no``, ``fp16``, ``bf16``, ``power_sgd`` or ``batched_power_sgd``.
        comm_wrapper: cast what the hook gets to ``fp16`` or ``bf16``.
        comm_state_option: options of the hook's state, for PowerSGD those of torch's ``PowerSGDState``
            (``{"matrix_approximation_rank": 2}``).
    """

    dim: int = 0
    broadcast_buffers: bool = True
    bucket_cap_mb: int = 25
    find_unused_parameters: bool = False
    check_reduction: bool = False
    gradient_as_bucket_view: bool = False
    static_graph: bool = False
    comm_hook: DDPCommunicationHookType = DDPCommunicationHookType.NO
    comm_wrapper: DDPCommunicationHookType = DDPCommunicationHookType.NO
    comm_state_option: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.comm_hook = DDPCommunicationHookType(self.comm_hook)
        self.comm_wrapper = DDPCommunicationHookType(self.comm_wrapper)

    @property
    def compresses(self) -> bool:
        """`True` if gradients do not travel as they are."""
        return not self.comm_hook == self.comm_wrapper == DDPCommunicationHookType.NO
