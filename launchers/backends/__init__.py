"""Backends by kind. A new one is a module or package here with a ``BACKEND`` attribute; nothing else changes."""

from __future__ import annotations

import importlib
import importlib.util
from typing import TYPE_CHECKING, cast

from orc.launchers.errors import SpecError

if TYPE_CHECKING:
    from pathlib import Path

    from orc.launchers.backends.base import Backend
    from orc.launchers.spec.clusters import Cluster


def backend_kinds() -> list[str]:
    """The kinds of cluster this installation knows, in alphabetical order; imports none of them."""
    import pkgutil

    return sorted(m.name for m in pkgutil.iter_modules(__path__) if m.name != "base")


def backend_exists(kind: str) -> bool:
    """Whether this installation has a backend of that kind; imports nothing."""
    return kind.isidentifier() and kind != "base" and importlib.util.find_spec(f"{__name__}.{kind}") is not None


def open_backend(cluster: Cluster, state_dir: Path | None = None) -> Backend:
    """The backend that serves *cluster*, for the orchestrator in *state_dir* (the user's unless given).

    Imports that kind's module only; contacts nothing.
    """
    if not backend_exists(cluster.kind):
        known = ", ".join(backend_kinds())
        raise SpecError(f"unknown cluster kind {cluster.kind!r}", where=cluster.name, hint=f"known kinds: {known}")
    return cast("Backend", importlib.import_module(f"{__name__}.{cluster.kind}").BACKEND(cluster, state_dir=state_dir))
