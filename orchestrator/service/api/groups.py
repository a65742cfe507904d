"""Routes for groups of jobs: sweeps, arrays, pipelines, and the runs of schedules."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Path, Query, Request
from fastapi.responses import JSONResponse
from pydantic import Field

from orc.orchestrator.service.api.submit import (
    Body,
    Digests,
    Grace,
    Key,
    Secrets,
    Text,
    refusal_of_missing,
    values_of,
)
from orc.orchestrator.service.audit import note_subject
from orc.orchestrator.service.auth import PrincipalDep
from orc.orchestrator.service.context import ServiceDep
from orc.orchestrator.service.models import GroupList, GroupModel
from orc.orchestrator.service.rights import Kind, shows
from orc.orchestrator.service.slow_reads import asks_clusters
from orc.orchestrator.service.submitting_groups import GroupSubmitter, WantedMember

router = APIRouter(tags=["groups"])
GroupId = Annotated[str, Path(min_length=1, max_length=64, description="Id of the group")]
Kinds = Annotated[list[Literal["sweep", "array", "pipeline", "schedule"]], Query(description="Of one of these kinds")]
_MOST = 10_000  # members


class NewMember(Body):
    """Member of a new group: what it has beside the keys that are `shared`."""

    index: int = Field(ge=0, lt=1 << 31)
    spec: dict[str, Any] = Field({})
    digests: Digests
    stage: str = Field("", max_length=64, pattern=r"^([A-Za-z0-9][A-Za-z0-9_-]*)?$")
    parameters: dict[Text, Text] = Field({}, max_length=100)


class NewGroup(Body):
    """Group of jobs to submit: specifications as of `NewJob`, with the keys that all have alike in `shared`."""

    kind: Literal["sweep", "array", "pipeline"]
    name: str = Field(max_length=255)
    max_parallel: int | None = Field(None, ge=1, lt=1 << 31)
    source: Text = ""
    shared: dict[str, Any] = Field({})
    members: list[NewMember] = Field(min_length=1, max_length=_MOST)
    secrets: Secrets = Field({})


class GroupAgain(Body):
    """Values of the secrets of jobs that are submitted once more."""

    secrets: Secrets = Field({})


@router.get("/groups", response_model=GroupList)
@shows(Kind.STATE)
def list_groups(
    service: ServiceDep,
    kind: Kinds = [],  # noqa: B006
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
) -> Any:
    """Return the newest groups."""
    with service.clients.client() as client:
        found = client.groups(kinds=kind, limit=limit) if kind else client.groups(limit=limit)
    return JSONResponse({"groups": [group.to_dict() for group in found]})


@router.get("/groups/{group_id}", response_model=GroupModel)
@shows(Kind.STATE, Kind.METRICS)
@asks_clusters
def get_group(
    service: ServiceDep,
    principal: PrincipalDep,
    group_id: GroupId,
    kind: Kinds = [],  # noqa: B006
    metrics: Annotated[bool, Query(description="With the newest of what each member measures")] = False,
) -> Any:
    """Return a group and the newest job of each member. The start of an id, a job of the group and `@last` will do."""
    with service.clients.client() as client:
        return JSONResponse(client.group(group_id, kinds=kind, metrics=metrics).to_dict())


@router.post("/groups", response_model=GroupModel)
@shows(Kind.OWN)
def submit_group(
    request: Request, service: ServiceDep, principal: PrincipalDep, new: NewGroup, idempotency_key: Key = None
) -> Any:
    """Submit jobs that belong together, all or none; a second request with the same `Idempotency-Key` answers with the
    same group.

    Where a tree has not been uploaded it is 409, and ``missing`` names it.
    """
    members = [
        WantedMember(one.index, {**new.shared, **one.spec}, one.digests.given(), one.stage, one.parameters)
        for one in new.members
    ]
    with service.clients.client(writes=True) as client:
        if (missing := refusal_of_missing(client, principal, [member.digests for member in members])) is not None:
            return missing
        submitter = GroupSubmitter(client, principal.user, idempotency_key, principal.may_change)
        view = submitter.submit_group(new.kind, new.name, new.max_parallel, members, new.source, values_of(new.secrets))
    note_subject(request, view.id, kind=view.kind, jobs=len(members))
    return JSONResponse(view.to_dict())


@router.post("/groups/{group_id}/cancel", response_model=GroupModel)
@shows(Kind.STATE)
def cancel_group(service: ServiceDep, group_id: GroupId, how: Grace) -> Any:
    """Cancel the members of a group that have not ended."""
    with service.clients.client() as client:
        return JSONResponse(client.cancel_group(group_id, grace_s=how.grace_s).to_dict())


@router.post("/groups/{group_id}/retry", response_model=GroupModel)
@shows(Kind.STATE)
def retry_group(
    service: ServiceDep, principal: PrincipalDep, group_id: GroupId, again: GroupAgain, idempotency_key: Key = None
) -> Any:
    """Submit the members that have ended without success once more, from the same snapshots."""
    with service.clients.client(writes=True) as client:
        submitter = GroupSubmitter(client, principal.user, idempotency_key, principal.may_change)
        return JSONResponse(submitter.retry_group(group_id, values_of(again.secrets)).to_dict())
