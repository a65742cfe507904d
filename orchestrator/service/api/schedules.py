"""Routes for schedules: jobs that are submitted by the clock."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Path, Request
from fastapi.responses import JSONResponse
from pydantic import Field

from orc.orchestrator.service.api.submit import Body, Key, NewJob, refusal_of_missing, values_of
from orc.orchestrator.service.audit import note_subject
from orc.orchestrator.service.auth import PrincipalDep
from orc.orchestrator.service.context import ServiceDep
from orc.orchestrator.service.models import Done, ScheduleList, ScheduleModel
from orc.orchestrator.service.rights import Kind, shows, without_places
from orc.orchestrator.service.submitting_groups import GroupSubmitter

router = APIRouter(tags=["schedules"])
ScheduleId = Annotated[str, Path(min_length=1, max_length=64, description="Id of the schedule")]


class NewSchedule(NewJob):
    """Job to submit again and again, and when."""

    name: str = Field(min_length=1, max_length=255)
    cron: str = Field(min_length=1, max_length=255, description="Five fields, like `0 3 * * mon-fri`")
    timezone: str = Field("UTC", min_length=1, max_length=64, description="An IANA name")
    missed: Literal["skip", "run_once"] = "skip"
    overlap: Literal["allow", "skip"] = "skip"


class Enabled(Body):
    """False: nothing is submitted until it is true again."""

    enabled: bool


@router.get("/schedules", response_model=ScheduleList)
@shows(Kind.STATE, parts=(Kind.PLACES,))
def list_schedules(service: ServiceDep, principal: PrincipalDep) -> Any:
    """Return all schedules, by name."""
    with service.clients.client() as client:
        found = client.schedules()
    whole = [principal.may_see(Kind.PLACES, view.owner) for view in found]
    shown = [view.to_dict() if own else without_places(view.to_dict()) for view, own in zip(found, whole, strict=True)]
    return JSONResponse({"schedules": shown})


@router.post("/schedules", response_model=ScheduleModel)
@shows(Kind.OWN)
def create_schedule(
    request: Request, service: ServiceDep, principal: PrincipalDep, new: NewSchedule, idempotency_key: Key = None
) -> Any:
    """Submit a job whenever it is due; a second request with the same `Idempotency-Key` answers with the same schedule.

    Where a tree has not been uploaded it is 409, and ``missing`` names it.
    """
    digests = new.digests.given()
    when = {
        "name": new.name,
        "expression": new.cron,
        "zone": new.timezone,
        "missed": new.missed,
        "overlap": new.overlap,
    }
    with service.clients.client(writes=True) as client:
        if (missing := refusal_of_missing(client, principal, [digests])) is not None:
            return missing
        submitter = GroupSubmitter(client, principal.user, idempotency_key, principal.may_change)
        view = submitter.create_schedule(new.spec, digests, new.source, values_of(new.secrets), when)
    note_subject(request, view.id, name=view.name, cron=view.cron)
    return JSONResponse(view.to_dict())


@router.patch("/schedules/{schedule_id}", response_model=ScheduleModel)
@shows(Kind.STATE, parts=(Kind.PLACES,))
def change_schedule(service: ServiceDep, schedule_id: ScheduleId, wanted: Enabled) -> Any:
    """Pause a schedule, or resume it: what was due meanwhile is not made up for."""
    with service.clients.client(writes=True) as client:
        return JSONResponse(client.enable_schedule(schedule_id, enabled=wanted.enabled).to_dict())


@router.delete("/schedules/{schedule_id}", response_model=Done)
@shows(Kind.OWN)
def delete_schedule(service: ServiceDep, schedule_id: ScheduleId) -> Any:
    """Forget a schedule; its jobs stay, and those that run go on."""
    with service.clients.client(writes=True) as client:
        client.delete_schedule(schedule_id)
    return JSONResponse({"ok": True})
