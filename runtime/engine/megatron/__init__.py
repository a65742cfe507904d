"""Megatron-LM: its plug-in, the arithmetic of its parallelism, and the engine that trains with `megatron.core`."""

from orc.runtime.engine.megatron.choice import LIBRARY

__all__ = ["LIBRARY"]
