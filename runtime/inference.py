"""Re-exports under a documented path: ``from orc.runtime.inference import prepare_pippy``."""

from __future__ import annotations

from orc.runtime.parallel.pipeline import prepare_pippy

__all__ = ["prepare_pippy"]
