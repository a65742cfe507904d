"""Weights & Biases, trackio and SwanLab, whose libraries open runs with ``init(project=...)``."""

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

    def __init__(self, run_name: str, **kwargs: Any) -> None:
        super().__init__(run_name, **kwargs)

    def _open(self) -> Any:
        return importlib.import_module(self.package).init(**{"project": self.run_name, **self._kwargs})

    def _close(self, run: Any) -> None:
        run.finish()

    run = property(lambda self: self.tracker, doc="The run.")

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Store *values* in the run's configuration."""
        self.tracker.config.update(plain(values))

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log *values*, anything that the library takes. *kwargs* go to ``Run.log``."""
        self.tracker.log(scalars(values), step=step, **kwargs)


class WandBTracker(ProjectRunTracker):
    """A run of wandb.

    Args:
        run_name: the project.
        kwargs: for ``wandb.init``.
    """

    name = "wandb"
    package = "wandb"
    modules = ("wandb",)

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Store *values* in the run's configuration."""
        self.tracker.config.update(plain(values), allow_val_change=True)

    @on_main_process
    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log lists of images, by name. *kwargs* go to ``Run.log``.

        Args:
            values: lists of images by name.
            step: the step they belong to.
        """
        import wandb

        self.log({key: [wandb.Image(image) for image in images] for key, images in values.items()}, step, **kwargs)

    @on_main_process
    def log_table(
        self,
        table_name: str,
        columns: list[Any] | None = None,
        data: list[list[Any]] | None = None,
        dataframe: Any = None,
        step: int | None = None,
        **kwargs: Any,
    ) -> None:
        """Log a table, from *columns* and rows of *data*, or from a *dataframe* of pandas.

        Args:
            table_name: the key of the table.
            step: the step it belongs to.
        """
        import wandb

        self.log({table_name: wandb.Table(columns=columns, data=data, dataframe=dataframe)}, step, **kwargs)


class TrackioTracker(ProjectRunTracker):
    """A run of trackio, in a local database or in a Space.

    Args:
        run_name: the project.
        kwargs: for ``trackio.init``.
    """

    name = "trackio"
    package = "trackio"
    modules = ("trackio",)


class SwanLabTracker(ProjectRunTracker):
    """A run of SwanLab.

    Args:
        run_name: the project.
        kwargs: for ``swanlab.init``, such as ``mode="local"``.
    """

    name = "swanlab"
    package = "swanlab"
    modules = ("swanlab",)

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log *values*, anything that SwanLab takes, and text. *kwargs* go to ``Run.log``."""
        import swanlab

        texts = {key: swanlab.Text(value) for key, value in values.items() if isinstance(value, str)}
        self.tracker.log({**scalars(values), **texts}, step=step, **kwargs)

    @on_main_process
    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log lists of images, by name. *kwargs* go to ``Run.log``.

        Args:
            values: lists of images by name.
            step: the step they belong to.
        """
        import swanlab

        self.log({key: [swanlab.Image(image) for image in images] for key, images in values.items()}, step, **kwargs)
