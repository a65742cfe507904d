"""Progress of the run for those who watch it: a small file that the agent puts into its heartbeat."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orc.runtime.logging import get_logger

if TYPE_CHECKING:
    from orc.runtime.core.context import RunContext

INTERVAL_S = 1.0


class ProgressFile:
    """``progress.json`` of this node, written at most every `INTERVAL_S` seconds; see docs on the attempt directory."""

    def __init__(self, path: Path, interval_s: float = INTERVAL_S) -> None:
        self.path = path
        self.interval_s = interval_s
        self._next = 0.0
        self._latest: dict[str, Any] | None = None  # not written yet

    @classmethod
    def of(cls, context: RunContext) -> ProgressFile | None:
        """The file of rank 0 inside of an orc job, `None` elsewhere."""
        attempt = context.env.job.attempt_dir
        if attempt is None or not context.is_main:
            return None
        node = Path(attempt) / f"node-{context.node_rank}"
        return cls(node / "progress.json") if node.is_dir() else None

    def update(self, step: int, epoch: int, samples: int, **more: float | None) -> None:
        """Optimizer *step* of the run, *epoch*, *samples* of it taken by all ranks, and what *more* is known."""
        known = {name: value for name, value in more.items() if value is not None}
        self._latest = {"step": step, "epoch": epoch, "samples": samples, **known}
        if time.monotonic() >= self._next:
            self.flush()

    def flush(self) -> None:
        """Write what is not written yet. A file that cannot be written is reported once and then left alone."""
        if self._latest is None:
            return
        content = {**self._latest, "at": time.time()}
        self._latest = None
        self._next = time.monotonic() + self.interval_s
        temporary = self.path.with_name(f".{self.path.name}.{os.getpid()}")
        try:
            temporary.write_text(json.dumps(content))
            temporary.replace(self.path)
        except OSError as error:
            # Training is worth more than telling about it.
            self._next = float("inf")
            get_logger(__name__).warning(f"progress is not reported any more: {error}")
