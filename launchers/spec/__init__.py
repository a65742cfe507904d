"""The job file: its model, and how a file becomes a checked, immutable `JobSpec`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from orc.launchers.spec.job import Checkpoint, JobSpec, Launcher, Resources, Retry, Workdir
    from orc.launchers.spec.load import LoadedJob, load_job
    from orc.launchers.spec.problems import Problem, SpecProblems

_MODULES = {
    **dict.fromkeys(("Checkpoint", "JobSpec", "Launcher", "Resources", "Retry", "Workdir"), "job"),
    **dict.fromkeys(("LoadedJob", "load_job"), "load"),
    **dict.fromkeys(("Problem", "SpecProblems"), "problems"),
}
__all__ = [
    "Checkpoint",
    "JobSpec",
    "Launcher",
    "LoadedJob",
    "Problem",
    "Resources",
    "Retry",
    "SpecProblems",
    "Workdir",
    "load_job",
]


def __getattr__(name: str) -> Any:
    # The models are imported by commands that read a job, and by no others: start-up time.
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
