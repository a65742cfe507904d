"""Comet."""

from __future__ import annotations

from typing import Any

from orc.runtime.tracking.base import LibraryTracker, numbers, on_main_process, plain


class CometMLTracker(LibraryTracker):
    """An experiment of Comet. The API key comes from Comet's own configuration.

    Args:
        run_name: the project.
        kwargs: for ``comet_ml.start``.
    """

    name = "comet_ml"
    package = "comet-ml>=3.41"
    modules = ("comet_ml",)

    def __init__(self, run_name: str, **kwargs: Any) -> None:
        super().__init__(run_name, **kwargs)

    def _open(self) -> Any:
        import comet_ml

        return comet_ml.start(**{"project_name": self.run_name, **self._kwargs})

    def _close(self, run: Any) -> None:
        run.end()

    writer = property(lambda self: self.tracker, doc="The experiment.")

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Store *values* as parameters."""
        self.tracker.log_parameters(plain(values))

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log numbers as metrics, text as "other", mappings of numbers as metrics of one group.

        *kwargs* go to ``log_metric``, ``log_other`` or ``log_metrics``.
        """
        experiment = self.tracker
        if step is not None:
            experiment.set_step(step)
        for key, value in numbers(values).items():
            if isinstance(value, (int, float)):
                experiment.log_metric(key, value, step=step, **kwargs)
            elif isinstance(value, str):
                experiment.log_other(key, value, **kwargs)
            elif isinstance(value, dict):
                experiment.log_metrics(value, **{"prefix": key, **kwargs}, step=step)
            else:
                self._leave_out(key, value)
