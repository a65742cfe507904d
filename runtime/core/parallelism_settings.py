"""Settings of the kinds of parallelism as texts: keys, variables and values. Torch-free.

The launch layer turns flags and ``runtime.parallelism`` of a job file into ``PARALLELISM_CONFIG_*`` variables with
`variables`; a `ParallelismConfig` and its handlers read these in a training script.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from orc.runtime.core.parsing import choice, read_mapping, switched_on, truth, variable_text, whole

DIMENSIONS = ("pp", "dp_replicate", "dp_shard", "cp", "sp", "tp")  # of a run's ranks, outermost first
USE_PARALLELISM_CONFIG = "ACCELERATE_USE_PARALLELISM_CONFIG"
# The first is the default.
BACKENDS: Mapping[str, tuple[str, ...]] = {"cp_backend": ("torch",), "sp_backend": ("deepspeed", "torch")}
CP_COMM_STRATEGIES = ("allgather", "alltoall")
SP_ATTN_IMPLEMENTATIONS = ("sdpa", "flash_attention_2", "flash_attention_3")


size = whole(1)
SIZES = tuple(f"{name}_size" for name in DIMENSIONS)
PARSERS: Mapping[str, Callable[[Any], Any]] = {
    **dict.fromkeys(SIZES, size),
    **{name: choice(*values) for name, values in BACKENDS.items()},
    "enable_async_tp": truth,
    "cp_comm_strategy": choice(*CP_COMM_STRATEGIES),
    "sp_seq_length": size,
    "sp_seq_length_is_variable": truth,
    "sp_attn_implementation": choice(*SP_ATTN_IMPLEMENTATIONS),
}


def variable(key: str) -> str:
    """Return the documented variable of *key*."""
    return f"PARALLELISM_CONFIG_{key.upper()}"


def normalise(values: Any) -> dict[str, Any]:
    """Return the checked settings of a mapping, by key. ``None`` means unset; keys may have their documented prefix.

    Raises:
        ValueError: an unknown key (with the nearest), a bad value, or sizes that contradict each other.
    """
    parsers = {name: (name, parse) for name, parse in PARSERS.items()}
    normal = read_mapping(values, parsers, "{dp_shard_size: 2, tp_size: 2}", "parallelism_config_")
    if normal.get("cp_size", 1) > 1 and normal.get("sp_size", 1) > 1:
        raise ValueError("cp_size and sp_size are two ways to cut the sequence; choose one")
    return normal


def variables(settings: Mapping[str, Any]) -> dict[str, str]:
    """Return the variables that bring checked *settings* to a training script."""
    return {USE_PARALLELISM_CONFIG: "true"} | {variable(key): variable_text(value) for key, value in settings.items()}


def from_environment(env: Mapping[str, str]) -> dict[str, Any]:
    """Return the settings that *env* brings to ranks; none where it does not turn them on. Raises `ValueError`."""
    if not switched_on(env, USE_PARALLELISM_CONFIG):
        return {}
    return normalise({key: env[variable(key)] for key in PARSERS if variable(key) in env})


def problem(settings: Mapping[str, Any], processes: int) -> str | None:
    """Return why ranks would refuse the sizes in *settings* in a run of *processes*; `None` where they fit."""
    sizes = {key: settings[key] for key in SIZES if settings.get(key, 1) > 1}
    total = math.prod(sizes.values())
    if not sizes or total == processes:
        return None
    shown = " x ".join(f"{key} {size}" for key, size in sizes.items())
    return (
        f"{shown} makes {total} processes, and there are {processes}: change the sizes so that their product is "
        f"{processes}, or start {total}"
    )
