"""Libraries that compute in a process: torch by itself, or another one below it (torch_xla).

`RunContext.compute` is one of these. Whatever such a library does otherwise is a method here, so that nobody asks which
one it is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from orc.runtime.core.enums import DistributedType

if TYPE_CHECKING:
    import torch
    from torch import Tensor


Leaves: TypeAlias = "list[Tensor]"


class Carrier(Protocol):
    """Collectives between the processes, of tensors on the device; all processes call them with the same shapes."""

    def gather(self, leaves: Leaves) -> Leaves:
        """Each of *leaves* of all processes, joined along the first dimension."""
        ...

    def reduce(self, leaves: Leaves, reduction: str, scale: float) -> Leaves:
        """The sum or mean over the processes of each of *leaves*, times *scale*."""
        ...

    def broadcast(self, leaves: Leaves, source: int) -> Leaves:
        """*leaves*, filled in place with those of rank *source*."""
        ...


class Compute:
    """torch computes: at once, or asynchronously on a GPU. Libraries that do otherwise override what differs.

    Attributes:
        library: its name, in messages and in saved random states.
        engine: name of the engine that trains, unless a plug-in asks for another.
        replicas: name of the parallelizer that copies models to all processes.
        device_in_group: the process group carries tensors of the device; otherwise it is for the CPU alone.
        collectives: what carries tensors of the device between processes, instead of the process group.
    """

    library: str = "torch"
    engine: str = "native"
    replicas: str = "ddp"
    device_in_group: bool = True
    collectives: Carrier | None = None

    def distributed_type(self, world_size: int, device: torch.device) -> DistributedType:
        """The documented kind of a run of *world_size* processes that compute on *device*."""
        if world_size == 1:
            return DistributedType.NO
        return DistributedType.MULTI_GPU if device.type == "cuda" else DistributedType.MULTI_CPU

    def choose_precision(self, mixed_precision: str, downcast: bool) -> None:
        """Tell the library how floating-point numbers are kept; before the first tensor is made."""

    def supports_bf16(self, ignore_tpu: bool = False) -> bool:
        """Return whether the device of this process computes in bfloat16; not on a TPU that is to be ignored."""
        import torch

        return torch.cuda.is_bf16_supported() if torch.cuda.is_available() else True

    def mark(self) -> None:
        """Run what was traced so far: a batch is done."""

    def to_cpu(self, data: Any) -> Any:
        """*data* (any nesting) with tensors whose memory can be read; all processes call it."""
        return data

    def rng_state(self) -> int | None:
        """The state of the library's own random number generator; `None` without one."""
        return None

    def set_rng_state(self, state: int) -> None:
        """Put the library's own random number generator there."""


TORCH = Compute()
