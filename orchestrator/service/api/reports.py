"""Routes of reports over jobs: notifications, differences between two jobs, costs."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict

from orc.orchestrator.service.api.jobs import JobId, Text
from orc.orchestrator.service.auth import PrincipalDep
from orc.orchestrator.service.context import ServiceDep
from orc.orchestrator.service.rights import Kind, shows
from orc.orchestrator.service.slow_reads import asks_clusters

router = APIRouter(tags=["reports"])
Id = Annotated[str, Query(min_length=1, max_length=64, description="Id of a job")]
Time = Annotated[float | None, Query(ge=0, le=4102444800, description="Seconds since the epoch")]


class _Answer(BaseModel):
    model_config = ConfigDict(extra="allow")


class NotificationList(_Answer):
    """Notifications, newest first."""

    notifications: list[dict[str, Any]]


class Revived(_Answer):
    """Number of notifications that are due again."""

    due: int


class Comparison(_Answer):
    """Differences between two jobs."""

    jobs: list[str]
    spec: list[dict[str, Any]]
    environment: list[dict[str, Any]]
    code: dict[str, Any]
    outcome: list[dict[str, Any]]
    metrics: dict[str, Any]


class Costs(_Answer):
    """Hours and costs by group; a cost of `null` is unknown."""

    by: str
    groups: list[dict[str, Any]]
    total: dict[str, Any]


@router.get("/notifications", response_model=NotificationList)
@shows(Kind.STATE, parts=(Kind.PLACES,))
def list_notifications(
    service: ServiceDep,
    principal: PrincipalDep,
    job: Annotated[str | None, Query(min_length=1, max_length=64, description="About this job")] = None,
    state: Annotated[list[Literal["due", "sent", "dead"]], Query(description="In one of these")] = [],  # noqa: B006
    limit: Annotated[int, Query(ge=1, le=500)] = 50,
) -> Any:
    """Return the notifications of the caller's jobs and their receivers, newest first; of a URL no more than its host.

    An admin gets those of all users.
    """
    owner = None if principal.may_see(Kind.PLACES) else principal.user
    with service.clients.client() as client:
        found = client.notifications(job_id=job, states=state, limit=limit, owner=owner)
    return JSONResponse({"notifications": [one.to_dict() for one in found]})


@router.post("/jobs/{job_id}/notifications/retry", response_model=Revived)
@shows(Kind.STATE)
def retry_notifications(service: ServiceDep, job_id: JobId) -> Any:
    """Send what was given up about a job after all."""
    with service.clients.client(writes=True) as client:
        return JSONResponse({"due": client.retry_notifications(job_id)})


@router.get("/diff", response_model=Comparison)
@shows(Kind.CODE, Kind.PLACES, of=("a", "b"))
@asks_clusters
def diff_jobs(service: ServiceDep, principal: PrincipalDep, a: Id, b: Id) -> Any:
    """Return what differs between two jobs of the caller: specification, environment, code, outcome, metrics.

    An admin may compare those of other users, too.
    """
    with service.clients.client() as client:
        return JSONResponse(client.diff(a, b))


@router.get("/costs", response_model=Costs)
@shows(Kind.SERVICE)
def add_up_costs(
    service: ServiceDep,
    by: Annotated[str, Query(max_length=255, description="job, user, project, cluster, day or tag:KEY")] = "job",
    job: Annotated[list[Id], Query(max_length=500, description="Only these jobs")] = [],  # noqa: B006
    owner: Text = None,
    since: Time = None,
    until: Time = None,
) -> Any:
    """Return hours of nodes and GPUs, and what they cost by the service's prices."""
    with service.clients.client() as client:
        return JSONResponse(client.costs(by=by, job_ids=job or None, owner=owner, since=since, until=until))
