"""Megatron-LM: its plug-in, the arithmetic of its parallelism, and the engine that trains with `megatron.core`."""

from __future__ import annotations

from typing import Any


def __getattr__(name: str) -> Any:
    if name == "ENGINE":  # not before it is used: the plug-in and its arithmetic need no torch
        from orc.runtime.engine.megatron.engine import MegatronLM

        return MegatronLM
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
