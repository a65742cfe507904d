"""Routes for probes: whether the process lives, whether it can work, and its metrics."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter
from fastapi.responses import JSONResponse, Response

from orc.launchers.errors import LaunchError
from orc.orchestrator.api.call import Kind, shows
from orc.orchestrator.api.groups import Done
from orc.orchestrator.service.auth import public
from orc.orchestrator.service.context import ServiceDep
from orc.orchestrator.service.metrics import CONTENT_TYPE
from orc.orchestrator.views import View


@dataclass(frozen=True)
class Readiness(View):
    """Parts that a service needs, and whether they work."""

    ready: bool
    ledger: str
    driver: str


router = APIRouter(tags=["health"])


@router.get("/healthz", response_model=Done)
@public
async def read_health() -> Any:
    """Answer while the process lives."""
    return JSONResponse({"ok": True})


@router.get("/readyz", response_model=Readiness, responses={503: {"model": Readiness}})
@public
def read_readiness(service: ServiceDep) -> Any:
    """Return whether requests can be served: the ledger answers, and the reconciler lives where there is one."""
    try:
        with service.clients.client() as client:
            client.workspace.ledger.last_event_id()
            ledger = "read-only" if client.workspace.ledger.volatile else "ok"
    except LaunchError:
        ledger = "unreachable"  # the log has the details; whoever asks here has shown no token
    status = service.reconciler_status()
    driver = "none" if status is None else "ok" if status.running else "dead"
    ready = ledger == "ok" and driver != "dead" and not service.stopping.is_set()
    return JSONResponse({"ready": ready, "ledger": ledger, "driver": driver}, 200 if ready else 503)


@router.get("/metrics", response_class=Response, responses={200: {"content": {"text/plain": {}}}})
@shows(Kind.SERVICE)
def read_service_metrics(service: ServiceDep) -> Any:
    """Return metrics in the text form of Prometheus; its scraper sends a token as every client does."""
    with service.clients.client() as client:
        return Response(
            service.metrics.text(client.workspace.ledger, service.clock(), service.reconciler_status()),
            media_type=CONTENT_TYPE,
        )
