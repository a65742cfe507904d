"""Audit log: every request that changes something, with its sender. Written before it is answered.

A request that is let in leaves its intent first, so that a process that is killed in the middle leaves a trace
(`orc.orchestrator.ledger.audit`).
"""

from __future__ import annotations

import logging
import threading
import uuid
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import anyio.to_thread
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from orc.launchers.errors import LaunchError
from orc.orchestrator.api.call import SAFE_METHODS
from orc.orchestrator.api.rights import Principal
from orc.orchestrator.ledger import audit as rows
from orc.orchestrator.ledger.database import Connection
from orc.orchestrator.service.auth import address_of
from orc.orchestrator.service.context import Service, ServiceDep
from orc.orchestrator.service.ledger_clients import LedgerClients

logger = logging.getLogger("orc.service")
_Change = Callable[[Connection], None]


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


class Lines:
    """Writing of the audit log. What comes while something is written goes with what comes next, in one transaction."""

    def __init__(self, clients: LedgerClients) -> None:
        self._clients, self._turn = clients, threading.Lock()
        self._waiting = deque[tuple[_Change, Future[None]]]()

    def write(self, change: _Change) -> None:
        """Return once *change* is durable. Raises `LaunchError`. Call it in a thread, never in the event loop."""
        done = Future[None]()
        self._waiting.append((change, done))
        with self._turn:
            if not done.done():
                self._commit([self._waiting.popleft() for _ in range(len(self._waiting))])
        done.result()

    def _commit(self, together: Sequence[tuple[_Change, Future[None]]]) -> None:
        try:
            with self._clients.client() as client, client.workspace.ledger.database.write() as connection:
                for change, _ in together:
                    change(connection)
        except Exception as error:  # noqa: BLE001 - who waits for it raises it
            if len(together) == 1:
                together[0][1].set_exception(error)
            else:
                for alone in together:  # what cannot be written keeps nothing else from it
                    self._commit([alone])
        else:
            for _, done in together:
                done.set_result(None)


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
