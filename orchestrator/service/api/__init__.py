"""Routers of the REST API, a file for each kind of thing (docs/reference/rest-api.md)."""

from __future__ import annotations

from fastapi import APIRouter

from orc.orchestrator.service.api import (
    bundles,
    clusters,
    events,
    groups,
    health,
    insight,
    jobs,
    logs,
    quotas,
    reports,
    schedules,
    sessions,
    submit,
    tokens,
)

# Below /api/v1.
ROUTERS: tuple[APIRouter, ...] = (
    sessions.router,
    jobs.router,
    insight.router,
    reports.router,
    submit.router,
    groups.router,
    schedules.router,
    bundles.router,
    events.router,
    logs.router,
    clusters.router,
    tokens.router,
    quotas.router,
)
# At the top: what probes ask for.
TOP_ROUTERS: tuple[APIRouter, ...] = (health.router,)
