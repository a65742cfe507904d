"""Progress of a submission, told to its caller."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

Progress = Callable[[str, Mapping[str, Any]], None]


def silent(_stage: str, _data: Mapping[str, Any]) -> None:
    """Show no progress."""
