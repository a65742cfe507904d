"""ClearML."""

from __future__ import annotations

import os
from typing import Any

from orc.runtime.tracking.base import LibraryTracker, numbers, on_main_process, plain

_SERIES = ("eval", "test", "train")


class ClearMLTracker(LibraryTracker):
    """A task of ClearML: the current one if the script has made one, else a new one.

    Args:
        run_name: project and task of a new task; ``CLEARML_PROJECT`` and ``CLEARML_TASK`` win.
        kwargs: for ``Task.init``.
    """

    name = "clearml"
    package = "clearml"
    modules = ("clearml",)
    _own = False  # who made the task closes it

    def __init__(self, run_name: str | None = None, **kwargs: Any) -> None:
        super().__init__(run_name, **kwargs)

    def _open(self) -> Any:
        from clearml import Task

        current = Task.current_task()
        if current:
            return current
        self._own = True
        names = {
            "project_name": os.environ.get("CLEARML_PROJECT", self.run_name),
            "task_name": os.environ.get("CLEARML_TASK", self.run_name),
        }
        return Task.init(**{**names, **self._kwargs})

    def _close(self, run: Any) -> None:
        if self._own:
            run.close()
            self._own = False

    task = property(lambda self: self.tracker, doc="The task.")

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Store *values* as the task's configuration."""
        self.tracker.connect_configuration(plain(values))

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log numbers: as scalars over *step*, or as single values without one.

        ``eval_``, ``test_`` and ``train_`` in front of a name choose the series of the chart. *kwargs* go to
        ``report_scalar`` or ``report_single_value``.
        """
        logger = self.tracker.get_logger()
        for key, value in numbers(values).items():
            if not isinstance(value, (int, float)):
                self._leave_out(key, value)
            elif step is None:
                logger.report_single_value(name=key, value=value, **kwargs)
            else:
                title, series = _title_and_series(key)
                logger.report_scalar(title=title, series=series, value=value, iteration=step, **kwargs)

    @on_main_process
    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log images, by name. *kwargs* go to ``report_image``.

        Args:
            values: images by name.
            step: the step they belong to.
        """
        logger = self.tracker.get_logger()
        for key, image in values.items():
            title, series = _title_and_series(key)
            logger.report_image(title=title, series=series, iteration=step, image=image, **kwargs)

    @on_main_process
    def log_table(
        self,
        table_name: str,
        columns: list[str] | None = None,
        data: list[list[Any]] | None = None,
        dataframe: Any = None,
        step: int | None = None,
        **kwargs: Any,
    ) -> None:
        """Log a table, from *columns* and rows of *data*, or from a *dataframe* of pandas.

        Args:
            table_name: the title of the table.
            step: the step it belongs to.

        Raises:
            ValueError: neither *data* nor *dataframe*.
        """
        if dataframe is None and data is None:
            raise ValueError("ClearMLTracker.log_table needs data or dataframe")
        table = dataframe if dataframe is not None else [columns, *data] if columns else data  # type: ignore[misc]
        title, series = _title_and_series(table_name)
        self.tracker.get_logger().report_table(title=title, series=series, table_plot=table, iteration=step, **kwargs)


def _title_and_series(name: str) -> tuple[str, str]:
    for series in _SERIES:
        if name.startswith(f"{series}_"):
            return name.removeprefix(f"{series}_"), series
    return name, "train"
