"""Session of a service: calls of the API as HTTP requests, which are sent again when an answer was lost."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from orc.orchestrator.clients import transport
from orc.orchestrator.clients.requests import request_of

if TYPE_CHECKING:
    from orc.orchestrator.api.call import Call, P, R
    from orc.orchestrator.clients.logins import Login
    from orc.orchestrator.clients.requests import Answer, Request


class HttpSession:
    """Connection to the service of *login*; *sleep* waits between requests. Raises `LaunchError` for an unsafe one."""

    def __init__(self, login: Login, sleep: Callable[[float], None] = time.sleep) -> None:
        import httpx

        self.login, self.sleep = login, sleep
        self.http = httpx.Client(**transport.options(login))

    def carry_out(self, call: Call[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
        """Return the result of *call*, which the service makes. Raises `LaunchError`."""
        return self.ask(request_of(call, *args, **kwargs))

    def ask(self, request: Request[Answer]) -> Answer:
        """Return the answer to *request*, sent again when it was lost. Raises `LaunchError`."""
        import httpx

        transport.refuse_clear_secrets(self.login, request)
        attempt = 0
        while True:
            attempt += 1
            response, lost = None, None
            try:
                content: dict[str, Any] = {} if request.content is None else {"content": request.content()}
                response = self.http.request(request.method, request.path, **transport.arguments(request), **content)
            except httpx.TransportError as error:
                lost = error
            wait = transport.pause(attempt, response)
            if wait is not None:
                self.sleep(wait)
            elif response is None:
                assert lost is not None
                raise transport.unreachable(lost, self.login.url) from lost
            else:
                return transport.answer(response, request, self.login.url)
