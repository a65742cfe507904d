"""Session of a service: calls of the API as HTTP requests, which are sent again when an answer was lost."""

from __future__ import annotations

import json
import random
import ssl
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from http.client import HTTPException
from typing import TYPE_CHECKING, Any

from orc.launchers.errors import LaunchError
from orc.orchestrator.clients import logins
from orc.orchestrator.clients.connections import Connections
from orc.orchestrator.clients.errors import ServiceUnreachable, error_of
from orc.orchestrator.clients.requests import Reply, request_of

if TYPE_CHECKING:
    from orc.orchestrator.api.call import Call, P, R
    from orc.orchestrator.clients.connections import Response
    from orc.orchestrator.clients.logins import Login
    from orc.orchestrator.clients.requests import Answer, Request


TRIES = 5
_AGAIN = (502, 503, 504)
_LONGEST_PAUSE_S = 20.0


def refuse_clear_secrets(login: Login, request: Request[Any]) -> None:
    """Raise `LaunchError` for values of secrets that would travel over a network in the clear, whoever agreed to that
    for the token.
    """
    if login.url.startswith("https://") or logins.is_loopback(login.url):
        return
    if isinstance(request.body, dict) and request.body.get("secrets"):
        raise LaunchError(
            "the values of the job's secrets would travel unencrypted",
            where=login.url,
            hint="use https://, or a tunnel to the loopback address (ssh -L)",
        )


def answer(response: Response, request: Request[Answer], url: str) -> Answer:
    """Return what *response* answers. Raises `LaunchError` for an error, or what is no answer."""
    body: Any = None
    if response.is_json:
        with suppress(ValueError):
            body = json.loads(response.content)
    if not 200 <= response.status < 400:
        raise error_of(response.status, body, path=request.path, url=url)
    try:
        if response.status < 300:
            return request.read(Reply(body, response.content))
    except (KeyError, TypeError, ValueError, AttributeError):
        pass
    raise ServiceUnreachable(
        "the answer is not that of a service of orc", where=url, hint="check the URL, and proxies in between"
    )


def unreachable(error: Exception, url: str) -> ServiceUnreachable:
    """Return the error for a service that gave no answer."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, ssl.SSLCertVerificationError):
            return ServiceUnreachable(
                f"the service's certificate is not trusted: {cause.verify_message}",
                where=url,
                hint="`orc login --ca FILE URL` trusts the certificate of its authority",
            )
        cause = cause.__cause__ or cause.__context__
    what = str(error) or type(error).__name__
    return ServiceUnreachable(
        f"the service cannot be reached: {what}", where=url, hint="is `orc serve` running there? ORC_SERVICE_URL=local "
        "uses the ledger of this machine instead",
    )  # fmt: skip


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
        with self.around():
            return self._ask(request)

    def _ask(self, request: Request[Answer]) -> Answer:
        refuse_clear_secrets(self.login, request)
        attempt = 0
        while True:
            attempt += 1
            response, lost = None, None
            try:
                response = self.connections.exchange(request)
            except (OSError, HTTPException) as error:
                lost = error
            wait = pause(attempt, response)
            if wait is not None:
                self.sleep(wait)
            elif response is None:
                assert lost is not None
                raise unreachable(lost, self.login.url) from lost
            else:
                return answer(response, request, self.login.url)
