"""What saving and loading raise."""

from __future__ import annotations

from orc.runtime.errors import OrcRuntimeError


class CheckpointError(OrcRuntimeError):
    """A checkpoint that cannot be written, is incomplete or damaged, or does not fit what was prepared."""
