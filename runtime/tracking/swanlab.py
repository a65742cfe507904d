"""SwanLab."""

from __future__ import annotations

from typing import Any

from orc.runtime.tracking.base import on_main_process, scalars
from orc.runtime.tracking.project_run import ProjectRunTracker


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
