"""Collectives that a platform brings along: SageMaker's data-parallel library in the place of NCCL.

``ORC_COLLECTIVES`` asks for it; orc's SageMaker backend sets it for `distributed_type: DATA_PARALLEL`. The library is
in SageMaker's own images alone, and registers itself with torch when it is imported.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping

from orc.runtime.core.errors import LaunchError
from orc.runtime.launch.device import process_group_backend

VARIABLE = "ORC_COLLECTIVES"
_SMDDP = "smdistributed.dataparallel.torch.torch_smddp"


def platform_backend(backend: str, env: Mapping[str, str]) -> str:
    """Return the backend for ``init_process_group`` from *backend*; the platform's library serves GPUs only.

    Raises `LaunchError` for a library that is unknown or not there.
    """
    wanted = env.get(VARIABLE, "")
    if not wanted:
        return process_group_backend(backend)
    if wanted != "smddp":
        raise LaunchError(f"{VARIABLE}={wanted}: the only platform library that is known is smddp")
    if backend != "nccl":
        return process_group_backend(backend)
    try:
        importlib.import_module(_SMDDP)
    except ImportError as error:
        raise LaunchError(
            f"{VARIABLE}=smddp: SageMaker's data-parallel library is not in this image ({error}); use a stock image of "
            "SageMaker, or leave out distributed_type: DATA_PARALLEL"
        ) from error
    return process_group_backend("nccl").replace("nccl", "smddp")
