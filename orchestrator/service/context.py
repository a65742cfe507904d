"""Context of a running service: what its requests share."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated

from fastapi import Depends, Request

from orc.orchestrator.service.ledger_clients import LedgerClients
from orc.orchestrator.service.request_limits import RequestRates
from orc.orchestrator.service.settings import Settings

if TYPE_CHECKING:
    from orc.orchestrator.engine.passes import ReconcilerStatus
    from orc.orchestrator.service.feeds import EventFeed, LogFeeds
    from orc.orchestrator.service.ledger_clients import Lines
    from orc.orchestrator.service.metrics import ServiceMetrics
    from orc.orchestrator.service.request_limits import SlowReads


@dataclass
class Service:
    """Settings, clients and feeds of one service process."""

    settings: Settings
    clients: LedgerClients
    rates: RequestRates
    events: EventFeed
    logs: LogFeeds
    metrics: ServiceMetrics
    slow_reads: SlowReads
    lines: Lines  # of the audit log
    clock: Callable[[], float] = time.time
    changes: set[str] = field(default_factory=set)  # intents (audit log) of requests that are worked on
    stopping: asyncio.Event = field(default_factory=asyncio.Event)  # no new streams; those that are open end
    reconciler_status: Callable[[], ReconcilerStatus | None] = lambda: None  # None: no reconciler in this process


async def service_of(request: Request) -> Service:
    """Return the service that a request came to."""
    service: Service = request.app.state.service
    return service


ServiceDep = Annotated[Service, Depends(service_of)]
