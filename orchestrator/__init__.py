"""The orchestrator: ledger, reconciler, service, command line and Python client.

``from orc.orchestrator import Client`` and its like are imported when they are first used: `orc --help` needs none.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from orc.orchestrator.api.call import JobNotFound as JobNotFound
    from orc.orchestrator.client import Client as Client
    from orc.orchestrator.clients.asynchronous import AsyncServiceClient as AsyncServiceClient
    from orc.orchestrator.clients.connecting import connect as connect
    from orc.orchestrator.clients.connecting import connect_async as connect_async
    from orc.orchestrator.clients.service import ServiceClient as ServiceClient
    from orc.orchestrator.clients.surface import JobsClient as JobsClient

# Every public name and the module below this package that it comes from.
_HOMES = {
    "AsyncServiceClient": "clients.asynchronous",
    "Client": "client",
    "JobNotFound": "api.call",
    "JobsClient": "clients.surface",
    "ServiceClient": "clients.service",
    "connect": "clients.connecting",
    "connect_async": "clients.connecting",
}
__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
