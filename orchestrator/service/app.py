"""The application: routes behind the gate and the guard."""

from __future__ import annotations

import importlib.metadata
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import anyio.to_thread
from fastapi import APIRouter, Depends, FastAPI
from fastapi.openapi.utils import get_openapi

from orc.orchestrator.api.call import PREFIX
from orc.orchestrator.client import Client
from orc.orchestrator.service import errors, request_limits
from orc.orchestrator.service.api import ROUTERS, TOP_ROUTERS
from orc.orchestrator.service.audit import Audit, intend
from orc.orchestrator.service.auth import guard, role_of_route
from orc.orchestrator.service.context import Service
from orc.orchestrator.service.feeds import EventFeed, LogFeeds
from orc.orchestrator.service.gate import Gate
from orc.orchestrator.service.ledger_clients import LedgerClients, Lines
from orc.orchestrator.service.metrics import ServiceMetrics
from orc.orchestrator.service.request_limits import RequestRates
from orc.orchestrator.service.settings import Settings
from orc.orchestrator.service.web.pages import add_pages

_STREAM_THREADS = 6


def _open_client() -> Client:
    return Client(reconciler=False)


def create_app(settings: Settings, *, open_client: Callable[[], Client] = _open_client) -> FastAPI:
    """Return the service as an ASGI application; ``app.state.service`` is its `Service`.

    Args:
        settings: Settings of the service.
        open_client: Opens a client of the ledger; called for each of the threads that work on requests.
    """
    # As many clients as threads: nobody waits for a client who has a thread.
    clients = LedgerClients(open_client, settings.threads + _STREAM_THREADS + request_limits.THREADS + 4)
    service = Service(
        settings,
        clients,
        RequestRates(settings.requests_per_minute, settings.failed_logins_per_minute),
        EventFeed(clients, settings.poll_interval),
        LogFeeds(clients, _STREAM_THREADS),
        ServiceMetrics(),
        request_limits.SlowReads(),
        Lines(clients),
    )

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        anyio.to_thread.current_default_thread_limiter().total_tokens = settings.threads
        for route in app.routes:  # FastAPI makes them ready (0.6 s) when they are first looked at: nobody waits now
            route.matches({"type": "http", "method": "GET", "path": "/-", "root_path": "", "headers": []})
        yield
        service.stopping.set()
        service.events.close()
        clients.close()

    description = Description()
    app = FastAPI(
        title="orc",
        version=importlib.metadata.version("orc-launch"),
        description="Jobs of PyTorch training on any cluster.",
        docs_url=None,  # its pages load scripts from elsewhere
        redoc_url=None,
        openapi_url="/openapi.json",
        dependencies=[Depends(guard), Depends(intend)],
        responses=errors.ERROR_RESPONSES,
        generate_unique_id_function=description.operation_id,
        lifespan=lifespan,
    )
    app.state.service = service
    description.attach(app)
    errors.install(app)
    below = APIRouter(prefix=PREFIX)
    for router in ROUTERS:
        below.include_router(router)
    app.include_router(below)
    for router in TOP_ROUTERS:
        app.include_router(router)
    add_pages(app)
    app.add_middleware(Audit, service=service)
    app.add_middleware(Gate, service=service)  # the outermost
    return app


class Description:
    """OpenAPI document of an application, made at the first request: what FastAPI derives, and each route's role."""

    def __init__(self) -> None:
        self._endpoints: dict[str, Callable[..., Any]] = {}
        self._document: dict[str, Any] | None = None

    def operation_id(self, route: Any) -> str:
        """Return the name of a route's operation: that of its function."""
        name: str = route.name
        if self._endpoints.setdefault(name, route.endpoint) is not route.endpoint:
            raise ValueError(f"two routes are called {name}")
        return name

    def attach(self, app: FastAPI) -> None:
        """Let *app* describe itself by this."""

        def openapi() -> dict[str, Any]:
            if self._document is None:
                document = get_openapi(
                    title=app.title, version=app.version, description=app.description, routes=app.routes
                )
                for methods in document["paths"].values():
                    for method, operation in methods.items():
                        self._add_role(method.upper(), operation)
                self._document = document
            return self._document

        app.openapi = openapi  # type: ignore[method-assign]

    def _add_role(self, method: str, operation: dict[str, Any]) -> None:
        role = role_of_route(self._endpoints[operation["operationId"]], method)
        if role is None:
            operation["security"] = []
        else:
            operation["x-orc-role"] = role
