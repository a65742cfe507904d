"""Weights & Biases."""

from __future__ import annotations

from typing import Any

from orc.runtime.tracking.base import on_main_process, plain
from orc.runtime.tracking.project_run import ProjectRunTracker


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
