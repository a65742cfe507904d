"""Routes that look deeper into a job: what it measures, and the plan of an attempt."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, Any

from fastapi import APIRouter, Query
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict

from orc.launchers.errors import LaunchError
from orc.orchestrator.client import Client, JobNotFound
from orc.orchestrator.insight.curves import Points
from orc.orchestrator.insight.metrics import Line, Position, new_lines
from orc.orchestrator.service.api.jobs import JobId
from orc.orchestrator.service.auth import PrincipalDep
from orc.orchestrator.service.context import ServiceDep
from orc.orchestrator.service.errors import ApiError
from orc.orchestrator.service.rights import Kind, shows
from orc.orchestrator.service.slow_reads import asks_clusters

router = APIRouter(tags=["jobs"])
_MOST_LINES = 10_000  # of one answer
_MOST_BYTES = 4 << 20


class Measurements(BaseModel):
    """Lines of metrics, or curves, and the hosts whose metrics could not be read.

    Where it is not `complete`, there is more than one request reads: the next one goes on, for lines from `next`.
    """

    lines: list[dict[str, Any]]
    series: dict[str, list[tuple[float, float]]]
    unreachable: dict[str, str]
    complete: bool
    next: str


class PlanModel(BaseModel):
    """Plan of an attempt; secrets by name only."""

    model_config = ConfigDict(extra="allow")

    format: int
    marker: str
    cluster: str
    backend: str
    trees: dict[str, str]
    env: dict[str, str]
    files: list[dict[str, Any]]
    commands: list[dict[str, Any]]
    secrets: list[str]


def _checked(client: Client, job_id: str) -> None:
    if client.workspace.ledger.job(job_id) is None:
        raise JobNotFound(f"no such job: {job_id}", hint="GET /api/v1/jobs lists the jobs")


@router.get("/jobs/{job_id}/metrics", response_model=Measurements)
@shows(Kind.METRICS)
@asks_clusters
def read_metrics(
    service: ServiceDep,
    principal: PrincipalDep,
    job_id: JobId,
    points: Annotated[int | None, Query(ge=2, le=10000, description="Curves of so many points; lines else")] = None,
    after: Annotated[str, Query(max_length=500, description="`next` of the answer before: lines from there")] = "",
) -> Any:
    """Return what a job has measured: lines of it, or with `points` a curve ``[[step, value]]`` of each measurement.

    A curve leaves out what came after the checkpoint from which a later attempt went on.
    """
    with service.clients.client() as client:
        _checked(client, job_id)
        ws = client.workspace
        lines: list[Line] = []
        unreachable: Mapping[str, LaunchError]
        found: dict[str, Points] = {}
        if points is None:
            position = _position(after)
            lines = _some(new_lines(ws, job_id, position, client.measured.seconds), position)
            unreachable, complete = position.unreachable, position.complete
        else:
            measured = client.measured.of(job_id)
            found = measured.update(ws, job_id, lambda curves: curves.points(points), client.measured.seconds)
            unreachable, complete, position = measured.unreachable, measured.complete, Position()
    hosts = {host: error.what for host, error in unreachable.items()}
    answer = {"lines": lines, "series": found, "unreachable": hosts, "complete": complete, "next": position.to_text()}
    return JSONResponse(answer)


def _position(text: str) -> Position:
    try:
        return Position.from_text(text)
    except ValueError as error:
        raise ApiError(422, str(error), where="query.after") from None


def _some(lines: Iterable[Line], position: Position) -> list[Line]:
    """Return as many lines as go into one answer."""
    begin = sum(position.offsets)
    found = []
    for line in lines:
        found.append(line)
        if len(found) == _MOST_LINES or sum(position.offsets) - begin > _MOST_BYTES:
            break
    return found


@router.get("/jobs/{job_id}/plan", response_model=PlanModel)
@shows(Kind.PLAN)
def read_plan(service: ServiceDep, job_id: JobId) -> Any:
    """Return the plan of the newest attempt as `orc render` shows one: files, commands, names of secrets."""
    from orc.launchers.backends.base import Placement
    from orc.launchers.ids import AttemptId
    from orc.orchestrator.engine.attempt_inputs import stored_snapshot
    from orc.orchestrator.engine.placement import PlacementPlanner
    from orc.orchestrator.engine.stored_spec import stored_spec

    with service.clients.client() as client:
        _checked(client, job_id)
        job = client.job(job_id)
        ws = client.workspace
        attempt = AttemptId(job_id, max(len(job.attempts), 1))
        planner = PlacementPlanner(
            ws, stored_spec(ws, job_id), stored_snapshot(ws, job.digests), attempt, owner=job.owner
        )
        hosts = job.attempt.hosts if job.attempt and planner.places else ()
        return JSONResponse(planner.render(Placement(hosts) if hosts else None).to_dict())
