"""Routes that read jobs."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Path, Query
from fastapi.responses import JSONResponse

from orc.orchestrator.ledger.lifecycle import JobState
from orc.orchestrator.ledger.listing import JobFilter
from orc.orchestrator.service.auth import PrincipalDep
from orc.orchestrator.service.context import ServiceDep
from orc.orchestrator.service.errors import ApiError
from orc.orchestrator.service.models import EventList, JobIdModel, JobList, JobModel
from orc.orchestrator.service.rights import Kind, shows, without_places
from orc.orchestrator.views import JobRow

router = APIRouter(tags=["jobs"])
Text = Annotated[str | None, Query(max_length=255)]
JobId = Annotated[str, Path(min_length=1, max_length=64, description="Id of the job")]


def tag_pairs(texts: list[str]) -> dict[str, str]:
    """Return ``key=value`` texts as a mapping. Raises `ApiError`."""
    for text in texts:
        if not text.partition("=")[0] or "=" not in text:
            raise ApiError(422, f"tag takes key=value, not {text!r}", where="query.tag")
    return {key: value for key, _, value in (text.partition("=") for text in texts)}


@router.get("/jobs", response_model=JobList)
@shows(Kind.STATE)
def list_jobs(
    service: ServiceDep,
    state: Annotated[list[JobState], Query(description="In one of these states")] = [],  # noqa: B006
    name: Text = None,
    owner: Text = None,
    cluster: Text = None,
    project: Text = None,
    group: Text = None,
    tag: Annotated[list[str], Query(max_length=20, description="key=value; with all of these tags")] = [],  # noqa: B006
    q: Annotated[str | None, Query(max_length=255, description="Part of id, name, owner, cluster or project")] = None,
    limit: Annotated[int, Query(ge=1, le=500)] = 50,
    cursor: Annotated[str | None, Query(max_length=500, description="`next` of the page before")] = None,
) -> Any:
    """Return jobs, newest first, a page at a time."""
    wanted = JobFilter(state or None, name, owner, cluster, project, group, tag_pairs(tag), q)
    with service.clients.client() as client:
        page = client.workspace.ledger.page(wanted, cursor, limit)
    return JSONResponse({"jobs": [JobRow(*row).to_dict() for row in page.rows], "next": page.next})


@router.get("/resolve", response_model=JobIdModel)
@shows(Kind.STATE)
def resolve_job(
    service: ServiceDep,
    ref: Annotated[str, Query(max_length=64, description="An id, the unambiguous start of one, or `@last`")],
) -> Any:
    """Return the id of the job that a text means."""
    with service.clients.client() as client:
        return JSONResponse({"id": client.resolve(ref)})


@router.get("/jobs/{job_id}", response_model=JobModel)
@shows(Kind.STATE, parts=(Kind.PLACES,))
def get_job(service: ServiceDep, principal: PrincipalDep, job_id: JobId) -> Any:
    """Return a job and its attempts, as the ledger has them.

    The path of its job file and who is told of it are there for its owner and admins alone.
    """
    with service.clients.client() as client:
        view = client.job(job_id)
    found = view.to_dict()
    return JSONResponse(found if principal.may_see(Kind.PLACES, view.owner) else without_places(found))


@router.get("/jobs/{job_id}/events", response_model=EventList)
@shows(Kind.STATE, parts=(Kind.PLACES,))
def list_events(
    service: ServiceDep,
    principal: PrincipalDep,
    job_id: JobId,
    after: Annotated[int, Query(ge=0, description="Id of an event")] = 0,
) -> Any:
    """Return the history of a job, oldest first."""
    with service.clients.client() as client:
        found = [event.to_dict() for event in client.events(job_id) if event.id > after]
        job = client.workspace.ledger.job(job_id)
    whole = principal.may_see(Kind.PLACES, job.owner if job else "")
    return JSONResponse({"events": found if whole else list(map(without_places, found))})
