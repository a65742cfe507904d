"""Values of the REST interface read back into the views that the ledger's client returns.

A newer service may send keys that this version does not know: they are left out. What an older one does not send has
its default.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Any, TypeVar

from orc.launchers.attempts.logs import LogSelector
from orc.orchestrator.clients.group_views import GroupView, MemberView, ScheduleView
from orc.orchestrator.views import AttemptView, EventView, JobRow, JobView

if TYPE_CHECKING:
    from orc.launchers.backends.base import QueueReport

_View = TypeVar("_View")


def job_view(data: Mapping[str, Any]) -> JobView:
    """Return the view of which `JobView.to_dict` gave *data*."""
    attempts = tuple(attempt_view(attempt) for attempt in data.get("attempts", ()))
    return _view(JobView, {**data, "attempts": attempts})


def attempt_view(data: Mapping[str, Any]) -> AttemptView:
    """Return the view of which `AttemptView.to_dict` gave *data*."""
    end = None
    if data.get("exit") is not None:
        from orc.launchers.attempts.records import AttemptExit

        end = AttemptExit.from_dict(data["exit"])
    tuples = {name: tuple(data.get(name, ())) for name in ("hosts", "failed_hosts")}
    return _view(AttemptView, {**data, **tuples, "exit": end})


def job_row(data: Mapping[str, Any]) -> JobRow:
    """Return the row of which `JobRow.to_dict` gave *data*."""
    known = {name: data[name] for name in JobRow._fields if name in data}
    return JobRow(**{**known, "hosts": tuple(data.get("hosts", ()))})


def event_view(data: Mapping[str, Any]) -> EventView:
    """Return the event of which `EventView.to_dict` gave *data*."""
    return _view(EventView, data)


def group_view(data: Mapping[str, Any]) -> GroupView:
    """Return the group of which `GroupView.to_dict` gave *data*."""
    members = tuple(
        MemberView(
            one["index"], one.get("stage") or "", one.get("parameters") or {}, job_row(one["job"]),
            one.get("submissions", 1), one.get("metrics") or {},
        )
        for one in data["members"]
    )  # fmt: skip
    return _view(GroupView, {**data, "members": members})


def schedule_view(data: Mapping[str, Any]) -> ScheduleView:
    """Return the schedule of which `ScheduleView.to_dict` gave *data*."""
    return _view(ScheduleView, data)


def queue_report(data: Mapping[str, Any]) -> QueueReport:
    """Return the queue of a cluster from ``{"partitions": [...], "jobs": [...]}``."""
    from orc.launchers.backends.base import PartitionReport, QueuedJob, QueueReport

    partitions = [
        _view(
            PartitionReport,
            {**one, "gres": tuple(one.get("gres", ())), "gres_nodes": tuple(one.get("gres_nodes", ()))},
        )
        for one in data["partitions"]
    ]
    return QueueReport(tuple(partitions), tuple(_view(QueuedJob, one) for one in data["jobs"]))


def selector(data: Mapping[str, Any]) -> LogSelector:
    """Return the selector of which `selector_dict` gave *data*."""
    return LogSelector(rank=data.get("rank"), node=data.get("node"), launcher=bool(data.get("launcher")))


def selector_dict(one: LogSelector) -> dict[str, Any]:
    """Return the one thing that a selector names, as parameters of a request."""
    if one.launcher:
        return {"launcher": True}
    return {"rank": one.rank} if one.rank is not None else {"node": one.node}


def _view(cls: type[_View], data: Mapping[str, Any]) -> _View:
    names = {one.name for one in fields(cls)}  # type: ignore[arg-type]
    return cls(**{name: value for name, value in data.items() if name in names})
