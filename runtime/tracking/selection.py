"""Selection of trackers from a script's ``log_with``: names are looked up, missing libraries sorted out."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import TypeAlias

from orc.runtime.core.availability import is_package
from orc.runtime.core.parsing import nearest
from orc.runtime.tracking.aim import AimTracker
from orc.runtime.tracking.base import LOGGER, GeneralTracker, LibraryTracker, LoggerType, check_tracker
from orc.runtime.tracking.clearml import ClearMLTracker
from orc.runtime.tracking.comet import CometMLTracker
from orc.runtime.tracking.dvclive import DVCLiveTracker
from orc.runtime.tracking.mlflow import MLflowTracker
from orc.runtime.tracking.project_runs import SwanLabTracker, TrackioTracker, WandBTracker
from orc.runtime.tracking.tensorboard import TensorBoardTracker

Tracker: TypeAlias = str | LoggerType | GeneralTracker
Chosen: TypeAlias = "LoggerType | GeneralTracker | type[GeneralTracker]"  # built in, made by the script, registered

TRACKERS: dict[LoggerType, type[LibraryTracker]] = {
    LoggerType(tracker.name): tracker
    for tracker in (
        TensorBoardTracker,
        WandBTracker,
        TrackioTracker,
        AimTracker,
        CometMLTracker,
        MLflowTracker,
        ClearMLTracker,
        DVCLiveTracker,
        SwanLabTracker,
    )
}


_REGISTERED: dict[str, type[GeneralTracker]] = {}  # by name, which ``log_with`` takes


def register_tracker_class(tracker_class: type[GeneralTracker]) -> type[GeneralTracker]:
    """Let ``log_with`` and ``init_kwargs`` name *tracker_class* by its ``name``; returns the class.

    `Accelerator.init_trackers` makes the tracker with the project's name, then the logging directory where
    ``requires_logging_directory`` is true, and its ``init_kwargs``.

    Raises:
        TypeError: it is no subclass of `GeneralTracker`.
        ValueError: it has no ``name`` of its own, or that of a built-in tracker.

    Example:
        >>> @register_tracker_class
        ... class Printer(GeneralTracker):
        ...     name = "printer"
        ...     requires_logging_directory = False
    """
    if not isinstance(tracker_class, type) or not issubclass(tracker_class, GeneralTracker):
        raise TypeError(f"register_tracker_class: {tracker_class!r} is no subclass of GeneralTracker")
    name = getattr(tracker_class, "name", None)
    if not isinstance(name, str) or not name or name.lower() in {*LoggerType}:
        raise ValueError(f"register_tracker_class: {tracker_class.__name__} needs a name of its own, not {name!r}")
    _REGISTERED[name.lower()] = tracker_class
    return tracker_class


def get_available_trackers() -> list[LoggerType]:
    """Return the built-in trackers whose library is installed."""
    return [kind for kind, tracker in TRACKERS.items() if any(is_package(module) for module in tracker.modules)]


def filter_trackers(
    log_with: Tracker | Iterable[Tracker] | None, logging_dir: str | os.PathLike[str] | None = None
) -> list[Chosen]:
    """The trackers that *log_with* means here, each once, in order.

    Args:
        log_with: names, `LoggerType` members and trackers of the script's own, one or several; ``"all"`` means every
            built-in tracker whose library is installed.
        logging_dir: where trackers write that need a folder.

    Returns:
        Members of `LoggerType` for built-in trackers, registered classes, and the script's own trackers. Named trackers
        whose library is not installed are left out with a warning; so is, of ``"all"``, what needs a folder when there
        is none.

    Raises:
        ValueError: an unknown name, or a named tracker needs a folder and there is none.
        TypeError: an element is neither a name nor a tracker.
        NotImplementedError: a tracker of the script's own is incomplete.
    """
    if log_with is None:
        return []
    if isinstance(log_with, (str, GeneralTracker)) or not isinstance(log_with, Iterable):
        log_with = [log_with]
    wanted = [_known(tracker) for tracker in log_with]
    available = get_available_trackers()
    chosen: list[Chosen] = []
    for one in wanted:
        for tracker in _installed(available, logging_dir) if one == LoggerType.ALL else [one]:
            if any(tracker is known for known in chosen):
                continue
            if isinstance(tracker, LoggerType):
                if tracker not in available:
                    LOGGER.warning(
                        "log_with: %s is left out, its library is not installed: pip install %s",
                        tracker, TRACKERS[tracker].package,
                    )  # fmt: skip
                    continue
                if logging_dir is None and TRACKERS[tracker].requires_logging_directory:
                    raise ValueError(
                        f"log_with: {tracker} requires a `logging_dir`; give Accelerator project_dir, or "
                        "project_config=ProjectConfiguration(logging_dir=...)"
                    )
            chosen.append(tracker)
    return chosen


def _known(tracker: Tracker) -> Chosen:
    if isinstance(tracker, GeneralTracker):
        check_tracker(tracker)
        return tracker
    if not isinstance(tracker, str):
        kind = f"the class {tracker.__name__}; give an instance" if isinstance(tracker, type) else repr(tracker)
        raise TypeError(f"log_with: expected names and trackers, not {kind}")
    name = str(tracker).lower()
    if name in _REGISTERED:
        return _REGISTERED[name]
    if name not in {*LoggerType}:
        hint = nearest(name, map(str, LoggerType))
        raise ValueError(f"log_with: unsupported tracker {tracker!r}{hint}; choose from {', '.join(LoggerType)}")
    return LoggerType(name)


def _installed(available: list[LoggerType], logging_dir: str | os.PathLike[str] | None) -> list[LoggerType]:
    if not available:
        LOGGER.warning("log_with='all': no library of a built-in tracker is installed")
    usable = [kind for kind in available if logging_dir is not None or not TRACKERS[kind].requires_logging_directory]
    if left_out := [str(kind) for kind in available if kind not in usable]:
        LOGGER.warning("log_with='all': left out for want of a project_dir or logging_dir: %s", ", ".join(left_out))
    return usable
