"""The engine owns backward, step, clipping, gradient synchronisation and the state dict. There is exactly one."""

from __future__ import annotations

from orc.runtime.engine.native import NativeEngine

__all__ = ["NativeEngine"]
