"""A service that tests talk to with its clients."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from orc.orchestrator.api.call import PREFIX
from orc.orchestrator.client import Client
from orc.orchestrator.clients.http_session import Request, Response
from orc.orchestrator.clients.service import ServiceClient


@dataclass
class Served:
    """A running service."""

    state_dir: Path
    clusters: Path
    url: str = ""
    tokens: dict[str, str] = field(default_factory=dict)

    def ledger(self) -> Client:
        """A client of its ledger."""
        return Client(self.state_dir, self.clusters, reconciler=False)

    def client(self, user: str = "grace") -> ServiceClient:
        """A client of the service, as *user*."""
        return ServiceClient(self.url, self.tokens[user])


def requests_of(client: ServiceClient) -> list[str]:
    """The requests that *client* sends from now on, like ``GET /jobs``."""
    sent: list[str] = []
    exchange = client.session.connections.exchange

    def noted(request: Request[Any]) -> Response:
        sent.append(f"{request.method} {request.path.removeprefix(PREFIX)}")
        return exchange(request)

    client.session.connections.exchange = noted  # type: ignore[method-assign]
    return sent
