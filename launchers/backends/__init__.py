"""Backends by kind: one folder each, with a ``BACKEND`` attribute, or an ``orc.backends`` entry point of a package."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from orc.launchers.errors import SpecError
from orc.launchers.plugins import BACKENDS

if TYPE_CHECKING:
    from pathlib import Path

    from orc.launchers.backends.base import Backend
    from orc.launchers.spec.clusters import Cluster


def backend_class(kind: str, where: str = "") -> type[Backend]:
    """Import the backend of *kind*. Raises `SpecError` for an unknown kind."""
    if not BACKENDS.has(kind):
        hint = f"known kinds: {', '.join(BACKENDS.kinds())}"
        raise SpecError(f"unknown cluster kind {kind!r}", where=where, hint=hint)
    found = cast("type[Backend]", BACKENDS.load(kind))
    from orc.launchers.backends.base import PROTOCOL

    if found.protocol != PROTOCOL:
        raise SpecError(
            f"the backend {kind} was written for version {found.protocol} of the protocol, and this orc has {PROTOCOL}",
            where=where,
            hint=f"Update {'orc' if found.protocol > PROTOCOL else 'the package of the backend'}.",
        )
    return found


def open_backend(cluster: Cluster, state_dir: Path | None = None) -> Backend:
    """Open the backend of *cluster* for the orchestrator in *state_dir* (the user's unless given).

    Imports that kind's module only; contacts nothing. Raises `SpecError` for options that are wrong.
    """
    return backend_class(cluster.kind, cluster.name)(cluster, state_dir=state_dir)
