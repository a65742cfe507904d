"""Aim: runs in a repository below the project's logging folder."""

from __future__ import annotations

import os
from typing import Any

from orc.runtime.tracking.base import LibraryTracker, directory, numbers, on_main_process, plain


class AimTracker(LibraryTracker):
    """A run of Aim.

    Args:
        run_name: the run's name.
        logging_dir: where the repository is.
        kwargs: for ``aim.Run``.
    """

    name = "aim"
    requires_logging_directory = True
    package = "aim"
    modules = ("aim",)

    def __init__(self, run_name: str, logging_dir: str | os.PathLike[str] | None = ".", **kwargs: Any) -> None:
        super().__init__(run_name, **kwargs)
        self.aim_repo_path = logging_dir

    def _open(self) -> Any:
        from aim import Run

        repository = directory(self.aim_repo_path or ".")
        run = Run(**{"repo": repository, **self._kwargs})
        run.name = self.run_name
        return run

    def _close(self, run: Any) -> None:
        run.close()

    writer = property(lambda self: self.tracker, doc="The run.")

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Store *values* as the run's ``hparams``."""
        self.tracker["hparams"] = plain(values)

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Track *values*. *kwargs* go to ``Run.track``, such as ``context``."""
        for key, value in numbers(values).items():
            self.tracker.track(value, name=key, step=step, **kwargs)

    @on_main_process
    def log_images(
        self, values: dict[str, Any], step: int | None = None, kwargs: dict[str, dict[str, Any]] | None = None
    ) -> None:
        """Track images, by name: an image, a tuple of image and caption, or a list of such.

        Args:
            values: the images.
            step: of all of them.
            kwargs: ``{"aim_image": options of aim.Image, "track": options of Run.track}``.
        """
        import aim

        of_image, of_track = (dict((kwargs or {}).get(name, {})) for name in ("aim_image", "track"))

        def image(given: Any) -> Any:
            return aim.Image(*(given if isinstance(given, tuple) else (given,)), **of_image)

        for key, value in values.items():
            images = [image(given) for given in value] if isinstance(value, list) else image(value)
            self.tracker.track(images, name=key, step=step, **of_track)
