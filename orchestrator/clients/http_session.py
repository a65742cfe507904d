"""Session of a service: calls of the API as HTTP requests, which are values, and sent again when an answer was lost.

Connections are the standard library's: to import httpx takes longer than the rest of `orc list`.
"""

from __future__ import annotations

import base64
import functools
import json
import random
import select
import ssl
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from typing import TYPE_CHECKING, Any, Generic, TypeVar
from urllib.parse import SplitResult, quote, unquote, urlencode, urlsplit

from orc.launchers.errors import LaunchError
from orc.orchestrator.api.call import PREFIX, SLOW_S, Call, P, R
from orc.orchestrator.clients import logins
from orc.orchestrator.clients.errors import ServiceUnreachable, error_of
from orc.orchestrator.views import encode

if TYPE_CHECKING:
    from orc.orchestrator.clients.logins import Login

_CONNECT_S = 10.0
_IDLE_S = 5.0  # how long a connection is kept: services and what is in between forget those that are silent
_MOST_IDLE = 20
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

    @functools.cached_property
    def json(self) -> Any:
        """Its JSON; `None` where it is none."""
        with suppress(ValueError):
            return json.loads(self.content) if self.is_json else None
        return None


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
            with suppress(BrokenPipeError, ConnectionResetError):
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
            with suppress(IndexError):  # another thread was faster
                connection, since = self._idle.pop()
                if time.monotonic() - since < _IDLE_S and not _has_ended(connection):
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
        now = time.monotonic()
        if connection.sock is not None:  # the service has not closed it
            self._idle.append((connection, now))
        with suppress(IndexError):
            while len(self._idle) > _MOST_IDLE or now - self._idle[0][1] >= _IDLE_S:
                self._idle.pop(0)[0].close()
        if self._closed:
            self.close()

    def close(self) -> None:
        """Close the idle ones; those in use are closed after their requests."""
        self._closed = True
        while self._idle:
            with suppress(IndexError):
                self._idle.pop()[0].close()


def _has_ended(connection: HTTPConnection) -> bool:
    """Return whether the other side has closed an idle connection: then there is its end to read."""
    poll = select.poll()
    poll.register(connection.sock, select.POLLIN)
    return bool(poll.poll(0))


def _trust(login: Login) -> ssl.SSLContext:
    try:
        # Python's own: the system's certificates, and the variables that OpenSSL knows.
        return ssl.create_default_context(cafile=login.ca or None)
    except OSError as error:
        what = f"the file of certificates cannot be read: {error.strerror or error}"
        raise LaunchError(what, where=login.ca) from None


def _proxy_of(url: SplitResult) -> SplitResult | None:
    """Return the proxy that the environment names for *url*. Raises `LaunchError` for one that cannot be used."""
    from urllib.request import getproxies, proxy_bypass

    named = getproxies()
    text = named.get(url.scheme) or named.get("all")
    if not text or proxy_bypass(url.netloc):
        return None
    proxy = urlsplit(text if "://" in text else f"http://{text}")
    if proxy.scheme != "http" or not proxy.hostname:  # it is not repeated: it may have a password
        hint = "or name the service in NO_PROXY"
        raise LaunchError("the proxy is not one of http://", where=f"{url.scheme}_proxy", hint=hint)
    return proxy


def _credentials(proxy: SplitResult) -> dict[str, str]:
    if proxy.username is None:
        return {}
    words = f"{unquote(proxy.username)}:{unquote(proxy.password or '')}"
    return {"Proxy-Authorization": "Basic " + base64.b64encode(words.encode()).decode()}


TRIES = 5
_AGAIN = (502, 503, 504)
_LONGEST_PAUSE_S = 20.0


def refuse_clear_secrets(login: Login, request: Request[Any]) -> None:
    """Raise `LaunchError` for values of secrets that would travel over a network in the clear, whoever agreed to that
    for the token.
    """
    clear = not login.url.startswith("https://") and not logins.is_loopback(login.url)
    if clear and isinstance(request.body, dict) and request.body.get("secrets"):
        hint = "use https://, or a tunnel to the loopback address (ssh -L)"
        raise LaunchError("the values of the job's secrets would travel unencrypted", where=login.url, hint=hint)


def answer(response: Response, request: Request[Answer], url: str) -> Answer:
    """Return what *response* answers. Raises `LaunchError` for an error, or what is no answer."""
    if not 200 <= response.status < 400:
        raise error_of(response.status, response.json, path=request.path, url=url)
    with suppress(KeyError, TypeError, ValueError, AttributeError):
        if response.status < 300:
            return request.read(response)
    what = "the answer is not that of a service of orc"
    raise ServiceUnreachable(what, where=url, hint="check the URL, and proxies in between")


def unreachable(error: Exception, url: str) -> ServiceUnreachable:
    """Return the error for a service that gave no answer."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, ssl.SSLCertVerificationError):
            hint = "`orc login --ca FILE URL` trusts the certificate of its authority"
            what = f"the service's certificate is not trusted: {cause.verify_message}"
            return ServiceUnreachable(what, where=url, hint=hint)
        cause = cause.__cause__ or cause.__context__
    what = f"the service cannot be reached: {str(error) or type(error).__name__}"
    hint = "is `orc serve` running there? ORC_SERVICE_URL=local uses the ledger of this machine instead"
    return ServiceUnreachable(what, where=url, hint=hint)


def pause(attempt: int, response: Response | None) -> float | None:
    """Return how long to wait before a request is sent again, for the *attempt*-th time; `None` for an answer to keep.

    Answers that say so are waited for, a lost connection is tried again soon.
    """
    if attempt >= TRIES:
        return None
    if response is not None:
        if response.status in (429, 503) and (asked_s := _seconds(response.headers)) is not None:
            return min(asked_s, _LONGEST_PAUSE_S)
        # What the service itself has said is its answer; that of a proxy in between is none.
        if response.status not in _AGAIN or response.is_json:
            return None
    return float(0.1 * 2**attempt) * random.uniform(0.5, 1.0)  # noqa: S311 - spreads clients, hides nothing


def _seconds(headers: Mapping[str, str]) -> float | None:
    try:
        return max(float(headers["retry-after"]), 0.0)
    except (KeyError, ValueError):
        return None


class HttpSession:
    """Connection to the service of *login*; *sleep* waits between requests. Raises `LaunchError` for an unsafe one."""

    def __init__(self, login: Login, sleep: Callable[[float], None] = time.sleep) -> None:
        self.login, self.sleep = login, sleep
        self.around: Callable[[], AbstractContextManager[None]] = nullcontext  # entered while an answer is waited for
        self.connections = Connections(login)

    def carry_out(self, call: Call[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
        """Return the result of *call*, which the service makes. Raises `LaunchError`."""
        return self.ask(request_of(call, *args, **kwargs))

    def ask(self, request: Request[Answer]) -> Answer:
        """Return the answer to *request*, sent again when it was lost. Raises `LaunchError`."""
        refuse_clear_secrets(self.login, request)
        with self.around():
            attempt = 0
            while True:
                attempt += 1
                try:
                    response = self.connections.exchange(request)
                except (OSError, HTTPException) as error:
                    if (wait := pause(attempt, None)) is None:
                        raise unreachable(error, self.login.url) from error
                else:
                    if (wait := pause(attempt, response)) is None:
                        return answer(response, request, self.login.url)
                self.sleep(wait)


Answer = TypeVar("Answer")


@dataclass(frozen=True)
class Request(Generic[Answer]):
    """Request, and the reading of its answer. Sent twice, it does its work once: an answer that was lost is requested
    again."""

    method: str
    path: str
    read: Callable[[Response], Answer]
    params: Mapping[str, Any] = field(default_factory=dict)
    body: Any = None
    content: Callable[[], Iterator[bytes]] | None = None  # instead of a body, made anew for every time it is sent
    headers: Mapping[str, str] = field(default_factory=dict)
    timeout_s: float = 60.0


def request_of(call: Call[P, R], /, *args: P.args, **kwargs: P.kwargs) -> Request[R]:
    """Return the request that asks a service for *call*."""
    given = call.bind(*args, **kwargs)
    path = PREFIX + call.path
    places: dict[str, dict[str, Any]] = {"path": {}, "query": {}, "header": {}, "body": {}}
    for parameter in call.parameters:
        if parameter.name not in given:
            continue
        value = encode(given[parameter.name])
        if parameter.name == "limit":  # what is asked for beyond that comes with the next page
            value = min(value, parameter.bounds.limits["le"])
        if parameter.place == "path":
            path = path.replace(f"{{{parameter.name}}}", quote(str(value), safe=""))
        elif parameter.place == "body" or value not in (None, ""):
            places[parameter.place][parameter.bounds.header or parameter.name] = value
    takes_body = any(parameter.place == "body" for parameter in call.parameters)
    body = places["body"].get(call.whole_body) if call.whole_body else places["body"]
    return Request(
        call.method, path, lambda reply: call.read(reply.json), places["query"], body if takes_body else None,
        headers=places["header"], timeout_s=call.timeout_s,
    )  # fmt: skip


def put_contents(content: Callable[[], Iterator[bytes]], size: int) -> Request[None]:
    """Send contents, as a stream of `orc.launchers.transfer.wire`, *size* bytes in all."""
    headers = {"Content-Type": "application/octet-stream", "Content-Length": str(size)}
    path = f"{PREFIX}/bundles/content"
    return Request("PUT", path, lambda _: None, content=content, headers=headers, timeout_s=SLOW_S)


def put_tree(digest: str, manifest: Mapping[str, Any]) -> Request[list[str]]:
    """Send a manifest, whose contents the service has; the answer has those that it lacks after all."""
    path = f"{PREFIX}/bundles/trees/{quote(digest, safe='')}"
    return Request("PUT", path, lambda reply: list(reply.json["missing"]), body=dict(manifest), timeout_s=SLOW_S)


def log_content(job_id: str, params: Mapping[str, Any]) -> Request[bytes]:
    """Return the request for bytes of a log; *params* name the log and the place."""
    return Request("GET", f"{PREFIX}/jobs/{quote(job_id, safe='')}/log", lambda reply: reply.content, params)


def new_key() -> str:
    """Return a key of one submission, which no other has."""
    return uuid.uuid4().hex
