"""The device of this process, and the backend of its collectives.

``ORC_COLLECTIVES`` asks for a library of the platform in the place of NCCL; orc's SageMaker backend sets it for
`distributed_type: DATA_PARALLEL`. That library is in SageMaker's own images alone, and registers itself with torch when
it is imported.
"""

from __future__ import annotations

import importlib
import os
import socket
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from orc.runtime.core.errors import LaunchError

if TYPE_CHECKING:
    from torch.distributed import Store

    from orc.runtime.core.environment import LaunchEnvironment

COLLECTIVES = "ORC_COLLECTIVES"
_SMDDP = "smdistributed.dataparallel.torch.torch_smddp"
_RECORDED = "2000"  # collectives: torch's own default, from the version on that records unasked
_NAMES = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")  # the newer; the older, which it warns of
# What the machine of a TPU has, by the kinds of its driver.
_TPU_DEVICES = ("/dev/accel0", "/dev/vfio/0")


def may_be_xla(env: Mapping[str, str]) -> bool:
    """Return `False` where nothing points to torch_xla: most machines, which need not load its adapter."""
    return bool(env.get("PJRT_DEVICE")) or any(map(os.path.exists, _TPU_DEVICES))


def select_device(launch: LaunchEnvironment, *, cpu: bool = False) -> torch.device:
    """CUDA when present, then MPS (one process only), then the CPU; *cpu* forces the last.

    Raises:
        LaunchError: more processes on this machine than it has GPUs, or fewer GPUs than the job asks for.
    """
    if cpu:
        return torch.device("cpu")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    # One GPU for each of several processes: the launcher shows each its own.
    if count < launch.job.gpus and not (count == 1 and launch.local_world_size > 1):
        raise LaunchError(_missing_gpus(launch.job.gpus, count))
    if count:
        return torch.device("cuda", _cuda_index(launch, count))
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


def _missing_gpus(asked: int, count: int) -> str:
    """Say why there are fewer GPUs than the job asks for, and what to do."""
    shown = os.environ.get("CUDA_VISIBLE_DEVICES")
    if count:
        why = f"CUDA_VISIBLE_DEVICES is {shown!r}" if shown is not None else "see `nvidia-smi -L` on this node"
    elif torch.version.cuda is None and torch.version.hip is None:
        why = f"this torch ({torch.__version__}) is built for the CPU alone; install one for CUDA or ROCm"
    else:
        try:
            torch.cuda.init()
            why = "torch finds no driver"
        except (RuntimeError, AssertionError) as error:
            why = " ".join(str(error).split())
        why += f" (torch {torch.__version__} is built for CUDA {torch.version.cuda}; see `nvidia-smi`)"
    return (
        f"the job asks for {asked} GPUs on each node, and this process can use {count or 'none'}: {why}. "
        "To train on the CPU nevertheless, ask for no GPUs (resources.gpus_per_node), or set ORC_USE_CPU=1"
    )


def claim_gpu(store: Store, launch: LaunchEnvironment, device: torch.device, uuid: str = "") -> None:
    """Note in the *store* of all ranks that this one has *device*: NCCL dies where two have the same.

    Args:
        store: where the ranks meet.
        launch: this process among its peers.
        device: its GPU.
        uuid: that of the GPU; what its driver says unless given.

    Raises:
        LaunchError: another rank has it.
    """
    uuid = uuid or str(getattr(torch.cuda.get_device_properties(device), "uuid", ""))
    if not uuid:
        return
    host = socket.gethostname()
    rank = int(store.compare_set(f"orc/gpu/{host}/{uuid}", "", str(launch.rank)))
    if rank != launch.rank:
        raise LaunchError(
            f"rank {launch.rank} has the same GPU as rank {rank} ({uuid} of {host}), which NCCL cannot work with: "
            f"start at most one process for each GPU, and let each see its own or all (CUDA_VISIBLE_DEVICES is "
            f"{os.environ.get('CUDA_VISIBLE_DEVICES')!r} here)"
        )


def _cuda_index(launch: LaunchEnvironment, count: int) -> int:
    own = os.environ.get("SLURM_GPUS_PER_TASK", "").rpartition(":")[2]  # maybe behind the GPUs' type
    if launch.platform == "slurm" and own == str(count):
        return 0  # each task sees its own, which may be several
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


def binds(device: torch.device, opened: str, torch_version: str = "") -> bool:
    """Return whether a process group is bound to *device* (``device_id``), so that NCCL connects when it is opened.

    torch before 2.10 cannot make the groups of a mesh from a bound one with backends per device. Over gloo ranks may
    share a device, and there is nothing to connect.

    Args:
        device: of this process.
        opened: the backend for ``init_process_group``.
        torch_version: this process's unless given.
    """
    if device.type != "cuda" or opened == "gloo":
        return False
    from orc.runtime.core.availability import compare_versions

    return ":" not in opened or compare_versions(torch_version or str(torch.__version__), ">=", "2.10")


def platform_backend(backend: str, env: Mapping[str, str]) -> str:
    """Return the backend for ``init_process_group`` from *backend*; the platform's library serves GPUs only.

    Raises `LaunchError` for a library that is unknown or not there.
    """
    wanted = env.get(COLLECTIVES, "")
    if not wanted:
        return process_group_backend(backend)
    if wanted != "smddp":
        raise LaunchError(f"{COLLECTIVES}={wanted}: the only platform library that is known is smddp")
    if backend != "nccl":
        return process_group_backend(backend)
    try:
        importlib.import_module(_SMDDP)
    except ImportError as error:
        raise LaunchError(
            f"{COLLECTIVES}=smddp: SageMaker's data-parallel library is not in this image ({error}); use a stock image "
            "of SageMaker, or leave out distributed_type: DATA_PARALLEL"
        ) from error
    return process_group_backend("nccl").replace("nccl", "smddp")


def record_collectives() -> None:
    """Have torch record the collectives of NCCL, unless the environment says how many; before the group is opened."""
    if not any(name in os.environ for name in _NAMES):
        import torch._C._distributed_c10d as c10d

        os.environ[_NAMES[not hasattr(c10d, "_dump_fr_trace_json")]] = _RECORDED
