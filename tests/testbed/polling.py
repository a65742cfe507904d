"""How tests wait: how often they look at what they wait for, and for how long."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from orc.launchers.testing.jobs import polls

__all__ = ["polls", "until"]
T = TypeVar("T")


def until(condition: Callable[[], T], timeout_s: float = 60.0, what: str = "", *, every_s: float = 0.01) -> T:
    """Return the first true value of *condition*; fail after *timeout_s* with the name of *what* was waited for."""
    for _ in polls(timeout_s, every_s):
        if value := condition():
            return value
    raise AssertionError(f"timed out waiting for {what or condition}")
