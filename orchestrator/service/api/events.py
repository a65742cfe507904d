"""The stream of what happens to all jobs."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Annotated, Any

from fastapi import APIRouter, Header, Query

from orc.launchers.errors import LaunchError
from orc.orchestrator.api.rights import Kind, Principal, shows, without_places
from orc.orchestrator.service.auth import PrincipalDep
from orc.orchestrator.service.context import Service, ServiceDep
from orc.orchestrator.service.sse import EventStream, event_stream, last_id, sse_text

logger = logging.getLogger("orc.service")
router = APIRouter(tags=["events"])


@router.get("/events/stream", response_class=EventStream)
@shows(Kind.STATE, parts=(Kind.PLACES,))
async def stream_events(
    service: ServiceDep,
    principal: PrincipalDep,
    after: Annotated[int | None, Query(ge=0, description="Id of the last event that is known")] = None,
    job: Annotated[str | None, Query(max_length=64, description="Events of this job alone")] = None,
    last_event_id: Annotated[str | None, Header(description="Sent by a client that connects again")] = None,
) -> Any:
    """Stream the events of jobs as server-sent events: from now on, or after the one that is known.

    The id of each is the event's. Its data is the event with ``state``, ``name`` and ``owner`` of the job.
    """
    return event_stream(service, _texts(service, principal, last_id(last_event_id, after), job), principal)


async def _texts(service: Service, principal: Principal, after: int | None, job: str | None) -> AsyncGenerator[str]:
    try:
        async with aclosing(service.events.listen(after, job)) as events:
            async for event in events:
                whole = principal.may_see(Kind.PLACES, event.owner)
                yield sse_text(event.to_dict() if whole else without_places(event.to_dict()), event_id=event.id)
    except LaunchError as error:  # the stream ends, and its client comes again with the last id
        logger.warning("a stream of events has ended: %s", error)
