"""Connections to a service. By the standard library: to import httpx takes longer than the rest of `orc list`."""

from __future__ import annotations

import base64
import contextlib
import json
import ssl
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPSConnection
from typing import TYPE_CHECKING, Any
from urllib.parse import SplitResult, unquote, urlencode, urlsplit

from orc.launchers.errors import LaunchError
from orc.orchestrator.clients import logins

if TYPE_CHECKING:
    from orc.orchestrator.clients.http_session import Request
    from orc.orchestrator.clients.logins import Login

_CONNECT_S = 10.0
_IDLE_S = 5.0  # how long a connection is kept: services and what is in between forget those that are silent
_PORTS = {"http": 80, "https": 443}


@dataclass(frozen=True)
class Response:
    """Response of a service, read to its end."""

    status: int
    headers: Mapping[str, str]  # by their names in lower case
    content: bytes

    @property
    def is_json(self) -> bool:
        """True where its content says that it is JSON."""
        return "json" in self.headers.get("content-type", "")


class Connections:
    """Connections to the service of *login*. An idle one serves the next request, of whatever thread.

    Raises `LaunchError` for a login that is not safe.
    """

    def __init__(self, login: Login) -> None:
        logins.refuse_clear_text(login)
        self._url = urlsplit(login.url)
        self._context = _trust(login) if self._url.scheme == "https" else None
        self._proxy = None if logins.is_loopback(login.url) else _proxy_of(self._url)
        self._headers = {"User-Agent": "orc", "Accept": "application/json"}
        if login.token:
            self._headers["Authorization"] = f"Bearer {login.token}"
        self._idle: list[tuple[HTTPConnection, float]] = []
        self._closed = False

    def exchange(self, request: Request[Any]) -> Response:
        """Return the response to *request*. No redirection is followed: it would carry the token to wherever it leads.

        Raises `OSError` or `http.client.HTTPException` where none comes.
        """
        target, headers = self._url.path + request.path, {**self._headers, **request.headers}
        if request.params:
            target += "?" + urlencode(request.params, doseq=True)
        body: Iterator[bytes] | bytes | None = request.content() if request.content is not None else None
        if body is None and request.body is not None:
            headers["Content-Type"] = "application/json"
            body = json.dumps(request.body, allow_nan=False).encode()
        if self._proxy is not None and self._context is None:
            target = f"http://{self._url.netloc}{target}"
            headers |= _credentials(self._proxy)
        connection = self._taken() or self._opened()
        try:
            connection.sock.settimeout(request.timeout_s)
            # Who refuses a body may answer before it has come, and close.
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                connection.request(request.method, target, body, headers)
            response = connection.getresponse()
            content = response.read()
        except BaseException:
            connection.close()
            raise
        self._give_back(connection)
        return Response(response.status, {name.lower(): value for name, value in response.getheaders()}, content)

    def _taken(self) -> HTTPConnection | None:
        while self._idle:
            with contextlib.suppress(IndexError):  # another thread was faster
                connection, since = self._idle.pop()
                if time.monotonic() - since < _IDLE_S:
                    return connection
                connection.close()
        return None

    def _opened(self) -> HTTPConnection:
        at = self._proxy or self._url
        address = at.hostname or "", at.port or _PORTS[at.scheme]
        if self._context is None:
            connection = HTTPConnection(*address, timeout=_CONNECT_S)
        else:
            connection = HTTPSConnection(*address, timeout=_CONNECT_S, context=self._context)
            if self._proxy is not None:
                to = self._url.hostname or "", self._url.port or _PORTS["https"]
                connection.set_tunnel(*to, _credentials(self._proxy))
        try:
            connection.connect()
        except BaseException:
            connection.close()
            raise
        return connection

    def _give_back(self, connection: HTTPConnection) -> None:
        if connection.sock is not None:  # the service has not closed it
            self._idle.append((connection, time.monotonic()))
        if self._closed:
            self.close()

    def close(self) -> None:
        """Close the idle ones; those in use are closed after their requests."""
        self._closed = True
        while self._idle:
            with contextlib.suppress(IndexError):
                self._idle.pop()[0].close()


def _trust(login: Login) -> ssl.SSLContext:
    try:
        # Python's own: the system's certificates, and the variables that OpenSSL knows.
        return ssl.create_default_context(cafile=login.ca or None)
    except (OSError, ssl.SSLError) as error:
        raise LaunchError(
            f"the file of certificates cannot be read: {error.strerror or error}", where=login.ca
        ) from None


def _proxy_of(url: SplitResult) -> SplitResult | None:
    """Return the proxy that the environment names for *url*. Raises `LaunchError` for one that cannot be used."""
    from urllib.request import getproxies, proxy_bypass

    named = getproxies()
    text = named.get(url.scheme) or named.get("all")
    if not text or proxy_bypass(url.netloc):
        return None
    proxy = urlsplit(text if "://" in text else f"http://{text}")
    if proxy.scheme != "http" or not proxy.hostname:
        raise LaunchError(  # which does not repeat it: it may have a password
            "the proxy is not one of http://", where=f"{url.scheme}_proxy", hint="or name the service in NO_PROXY"
        )
    return proxy


def _credentials(proxy: SplitResult) -> dict[str, str]:
    if proxy.username is None:
        return {}
    words = f"{unquote(proxy.username)}:{unquote(proxy.password or '')}"
    return {"Proxy-Authorization": "Basic " + base64.b64encode(words.encode()).decode()}
