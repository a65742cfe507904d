"""State in a checkpoint: how it lies there, whose it is, how it is staged, random numbers, whether it fits the run."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from orc.runtime.checkpoint.state.base import StateStrategy


def strategy_named(name: str) -> StateStrategy:
    """Return the strategy *name*: ``full`` or ``dcp``. It is imported when it is requested."""
    strategy: StateStrategy = importlib.import_module(f"{__name__}.{name}").STRATEGY
    return strategy
