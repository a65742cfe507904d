"""DeepSpeed: its plug-in, the rules of its configuration, and the engine that trains with it."""

from orc.runtime.engine.deepspeed.choice import LIBRARY

__all__ = ["LIBRARY"]
