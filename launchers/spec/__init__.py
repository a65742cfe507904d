"""The job file: its model, and how a file becomes a checked, immutable `JobSpec`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from orc.launchers.spec.job import Checkpoint, JobSpec, Launcher, Resources, Retry, Workdir
from orc.launchers.spec.load import LoadedJob, load_job

if TYPE_CHECKING:
    from orc.launchers.spec.problems import Problem, SpecProblems

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
    # Complaints are imported when there is something to complain about.
    if name in ("Problem", "SpecProblems"):
        from orc.launchers.spec import problems

        return getattr(problems, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
