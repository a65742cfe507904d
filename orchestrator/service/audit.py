"""Audit log: every request that changes something, with its sender. Written before it is answered.

A request that is let in leaves its intent first, so that a process that is killed in the middle leaves a trace
(`orc.orchestrator.ledger.audit`).
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Mapping
from typing import Any

import anyio.to_thread
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from orc.launchers.errors import LaunchError
from orc.orchestrator.api.call import SAFE_METHODS, Principal
from orc.orchestrator.ledger import audit as rows
from orc.orchestrator.service.auth import address_of
from orc.orchestrator.service.context import Service, ServiceDep

logger = logging.getLogger("orc.service")


def note_subject(request: Request, subject: str, **data: Any) -> None:
    """Name what a request has made or changed, where its path does not; *data* holds no secret."""
    request.state.audit_subject = subject
    request.state.audit_data = data


def intend(request: Request, service: ServiceDep) -> None:
    """Write down that *request*, which the guard has let in, may change something."""
    line = None if request.method in SAFE_METHODS else _line(request.scope, 0)
    if line is None:
        return
    intent = uuid.uuid4().hex
    try:
        service.lines.write(lambda connection: rows.intend(connection, intent, at=service.clock(), **line))
    except LaunchError as error:  # cancelling goes on where nothing can be written
        logger.error("the audit log cannot be written: %s; %s", error, line)
        return
    request.state.audit_intent = intent
    service.changes.add(intent)


class Audit:
    """ASGI application that writes the line of a request when its answer begins."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app, self._service = app, service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, and write down what became of it."""
        if scope["type"] != "http" or scope["method"] in SAFE_METHODS:
            await self._app(scope, receive, send)
            return

        noted = False

        async def note(status: int) -> None:
            nonlocal noted
            if not noted and (line := _line(scope, status)):
                noted = True
                try:
                    await anyio.to_thread.run_sync(self._write, scope.get("state", {}).get("audit_intent"), line)
                except LaunchError as error:
                    logger.error("the audit log cannot be written: %s; %s", error, line)

        async def send_on(message: Message) -> None:
            if message["type"] == "http.response.start":
                await note(message["status"])
            await send(message)

        try:
            await self._app(scope, receive, send_on)
        except Exception:
            await note(500)  # as the gate answers it
            raise
        finally:
            self._service.changes.discard(scope.get("state", {}).get("audit_intent", ""))

    def _write(self, intent: str | None, line: Mapping[str, Any]) -> None:
        at = self._service.clock()
        self._service.lines.write(lambda connection: rows.answer(connection, intent, at=at, **line))


def _line(scope: Scope, status: int) -> dict[str, Any] | None:
    """Return the columns of a request's line; `None` for one that was refused at the door."""
    state = scope.get("state", {})
    principal: Principal | None = state.get("principal")
    route = scope.get("route")
    if principal is None or route is None:
        return None
    subject = state.get("audit_subject") or "/".join(str(part) for part in scope.get("path_params", {}).values())
    return {
        "action": str(getattr(route, "name", "")),
        "subject": subject[:500],
        "user": principal.user,
        "token_id": principal.token_id,
        "address": address_of(Request(scope)),
        "data": {"status": status, **state.get("audit_data", {})},
    }
