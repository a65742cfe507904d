"""DeepSpeed: its plug-in, the rules of its configuration, and the engine that trains with it."""

from __future__ import annotations

from typing import Any


def __getattr__(name: str) -> Any:
    if name == "ENGINE":  # not before it is used: the plug-in and its rules need no torch
        from orc.runtime.engine.deepspeed.engine import DeepSpeed

        return DeepSpeed
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
