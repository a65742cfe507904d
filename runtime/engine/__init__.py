"""The engine owns backward, step, clipping, gradient synchronisation and the state dict. There is exactly one.

A new engine is a module here with an attribute ``ENGINE``, a class that keeps the contract in `engine.base`; in `_name`
the layout names it, or what computes. One of a library is a folder, which `core.libraries` finds.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from orc.runtime.core.libraries import libraries
from orc.runtime.engine.base import Engine

if TYPE_CHECKING:
    from orc.runtime.core.context import RunContext
    from orc.runtime.core.options import Options
    from orc.runtime.core.prepared import Prepared


def engine_for(ctx: RunContext, options: Options | None = None, prepared: Prepared | None = None) -> Engine:
    """Return the engine that trains in *ctx* with *options*, over the objects in *prepared*. Nothing else makes one."""
    from orc.runtime.core.prepared import Prepared

    if ctx.library is not None:
        kind = libraries()[ctx.library.engine].engine()
    else:
        kind = importlib.import_module(f"{__name__}.{_name(ctx)}").ENGINE
    engine: Engine = kind(ctx, options, Prepared() if prepared is None else prepared)
    return engine


def _name(ctx: RunContext) -> str:
    if ctx.topology_chosen and ctx.topology.size("pp") > 1:
        return "pipeline"
    return ctx.compute.engine


__all__ = ["Engine", "engine_for"]
