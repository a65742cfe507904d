"""Routes that read clusters."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any

from fastapi import APIRouter, Path
from fastapi.responses import JSONResponse

from orc.launchers.ids import AttemptId
from orc.orchestrator.ledger.polls import by_cluster
from orc.orchestrator.service.auth import PrincipalDep
from orc.orchestrator.service.context import ServiceDep
from orc.orchestrator.service.models import ClusterList, QueueModel
from orc.orchestrator.service.rights import Kind, shows
from orc.orchestrator.service.slow_reads import asks_clusters

router = APIRouter(tags=["clusters"])


@router.get("/clusters", response_model=ClusterList)
@shows(Kind.SERVICE, parts=(Kind.ACCOUNTS,))
def list_clusters(service: ServiceDep, principal: PrincipalDep) -> Any:
    """Return the clusters with the times of their last polls and answers. Contacts none.

    What went wrong with the accounts of others is told to admins.
    """
    from orc.launchers.spec.clusters import read_clusters

    only = None if principal.may_see(Kind.ACCOUNTS) else principal.user
    with service.clients.client() as client:
        queueing, _ = client.queueing_clusters()
        found, _ = read_clusters(client.clusters_file if client.clusters_file.exists() else None)
        with client.workspace.ledger.database.read() as connection:
            polls = {poll.cluster: poll for poll in by_cluster(connection, only)}
    names = ("polled_at", "answered_at", "interval_s", "error")
    clusters = [
        {"name": name, "kind": cluster.kind, "has_queue": name in queueing}
        | {key: getattr(polls.get(name), key, None) for key in names}
        for name, cluster in found.items()
    ]
    return JSONResponse({"clusters": clusters})


@router.get("/clusters/{name}/queue", response_model=QueueModel)
@shows(Kind.SERVICE)
@asks_clusters
def read_queue(service: ServiceDep, principal: PrincipalDep, name: Annotated[str, Path(max_length=255)]) -> Any:
    """Return the queue of a cluster, and our jobs in it.

    Where users have accounts of their own there: with that of who asks, about its jobs.
    """
    with service.clients.client() as client:
        report = client.queue(name, principal.user)
    return JSONResponse(
        {
            "partitions": [dataclasses.asdict(one) for one in report.partitions],
            "jobs": [{"job": AttemptId.from_marker(one.marker).job, **dataclasses.asdict(one)} for one in report.jobs],
        }
    )
