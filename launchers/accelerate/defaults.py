"""Configuration files that are written: their default values, an update of those that are there, and the writing."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from orc.launchers.accelerate.config_file import AccelerateConfig
from orc.launchers.errors import SpecError

LOCAL_DEFAULTS: Mapping[str, Any] = {
    "compute_environment": "LOCAL_MACHINE",
    "debug": False,
    "distributed_type": "NO",
    "downcast_bf16": "no",
    "enable_cpu_affinity": False,
    "machine_rank": 0,
    "main_training_function": "main",
    "mixed_precision": "no",
    "num_machines": 1,
    "num_processes": 1,
    "rdzv_backend": "static",
    "same_network": True,
    "tpu_env": [],
    "tpu_use_cluster": False,
    "tpu_use_sudo": False,
    "use_cpu": False,
}
SAGEMAKER_DEFAULTS: Mapping[str, Any] = {
    "compute_environment": "AMAZON_SAGEMAKER",
    "debug": False,
    "distributed_type": "NO",
    "image_uri": None,
    "mixed_precision": "no",
    "num_machines": 1,
    "use_cpu": False,
}


def basic_config(mixed_precision: str, gpus: int) -> dict[str, Any]:
    """Return the configuration of this machine alone, with all its *gpus*, or its CPU where it has none."""
    return {
        **LOCAL_DEFAULTS,
        "distributed_type": "MULTI_GPU" if gpus > 1 else "NO",
        "mixed_precision": mixed_precision,
        "num_processes": max(gpus, 1),
        "use_cpu": gpus == 0,
    }


def updated(config: AccelerateConfig) -> dict[str, Any]:
    """Return the values of *config* under the spellings of today, and the defaults that it does not have yet."""
    found: dict[str, Any] = {
        key: value for key, value in config.document.data.items() if value is None or value in ({}, [])
    }
    for given in config.given.values():
        section, _, name = str(given.option.key).rpartition(".")
        value = _raw(config, given.path) if given.path[-1] != "fp16" else given.value
        (found.setdefault(section, {}) if section else found)[name] = value
    defaults = dict(SAGEMAKER_DEFAULTS if config.sagemaker else LOCAL_DEFAULTS)
    if config.get("deepspeed_config_file"):
        del defaults["mixed_precision"]  # that file says it
    return {**defaults, **found}


def _raw(config: AccelerateConfig, path: tuple[str | int, ...]) -> Any:
    value: Any = config.document.data
    for part in path:
        value = value[part]
    return value


def config_text(values: Mapping[str, Any], path: Path) -> str:
    """Return the text of a file: JSON where *path* ends so, YAML otherwise; keys in order of the alphabet."""
    if path.suffix == ".json":
        return json.dumps(values, indent=2, sort_keys=True) + "\n"
    import yaml

    return yaml.safe_dump(dict(values), sort_keys=True, allow_unicode=True)


def write_config(values: Mapping[str, Any], path: Path, *, overwrite: bool = False) -> None:
    """Write the file *path* whole or not at all; one that is replaced keeps who can read it, as it may hold secrets.

    Raises:
        SpecError: it is there and *overwrite* is not set; or it cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o755)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(config_text(values, path))
                os.fchmod(file.fileno(), path.stat().st_mode & 0o644 if overwrite and path.exists() else 0o644)
            if overwrite:
                os.replace(temporary, path.resolve())  # noqa: PTH105
            else:
                os.link(temporary, path)
        finally:
            Path(temporary).unlink(missing_ok=True)
    except FileExistsError:
        raise SpecError(
            "the file exists already and was not changed", where=str(path), hint="--force replaces it"
        ) from None
    except OSError as error:
        raise SpecError(f"the file cannot be written: {error.strerror}", where=str(path)) from None
