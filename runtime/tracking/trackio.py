"""Trackio: runs in a local database, or in a Space."""

from __future__ import annotations

from orc.runtime.tracking.project_run import ProjectRunTracker


class TrackioTracker(ProjectRunTracker):
    """A run of trackio.

    Args:
        run_name: the project.
        kwargs: for ``trackio.init``.
    """

    name = "trackio"
    package = "trackio"
    modules = ("trackio",)
