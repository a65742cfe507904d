"""Routes that look deeper into a job: what it measures, and the plan of an attempt."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Query
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict

from orc.orchestrator.client import Client, JobNotFound
from orc.orchestrator.service.api.jobs import JobId
from orc.orchestrator.service.context import ServiceDep

router = APIRouter(tags=["jobs"])


class Measurements(BaseModel):
    """Lines of metrics, or curves, and the hosts whose metrics could not be read."""

    lines: list[dict[str, Any]]
    series: dict[str, list[tuple[float, float]]]
    unreachable: dict[str, str]


class PlanModel(BaseModel):
    """Plan of an attempt; secrets by name only."""

    model_config = ConfigDict(extra="allow")

    marker: str
    cluster: str
    env: dict[str, str]
    files: list[dict[str, Any]]
    commands: list[dict[str, Any]]
    secrets: list[str]


def _checked(client: Client, job_id: str) -> None:
    if client.workspace.ledger.job(job_id) is None:
        raise JobNotFound(f"no such job: {job_id}", hint="GET /api/v1/jobs lists the jobs")


@router.get("/jobs/{job_id}/metrics", response_model=Measurements)
def read_metrics(
    service: ServiceDep,
    job_id: JobId,
    points: Annotated[int | None, Query(ge=2, le=10000, description="Curves of so many points; all lines else")] = None,
) -> Any:
    """Return what a job has measured: its lines, or with `points` a curve ``[[step, value]]`` of each measurement.

    A curve leaves out what came after the checkpoint from which a later attempt went on.
    """
    from orc.orchestrator.insight.metrics import Reader, course, curves

    with service.clients.client() as client:
        _checked(client, job_id)
        reader = Reader(client.workspace, job_id)
        lines = reader.read()
    unreachable = {host: error.what for host, error in reader.unreachable.items()}
    if points is None:
        return JSONResponse({"lines": lines, "series": {}, "unreachable": unreachable})
    found = {name: _thinned(curve, points) for name, curve in curves(course(lines)).items()}
    return JSONResponse({"lines": [], "series": found, "unreachable": unreachable})


def _thinned(curve: list[tuple[float, float]], points: int) -> list[tuple[float, float]]:
    """Return every n-th point, and the last one."""
    stride = max(1, -(-len(curve) // points))
    return [point for index, point in enumerate(curve) if index % stride == 0 or index == len(curve) - 1]


@router.get("/jobs/{job_id}/plan", response_model=PlanModel)
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
