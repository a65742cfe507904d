"""Experiment trackers: a module per library, or kind of library. All are imported when they are needed."""

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
    from orc.runtime.tracking.project_runs import SwanLabTracker, TrackioTracker, WandBTracker
    from orc.runtime.tracking.selection import filter_trackers, get_available_trackers, register_tracker_class
    from orc.runtime.tracking.tensorboard import TensorBoardTracker

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


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = "base" if name in ("GeneralTracker", "on_main_process") else "selection"  # which has all others
    return getattr(importlib.import_module(f"{__name__}.{home}"), name)
