"""Experiment trackers: one module per library. Modules and libraries are imported when they are needed."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from orc.runtime.tracking.aim import AimTracker
    from orc.runtime.tracking.base import GeneralTracker, on_main_process
    from orc.runtime.tracking.clearml import ClearMLTracker
    from orc.runtime.tracking.comet import CometMLTracker
    from orc.runtime.tracking.dvclive import DVCLiveTracker
    from orc.runtime.tracking.mlflow import MLflowTracker
    from orc.runtime.tracking.selection import filter_trackers, get_available_trackers, register_tracker_class
    from orc.runtime.tracking.swanlab import SwanLabTracker
    from orc.runtime.tracking.tensorboard import TensorBoardTracker
    from orc.runtime.tracking.trackio import TrackioTracker
    from orc.runtime.tracking.wandb import WandBTracker

__all__ = [
    "AimTracker",
    "ClearMLTracker",
    "CometMLTracker",
    "DVCLiveTracker",
    "GeneralTracker",
    "MLflowTracker",
    "SwanLabTracker",
    "TensorBoardTracker",
    "TrackioTracker",
    "WandBTracker",
    "filter_trackers",
    "get_available_trackers",
    "on_main_process",
    "register_tracker_class",
]

_HOMES = {
    "AimTracker": "aim",
    "ClearMLTracker": "clearml",
    "CometMLTracker": "comet",
    "DVCLiveTracker": "dvclive",
    "GeneralTracker": "base",
    "MLflowTracker": "mlflow",
    "SwanLabTracker": "swanlab",
    "TensorBoardTracker": "tensorboard",
    "TrackioTracker": "trackio",
    "WandBTracker": "wandb",
    "filter_trackers": "selection",
    "get_available_trackers": "selection",
    "on_main_process": "base",
    "register_tracker_class": "selection",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
