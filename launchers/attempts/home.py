"""Paths of ``agent.json`` below a home directory, which is known on the cluster alone.

Travels to hosts: standard library only, Python >= 3.9.
"""

from __future__ import annotations

import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any


def at_home(agent: dict[str, Any], expand: Callable[[str], str] = os.path.expanduser) -> dict[str, Any]:
    """Return *agent* with a home directory in the place of ``~``; what the user wrote stays as it is."""
    root = str(agent["root"])
    expanded = dict(agent)
    if root.startswith("~"):
        for key, value in agent.items():
            if isinstance(value, str) and value.startswith(root):
                expanded[key] = expand(value)
        expanded["env"] = {
            name: expand(value) if value.startswith(f"{root}/") else value for name, value in agent["env"].items()
        }
    if expanded.get("python"):
        expanded["python"] = expand(expanded["python"])
    return expanded
