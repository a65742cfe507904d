"""The gate in front of every request: host names, sizes, rates, headers of answers, the access log."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from typing import Any

import anyio.to_thread
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from orc.launchers.control_characters import escape_controls
from orc.launchers.errors import LaunchError
from orc.orchestrator.api.call import PREFIX
from orc.orchestrator.service.auth import address_of, admit, token_of
from orc.orchestrator.service.context import Service
from orc.orchestrator.service.errors import ApiError, error_response, status_of

logger = logging.getLogger("orc.service")
access = logging.getLogger("orc.service.access")
# Larger bodies go to these alone. Bodies that are JSON are read into memory before a route's guard is asked, so these
# routes know here already who sends them. Contents of files are streamed to the disk.
UPLOADS = f"{PREFIX}/bundles/"
_CONTENT = UPLOADS + "content"
_LARGEST_MANIFEST = 64 << 20
_SLOWEST = 8 << 10  # bytes a second of a body, after its first moments
_HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
    "Content-Security-Policy": "default-src 'none'; frame-ancestors 'none'",  # a page sets its own
}


class Body:
    """Body of a request: no larger than *limit*, with no longer silence than *patience_s*, and not too slow."""

    def __init__(self, scope: Scope, receive: Receive, limit: int, patience_s: float) -> None:
        headers = Headers(scope=scope)
        self.complete = headers.get("content-length", "0") == "0" and "transfer-encoding" not in headers
        self._receive, self._limit, self._patience_s = receive, limit, patience_s
        self._taken, self._begun, self._ended = 0, time.monotonic(), False

    async def receive(self) -> Message:
        """Return the next piece. Raises `HTTPException`."""
        if self._ended:
            return await self._receive()  # the end of the connection, which may take hours
        # One byte now and then is no silence, and would hold the connection for ever.
        left = self._begun + 2 * self._patience_s + self._taken / _SLOWEST - time.monotonic()
        try:
            message = await asyncio.wait_for(self._receive(), min(self._patience_s, max(left, 0.0)))
        except TimeoutError:
            raise HTTPException(408, "the body does not come") from None
        self._taken += len(message.get("body", b""))
        if self._taken > self._limit:
            raise HTTPException(413, f"the body is larger than {self._limit} bytes")
        if message["type"] != "http.request" or not message.get("more_body", False):
            self._ended = self.complete = True
        return message


class Gate:
    """ASGI application around the service's own."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app, self._service = app, service
        self._hosts = _names(service)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or answer it here."""
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self._app(scope, receive, send)
            return  # no websockets
        began = time.perf_counter()
        status = 0
        body = Body(scope, receive, self._limit(scope), self._service.settings.body_timeout)

        async def send_on(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = MutableHeaders(scope=message)
                for name, value in _HEADERS.items():
                    headers.setdefault(name, value)
                if self._service.settings.tls:
                    headers.setdefault("Strict-Transport-Security", "max-age=31536000")
                if not body.complete:
                    headers["Connection"] = "close"  # what still comes of it would be read, and thrown away, for ever
                if scope["path"].startswith("/api/"):
                    headers.setdefault("Cache-Control", "no-store")
            await send(message)

        try:
            refusal = self._refusal(scope) or await self._stranger(scope)
            if refusal is not None:
                await refusal(scope, receive, send_on)
            else:
                await self._app(scope, body.receive, send_on)
        except Exception:
            if status:
                raise
            # The boundary: a defect in one route is one answer, and says nothing of the inside.
            logger.exception("%s %s failed", scope["method"], escape_controls(scope["path"]))
            answer = error_response(500, "an internal error", hint="the service's log has the details")
            await answer(scope, receive, send_on)
        finally:
            self._note(scope, status, time.perf_counter() - began)

    def _refusal(self, scope: Scope) -> ASGIApp | None:
        headers = Headers(scope=scope)
        service = self._service
        if self._hosts is not None and _host_of(headers) not in self._hosts:
            return error_response(
                400, "this service is not known by that name", where="Host", hint="allowed_hosts names the others"
            )
        request = Request(scope)
        # Who brings a token is counted by it, once it is known to be one: others behind the same address are strangers.
        if not token_of(request)[0] and (wait := service.rates.retry_after("address", address_of(request))):
            return error_response(
                429, "too many requests", hint=f"try again in {wait} s", headers={"Retry-After": str(wait)}
            )
        length = headers.get("content-length", "0")
        if not (length.isascii() and length.isdigit()):
            return error_response(400, "no such length", where="Content-Length")
        if len(length) > 18 or int(length) > self._limit(scope):
            return _too_large(self._limit(scope))
        return None

    def _limit(self, scope: Scope) -> int:
        settings = self._service.settings
        if not scope["path"].startswith(UPLOADS):
            return settings.max_body
        return settings.max_upload if scope["path"] == _CONTENT else max(_LARGEST_MANIFEST, settings.max_body)

    async def _stranger(self, scope: Scope) -> ASGIApp | None:
        """Return the refusal of a large body from a client that may not send it."""
        if not scope["path"].startswith(UPLOADS):
            return None
        request = Request(scope)
        try:
            await anyio.to_thread.run_sync(admit, self._service, request, "user")
        except ApiError as error:
            return error_response(error.status, error.what, hint=error.hint, headers=error.headers)
        except LaunchError as error:
            return error_response(status_of(error), error.what, where=error.where, hint=error.hint)
        return None

    def _note(self, scope: Scope, status: int, seconds: float) -> None:
        route: Any = scope.get("route")
        path = getattr(route, "path", "") or "other"
        if scope["path"].startswith(PREFIX) and not path.startswith(PREFIX) and path != "other":
            path = PREFIX + path  # versions of FastAPI differ in whether a route knows what it was included below
        self._service.metrics.requests.labels(scope["method"], path, str(status)).observe(seconds)
        if status in (401, 403, 413, 429):
            self._service.metrics.refused.labels(str(status)).inc()
        principal = scope.get("state", {}).get("principal")
        # The query is left out: whatever was mistyped into it would be kept here.
        address, path = scope["client"][0] if scope.get("client") else "?", scope["path"][:500]
        if self._service.settings.access_log == "json":
            line = {"at": round(self._service.clock(), 3), "address": address, "method": scope["method"], "path": path}
            line |= {"status": status, "ms": round(seconds * 1000, 1)}
            line |= {"user": principal.user, "token_id": principal.token_id} if principal else {}
            access.info("%s", json.dumps(line))
            return
        access.info(
            "%s %s %s %d %.1fms %s",
            address,
            scope["method"],
            escape_controls(path),
            status,
            seconds * 1000,
            f"{escape_controls(principal.user)} {principal.token_id}" if principal else "-",
        )


def _too_large(limit: int) -> ASGIApp:
    return error_response(413, f"the body is larger than {limit} bytes", headers={"Connection": "close"})


def _names(service: Service) -> frozenset[str] | None:
    """Return the host names that the service answers to; `None` for any, where none are configured.

    On loopback a web site could otherwise have its own name point here, and act with the browser's session.
    """
    settings = service.settings
    if settings.allowed_hosts:
        return frozenset({*(name.lower() for name in settings.allowed_hosts), "127.0.0.1", "localhost", "[::1]"})
    if settings.is_loopback and not settings.behind_proxy:
        return frozenset({"127.0.0.1", "localhost", "[::1]", settings.host.lower()})
    return None


def _host_of(headers: Headers) -> str:
    """Return the name of the Host header without its port."""
    host = headers.get("host", "").lower()
    if host.startswith("["):
        return host.partition("]")[0] + "]"
    return host.partition(":")[0]
