"""DVCLive: metrics in files beside the code, for DVC."""

from __future__ import annotations

from typing import Any

from orc.runtime.tracking.base import LibraryTracker, numbers, on_main_process, plain


class DVCLiveTracker(LibraryTracker):
    """A ``dvclive.Live``.

    Args:
        run_name: not used by DVCLive.
        live: a ``Live`` of the script's own.
        kwargs: for ``dvclive.Live``, such as ``dir``.
    """

    name = "dvclive"
    package = "dvclive"
    modules = ("dvclive",)

    def __init__(self, run_name: str | None = None, live: Any = None, **kwargs: Any) -> None:
        super().__init__(run_name, **kwargs)
        self._given = live

    def _open(self) -> Any:
        from dvclive import Live

        return Live(**self._kwargs) if self._given is None else self._given

    def _close(self, run: Any) -> None:
        run.end()

    live = property(lambda self: self.tracker, doc="The ``Live``.")

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Store *values* in ``params.yaml``."""
        self.tracker.log_params(plain(values))

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log numbers and text, and go on to the next step. *kwargs* go to ``Live.log_metric``."""
        from dvclive.plots import Metric

        live = self.tracker
        if step is not None:
            live.step = step
        for key, value in numbers(values).items():
            if Metric.could_log(value):
                live.log_metric(key, value, **kwargs)
            else:
                self._leave_out(key, value)
        live.next_step()
