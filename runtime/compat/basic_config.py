"""A configuration file in the documented format, for tools that read one: this machine, all of its GPUs."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

from orc.runtime.core.config import PRECISIONS


def default_config_folder(env: Mapping[str, str]) -> Path:
    """Return the folder of the documented configuration file: below ``HF_HOME``, ``XDG_CACHE_HOME`` or ``~/.cache``."""
    if home := env.get("HF_HOME"):
        return Path(home) / "accelerate"
    cache = env.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(cache).expanduser() / "huggingface" / "accelerate"


def write_basic_config(
    mixed_precision: str = "no", save_location: str | os.PathLike[str] | None = None, use_xpu: bool = False
) -> Path | bool:
    """Write a configuration for this machine alone, with all of its GPUs or else its CPU.

    `orc launch` reads it; a job needs none, because its job file says all of it. An existing file stays as it is.

    Args:
        mixed_precision: ``no``, ``fp16``, ``bf16`` or ``fp8``.
        save_location: the file, YAML, or JSON where it ends in ``.json``; ``default_config.yaml`` in
            `default_config_folder` by default.
        use_xpu: count Intel GPUs where there is no CUDA.

    Returns:
        The file; `False` when there was one.

    Raises:
        ValueError: another precision.
    """
    chosen = str(mixed_precision).lower()
    if chosen not in PRECISIONS:
        raise ValueError(f"`mixed_precision` should be one of {', '.join(PRECISIONS)}; received {mixed_precision}")
    given = Path(save_location).expanduser() if save_location is not None else None
    path = given or default_config_folder(os.environ) / "default_config.yaml"
    if path.exists():
        print(f"{path} exists already and is left alone; remove it, or pass another save_location")  # noqa: T201
        return False
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp")
    values = basic_config(chosen, *_devices(use_xpu))
    as_json = json.dumps(values, indent=2, sort_keys=True) + "\n"
    temporary.write_text(as_json if path.suffix == ".json" else _yaml(values))
    temporary.replace(path)
    return path


def basic_config(mixed_precision: str, kind: str, devices: int) -> dict[str, object]:
    """The documented keys for *devices* GPUs of *kind* on one machine; none: the CPU."""
    return {
        "compute_environment": "LOCAL_MACHINE",
        "debug": False,
        "distributed_type": f"MULTI_{kind}" if devices > 1 else "NO",
        "machine_rank": 0,
        "main_training_function": "main",
        "mixed_precision": mixed_precision,
        "num_machines": 1,
        "num_processes": max(devices, 1),
        "rdzv_backend": "static",
        "same_network": False,
        "use_cpu": devices == 0,
    }


def _yaml(values: Mapping[str, object]) -> str:
    """Return flat *values* as YAML, which quotes texts as JSON does; without a library for it."""
    return "".join(f"{key}: {json.dumps(value)}\n" for key, value in sorted(values.items()))


def _devices(use_xpu: bool) -> tuple[str, int]:
    import torch

    if torch.cuda.is_available():
        return "GPU", torch.cuda.device_count()
    if use_xpu and torch.xpu.is_available():
        return "XPU", torch.xpu.device_count()
    return "GPU", 1 if torch.backends.mps.is_available() else 0
