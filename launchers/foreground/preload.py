"""Preload: the condition for forking the ranks of ``orc launch`` from one process that has imported torch.

Importing torch is nearly a second of work on one core. Where the script would begin with that import anyway, one
process does it for all ranks (`orc.launchers.rank_hooks.startup.fork_ranks`). "Begin" is meant strictly: before the
import there may be nothing but a docstring and imports of the standard library or numpy, so that doing it earlier
can change nothing that the script does, and delays none of its output. Pure: text and names in, a decision out.
"""

from __future__ import annotations

import sys
from collections.abc import Collection

_TRIGGERS = ("torch", "orc.runtime")
_SOURCE_LIMIT = 1 << 20


def begins_with_torch(source: bytes) -> bool:
    """Return True when the script's first statement with any effect is the import of torch, but for pure imports."""
    if len(source) > _SOURCE_LIMIT or not any(name.encode() in source for name in _TRIGGERS):
        return False
    import ast

    try:
        body = ast.parse(source).body
    except (SyntaxError, ValueError):  # Python will say so, with its own words
        return False
    for statement in body:
        if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
            continue
        if isinstance(statement, ast.Import):
            names = [alias.name for alias in statement.names]
        elif isinstance(statement, ast.ImportFrom) and not statement.level and statement.module:
            names = [statement.module]
        else:
            return False
        for name in names:
            if any(name == trigger or name.startswith(trigger + ".") for trigger in _TRIGGERS):
                return True
            if name.partition(".")[0] not in sys.stdlib_module_names and name != "numpy":
                return False
    return False


def shadows_a_library(modules: Collection[str]) -> bool:
    """Return True when one of these modules, which lie beside the script, hides a module that torch imports."""
    return any(name in sys.stdlib_module_names or name in ("torch", "numpy") for name in modules)
