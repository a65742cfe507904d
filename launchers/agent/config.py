"""Configuration of the agents of an attempt: ``agent.json``."""

from __future__ import annotations

import os

from orc.launchers.agent.errors import LaunchFailure
from orc.launchers.agent.records import FORMAT, read_json

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


def load_config(path: str) -> dict[str, Any]:
    """Return the configuration in *path*; raises `LaunchFailure` for a file that this agent cannot follow."""
    config = read_json(path)
    if config is None:
        raise LaunchFailure(f"{path}: no such file, or not a JSON object")
    if config.get("format") != FORMAT:
        raise LaunchFailure(f"{path}: format {config.get('format')!r}, this agent reads format {FORMAT}")
    given = os.environ.get(config.get("nnodes_from") or "", "")
    if given.isdigit():
        config["nnodes"] = int(given)
    return config
