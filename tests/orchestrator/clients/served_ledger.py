"""A service that tests talk to with its clients."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from orc.orchestrator.client import Client
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
