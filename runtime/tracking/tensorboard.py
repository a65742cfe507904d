"""TensorBoard: event files below the project's logging folder."""

from __future__ import annotations

import math
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orc.runtime.tracking.base import LibraryTracker, directory, numbers, on_main_process, plain

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


class TensorBoardTracker(LibraryTracker):
    """Writes to ``<logging_dir>/<run_name>``.

    Args:
        run_name: name of the run's folder.
        logging_dir: where the folder goes.
        kwargs: for ``SummaryWriter``.
    """

    name = "tensorboard"
    requires_logging_directory = True
    package = "tensorboard"
    modules = ("tensorboard", "tensorboardX")

    def __init__(self, run_name: str, logging_dir: str | os.PathLike[str], **kwargs: Any) -> None:
        super().__init__(run_name, **kwargs)
        self.logging_dir = os.path.join(logging_dir, run_name)  # noqa: PTH118 (documented as text)

    def _open(self) -> SummaryWriter:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ModuleNotFoundError:
            from tensorboardX import SummaryWriter  # type: ignore[no-redef]
        return SummaryWriter(directory(self.logging_dir), **self._kwargs)

    def _close(self, run: SummaryWriter) -> None:
        run.close()

    @property
    def writer(self) -> SummaryWriter:
        """The ``SummaryWriter``."""
        writer: SummaryWriter = self.tracker
        return writer

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Store *values* as hyperparameters, and in ``hparams.yml`` beside them.

        What is neither text, number nor truth value is stored as text.
        """
        values = {str(key): _hyperparameter(value) for key, value in plain(values).items()}
        stamp = str(time.time())
        self.tracker.add_hparams(values, metric_dict={}, run_name=stamp)
        self.tracker.flush()
        path = Path(directory(Path(self.logging_dir) / stamp)) / "hparams.yml"
        path.write_text("".join(f"{_yaml(key)}: {_yaml(value)}\n" for key, value in values.items()), encoding="utf-8")

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log numbers as scalars, text as text, mappings of numbers as scalars in one chart.

        *kwargs* go to ``add_scalar``, ``add_text`` or ``add_scalars``.
        """
        writer = self.tracker
        for key, value in numbers(values).items():
            if isinstance(value, (int, float)):
                writer.add_scalar(key, value, global_step=step, **kwargs)
            elif isinstance(value, str):
                writer.add_text(key, value, global_step=step, **kwargs)
            elif isinstance(value, dict):
                writer.add_scalars(key, value, global_step=step, **kwargs)
            else:
                self._leave_out(key, value)
        writer.flush()

    @on_main_process
    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log batches of images, by name: arrays or tensors ``[n, ...]``, or lists of images.

        *kwargs* go to ``add_images``, such as ``dataformats="NHWC"``.

        Args:
            values: batches of images by name.
            step: the step they belong to.
        """
        for key, images in values.items():
            self.tracker.add_images(key, _stacked(images), global_step=step, **kwargs)


def _stacked(images: Any) -> Any:
    if not isinstance(images, (list, tuple)):
        return images
    import numpy

    return numpy.stack([numpy.asarray(image) for image in images])


def _hyperparameter(value: Any) -> bool | int | float | str:
    return value if isinstance(value, (bool, int, float, str)) else str(value)


def _yaml(value: bool | int | float | str) -> str:
    # These scalars need no YAML library, but for floats: JSON's `1e-05` is text to YAML 1.1.
    import json

    if not isinstance(value, float):
        return json.dumps(value)
    if not math.isfinite(value):
        return ".nan" if math.isnan(value) else ".inf" if value > 0 else "-.inf"
    text = repr(value)
    mantissa, exponent, power = text.partition("e")
    return text if "." in mantissa else f"{mantissa}.0{exponent}{power}"
