"""Base of the trackers whose libraries open runs with ``init(project=...)``: wandb, trackio, SwanLab."""

from __future__ import annotations

import importlib
from typing import Any

from orc.runtime.tracking.base import LibraryTracker, on_main_process, plain, scalars


class ProjectRunTracker(LibraryTracker):
    """A run in a project of such a library.

    Args:
        run_name: the project.
        kwargs: for the library's ``init``.
    """

    requires_logging_directory = False

    def __init__(self, run_name: str, **kwargs: Any) -> None:
        super().__init__()
        self.run_name = run_name
        self._kwargs = kwargs

    def _open(self) -> Any:
        return importlib.import_module(self.package).init(**{"project": self.run_name, **self._kwargs})

    def _close(self, run: Any) -> None:
        run.finish()

    @property
    def run(self) -> Any:
        """The run."""
        return self.tracker

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Store *values* in the run's configuration."""
        self.tracker.config.update(plain(values))

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log *values*, anything that the library takes. *kwargs* go to ``Run.log``."""
        self.tracker.log(scalars(values), step=step, **kwargs)
