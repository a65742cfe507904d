"""Description of the API in OpenAPI: what FastAPI derives, and the role that each route needs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from orc.orchestrator.service.auth import role_of_route


class Description:
    """OpenAPI document of an application, made when it is first requested."""

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
