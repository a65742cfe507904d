"""The oldest Python that ranks can have, and the error about an older one.

The agent and the programs that go ahead of it start under Python 3.9 as well: a node's own Python may be that old where
the job brings another one for its ranks (`environment:`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

OLDEST_PYTHON = (3, 10)  # of ranks: `orc.runtime`
OLDEST_FOR_AGENT = (3, 9)


def python_problem(version: Sequence[int], *, environment: bool = False) -> str | None:
    """Return the reason why nothing can start under a Python of *version*; `None` when it can.

    With *environment* the job brings the Python of its ranks, and only the agent has to start.
    """
    oldest, who = (OLDEST_FOR_AGENT, "orc's agents") if environment else (OLDEST_PYTHON, "ranks")
    if tuple(version[:2]) >= oldest:
        return None
    return f"Python {'.'.join(map(str, version))}; {who} need {oldest[0]}.{oldest[1]} or newer"


def brings_python(environment: Mapping[str, Any] | None) -> bool:
    """Return True when a job's *environment*, as ``agent.json`` has it, has another Python than the node's own."""
    made = environment or {}
    return made.get("kind") in ("conda", "copy", "container") or (
        made.get("kind") == "venv" and bool(made.get("python"))
    )
