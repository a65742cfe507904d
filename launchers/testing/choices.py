"""The backend, cluster and view that the options of the plug-in choose."""

from __future__ import annotations

import importlib
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from orc.launchers.backends.base import Backend
    from orc.launchers.plan import Plan
    from orc.launchers.spec.clusters import Cluster


def chosen_backend(config: pytest.Config) -> type[Backend]:
    """Return the class that ``--orc-backend`` names. Raises `pytest.UsageError`."""
    found: type[Backend] = _named(config, "--orc-backend")
    return found


def chosen_view(config: pytest.Config) -> Callable[[Backend, Plan, PurePosixPath], Sequence[Path]] | None:
    """Return the function that ``--orc-view`` names, if it is given. Raises `pytest.UsageError`."""
    return _named(config, "--orc-view") if config.getoption("--orc-view") else None


def _named(config: pytest.Config, option: str) -> Any:
    given = str(config.getoption(option))
    module, colon, name = given.partition(":")
    if not (module and colon and name):
        raise pytest.UsageError(f"{option} {given}: expected MODULE:NAME")
    return getattr(importlib.import_module(module), name)


def chosen_cluster(config: pytest.Config, kind: type[Backend], root: Path) -> Cluster:
    """Return the cluster of ``--orc-cluster``, or one of *kind* at *root*. Raises `pytest.UsageError`."""
    from orc.launchers.spec.clusters import Cluster, get_cluster

    given = config.getoption("--orc-cluster")
    if not given:
        return Cluster(name="conformance", kind=kind.kind, root=str(root))
    file, colon, name = str(given).rpartition(":")
    if not colon:
        raise pytest.UsageError(f"--orc-cluster {given}: expected FILE:NAME")
    return get_cluster(name, Path(file))
