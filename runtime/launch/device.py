"""Selection of the device of this process, and of the backend of its collectives."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from orc.runtime.core.errors import LaunchError

if TYPE_CHECKING:
    from orc.runtime.launch.environment import LaunchEnvironment


# What the machine of a TPU has, by the kinds of its driver.
_TPU_DEVICES = ("/dev/accel0", "/dev/vfio/0")


def may_be_xla(env: Mapping[str, str]) -> bool:
    """Return `False` where nothing points to torch_xla: most machines, which need not load its adapter."""
    return bool(env.get("PJRT_DEVICE")) or any(map(os.path.exists, _TPU_DEVICES))


def select_device(launch: LaunchEnvironment, *, cpu: bool = False) -> torch.device:
    """CUDA when present, then MPS (one process only), then the CPU; *cpu* forces the last.

    Raises:
        LaunchError: more processes on this machine than it has GPUs.
    """
    if cpu:
        return torch.device("cpu")
    if torch.cuda.is_available():
        return torch.device("cuda", _cuda_index(launch, torch.cuda.device_count()))
    if torch.backends.mps.is_available():
        if launch.world_size == 1:
            return torch.device("mps")
        if launch.local_rank == 0:
            warnings.warn(
                f"{launch.world_size} processes train on the CPU: no backend of torch.distributed reaches the GPU of a "
                "Mac, which one process would use",
                stacklevel=2,
            )
    return torch.device("cpu")


def default_device() -> torch.device:
    """Return the kind of device that this machine offers: MPS, CUDA, XPU, or the CPU."""
    if torch.backends.mps.is_available():
        return torch.device("mps")
    for kind in ("cuda", "xpu"):
        if getattr(torch, kind).is_available():
            return torch.device(kind)
    return torch.device("cpu")


def _cuda_index(launch: LaunchEnvironment, count: int) -> int:
    if launch.local_rank < count:
        return launch.local_rank
    if count == 1:
        return 0  # the launcher shows each process its own GPU (CUDA_VISIBLE_DEVICES, --gpus-per-task)
    raise LaunchError(
        f"local rank {launch.local_rank} of {launch.local_world_size} processes on this machine has no GPU: "
        f"{count} are visible; start fewer processes per node, or train on the CPU with ORC_USE_CPU=1"
    )


def collective_backend(device: torch.device) -> str:
    """The documented backend name for collectives on *device*: ``nccl`` or ``gloo``."""
    return "nccl" if device.type == "cuda" else "gloo"


def process_group_backend(backend: str) -> str:
    """Return the backend for ``init_process_group``: gloo beside nccl, so that CPU tensors and objects travel too."""
    return "cpu:gloo,cuda:nccl" if backend == "nccl" else backend
