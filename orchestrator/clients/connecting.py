"""Choice of the client: of a service where one is configured, else of the ledger of this machine."""

from __future__ import annotations

from typing import TYPE_CHECKING

from orc.launchers.errors import LaunchError
from orc.orchestrator.clients import logins

if TYPE_CHECKING:
    from orc.orchestrator.clients.asynchronous import AsyncServiceClient
    from orc.orchestrator.clients.logins import Login
    from orc.orchestrator.clients.service import ServiceClient
    from orc.orchestrator.clients.surface import JobsClient


def connect(url: str | None = None) -> JobsClient:
    """Return the client that commands use: `ServiceClient` where a service is configured, else `Client`.

    Args:
        url: Of a service, whose token is the one of `orc login` or of ``$ORC_TOKEN``; ``local`` for the ledger. By
            default ``$ORC_SERVICE_URL``, else the service of the last `orc login`, else the ledger.

    Raises:
        LaunchError: The URL is none, the token would travel in the clear, or the ledger cannot be opened.
    """
    login = logins.configured() if url is None else logins.of(url)
    if login is not None:
        return service_client(login)
    from orc.orchestrator.client import Client

    return Client()


def connect_async(url: str | None = None) -> AsyncServiceClient:
    """Return the asynchronous client of a service; *url* as of `connect`.

    Raises:
        LaunchError: As of `connect`; also where no service is configured, as a ledger has no asynchronous client.
    """
    from orc.orchestrator.clients.asynchronous import AsyncServiceClient

    login = logins.configured() if url is None else logins.of(url)
    if login is None:
        raise LaunchError("no service is configured", hint="`orc login URL`, or set ORC_SERVICE_URL")
    return AsyncServiceClient(login.url, login.token, ca=login.ca, insecure_http=login.insecure_http)


def service_client(login: Login) -> ServiceClient:
    """Return the client of a service. Raises `LaunchError`."""
    from orc.orchestrator.clients.service import ServiceClient

    return ServiceClient(login.url, login.token, ca=login.ca, insecure_http=login.insecure_http)
