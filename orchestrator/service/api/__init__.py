"""Routers of the REST API (docs/reference/rest-api.md): one for all calls, and those that are more than a call.

What answers with bytes or streams, reads a body piece by piece or sets cookies has a route of its own.
"""

from __future__ import annotations

from fastapi import APIRouter

from orc.orchestrator.api import access, clusters, groups, insight, jobs, logs  # noqa: F401 - their calls
from orc.orchestrator.api.call import CALLS
from orc.orchestrator.service import auth
from orc.orchestrator.service.api import bundles, events, health, log_contents
from orc.orchestrator.service.routing import add_routes

_calls = APIRouter()
add_routes(_calls, list(CALLS.values()))
# Below /api/v1.
ROUTERS: tuple[APIRouter, ...] = (
    auth.router,
    _calls,
    bundles.router,
    events.router,
    log_contents.router,
)
# At the top: what probes ask for.
TOP_ROUTERS: tuple[APIRouter, ...] = (health.router,)
