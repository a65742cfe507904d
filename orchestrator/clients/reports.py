"""Requests for reports over jobs: notifications, differences, costs. No I/O."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from orc.orchestrator.clients.requests import API, Request, job_path
from orc.orchestrator.notifications.calls import NotificationView


def notifications(job_id: str | None, states: Sequence[str], limit: int) -> Request[list[NotificationView]]:
    """Request the notifications that were sent."""
    params: dict[str, Any] = {"limit": min(limit, 500), "state": list(states)}
    if job_id is not None:
        params["job"] = job_id
    names = NotificationView._fields
    return Request(
        "GET",
        f"{API}/notifications",
        lambda reply: [NotificationView(*(one[name] for name in names)) for one in reply.json["notifications"]],
        params,
    )


def retry_notifications(job_id: str) -> Request[int]:
    """Return the request that sends the notifications of a job that were given up."""
    return Request("POST", job_path(job_id, "/notifications/retry"), lambda reply: int(reply.json["due"]))


def diff(a: str, b: str) -> Request[dict[str, Any]]:
    """Return the request for the differences between two jobs."""
    return Request("GET", f"{API}/diff", lambda reply: dict(reply.json), {"a": a, "b": b})


def costs(
    by: str, job_ids: Sequence[str] | None, owner: str | None, since: float | None, until: float | None
) -> Request[dict[str, Any]]:
    """Return the request for hours and costs."""
    given = {"by": by, "job": job_ids, "owner": owner, "since": since, "until": until}
    params = {name: value for name, value in given.items() if value is not None}
    return Request("GET", f"{API}/costs", lambda reply: dict(reply.json), params)
