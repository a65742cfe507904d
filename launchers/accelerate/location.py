"""Place of the default configuration file of Accelerate. Light: every `orc launch` looks there."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

NAMES = ("default_config.yaml", "default_config.yml", "default_config.json")


def cache_folder(env: Mapping[str, str]) -> Path:
    """Return the documented folder: below ``HF_HOME``, else ``XDG_CACHE_HOME``, else ``~/.cache``."""
    if home := env.get("HF_HOME"):
        return Path(home).expanduser() / "accelerate"
    cache = env.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(cache).expanduser() / "huggingface" / "accelerate"


def default_path(env: Mapping[str, str]) -> Path:
    """Return the default file: the one that is there, or ``default_config.yaml`` where it would be written."""
    folder = cache_folder(env)
    return next((folder / name for name in NAMES if (folder / name).is_file()), folder / NAMES[0])
