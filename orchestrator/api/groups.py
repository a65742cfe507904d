"""Calls for groups of jobs (sweeps, arrays, pipelines, the runs of schedules), and for schedules."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any

from orc.orchestrator.api.call import Bounds, Digests, Key, Kind, Name, NewMember, Secrets, Text, call
from orc.orchestrator.api.jobs import Grace
from orc.orchestrator.api.session import LedgerSession
from orc.orchestrator.views import GroupView, ScheduleView, View

SUBMITTED = ("sweep", "array", "pipeline")
GroupId = Annotated[str, Bounds("Id of the group", min_length=1, max_length=64)]
Kinds = Annotated[Sequence[Annotated[str, Bounds(choices=(*SUBMITTED, "schedule"))]], Bounds("Of one of these kinds")]
_MOST = 10_000  # members


@dataclass(frozen=True)
class Groups(View):
    """Groups, newest first."""

    groups: list[GroupView]


@call("GET", "/groups", shows=Kind.STATE)
def list_groups(session: LedgerSession, kind: Kinds = (), limit: Annotated[int, Bounds(ge=1, le=100)] = 20) -> Groups:
    """Return the newest groups."""
    from orc.orchestrator.clients import groups

    return Groups(groups.newest(session.workspace, kind or SUBMITTED, limit))


@call("GET", "/groups/{group_id}", shows=(Kind.STATE, Kind.METRICS), asks_clusters=True)
def get_group(
    session: LedgerSession,
    group_id: GroupId,
    kind: Kinds = (),
    metrics: Annotated[bool, Bounds("With the newest of what each member measures")] = False,
) -> GroupView:
    """Return a group and the newest job of each member. The start of an id, a job of the group and `@last` will do."""
    from orc.orchestrator.clients import groups

    ws = session.workspace
    found = groups.view(ws, groups.resolve(ws, group_id, kind))
    return groups.with_metrics(ws, found, session.measured) if metrics else found


@call("POST", "/groups", shows=Kind.OWN, asks_clusters=True)
def submit_group(
    session: LedgerSession,
    kind: Annotated[str, Bounds(choices=SUBMITTED)],
    name: Name,
    members: Annotated[Sequence[NewMember], Bounds(min_length=1, max_length=_MOST)],
    max_parallel: Annotated[int | None, Bounds(ge=1, lt=1 << 31)] = None,
    source: Text = "",
    shared: Mapping[str, Any] = {},
    secrets: Secrets = {},  # noqa: B006
    idempotency_key: Key = "",
) -> GroupView:
    """Submit jobs that belong together, all or none; a second request with the same `Idempotency-Key` answers with the
    same group.

    Specifications are as those of new jobs, with the keys that all have alike in `shared`. Where a tree has not been
    uploaded it is 409, and ``missing`` names it.
    """
    from orc.orchestrator.api.submitting import Submitter

    whole = [replace(member, spec={**shared, **member.spec}) for member in members]
    view = Submitter(session, idempotency_key).submit_group(kind, name, max_parallel, whole, source, secrets)
    session.caller.note(view.id, kind=view.kind, jobs=len(members))
    return view


@call("POST", "/groups/{group_id}/cancel", shows=Kind.STATE, writes=False, asks_clusters=True)
def cancel_group(session: LedgerSession, group_id: GroupId, grace_s: Grace = None) -> GroupView:
    """Cancel the members of a group that have not ended."""
    from orc.orchestrator.clients import groups

    return groups.cancel(session, group_id, grace_s=grace_s)


@call("POST", "/groups/{group_id}/retry", shows=Kind.STATE, asks_clusters=True)
def retry_group(
    session: LedgerSession,
    group_id: GroupId,
    secrets: Secrets = {},  # noqa: B006
    idempotency_key: Key = "",
) -> GroupView:
    """Submit the members that have ended without success once more, from the same snapshots."""
    from orc.orchestrator.api.submitting import Submitter

    return Submitter(session, idempotency_key).retry_group(group_id, secrets)


ScheduleId = Annotated[str, Bounds("Id of the schedule", min_length=1, max_length=64)]


@dataclass(frozen=True)
class Schedules(View):
    """All schedules, by name."""

    schedules: list[ScheduleView]


@dataclass(frozen=True)
class Done(View):
    """Something was done."""

    ok: bool = True


@call("GET", "/schedules", shows=Kind.STATE, parts=(Kind.PLACES,))
def list_schedules(session: LedgerSession) -> Schedules:
    """Return all schedules, by name."""
    from orc.orchestrator.engine import schedules

    found = [ScheduleView.of(record) for record in schedules.all_schedules(session.workspace)]
    return Schedules([session.caller.shown(view, view.owner) for view in found])


@call("POST", "/schedules", shows=Kind.OWN, asks_clusters=True)
def create_schedule(
    session: LedgerSession,
    spec: Mapping[str, Any],
    digests: Digests,
    name: Annotated[str, Bounds(min_length=1, max_length=255)],
    cron: Annotated[str, Bounds("Five fields, like `0 3 * * mon-fri`", min_length=1, max_length=255)],
    timezone: Annotated[str, Bounds("An IANA name", min_length=1, max_length=64)] = "UTC",
    missed: Annotated[str, Bounds(choices=("skip", "run_once"))] = "skip",
    overlap: Annotated[str, Bounds(choices=("allow", "skip"))] = "skip",
    source: Text = "",
    secrets: Secrets = {},  # noqa: B006
    idempotency_key: Key = "",
) -> ScheduleView:
    """Submit a job whenever it is due; a second request with the same `Idempotency-Key` answers with the same schedule.

    Where a tree has not been uploaded it is 409, and ``missing`` names it.
    """
    from orc.orchestrator.api.submitting import Submitter

    when = {"name": name, "cron": cron, "timezone": timezone, "missed": missed, "overlap": overlap}
    view = Submitter(session, idempotency_key).create_schedule(NewMember(0, digests, spec), source, secrets, when)
    session.caller.note(view.id, name=view.name, cron=view.cron)
    return view


@call("PATCH", "/schedules/{schedule_id}", shows=Kind.STATE, parts=(Kind.PLACES,))
def change_schedule(session: LedgerSession, schedule_id: ScheduleId, enabled: bool) -> ScheduleView:
    """Pause a schedule, or resume it: what was due meanwhile is not made up for."""
    from orc.orchestrator.engine import schedules

    return ScheduleView.of(schedules.change(session.workspace, schedule_id, enabled=enabled))


@call("DELETE", "/schedules/{schedule_id}", shows=Kind.OWN)
def delete_schedule(session: LedgerSession, schedule_id: ScheduleId) -> Done:
    """Delete a schedule; its jobs stay, and running jobs go on."""
    from orc.orchestrator.engine import schedules

    schedules.remove(session.workspace, schedule_id)
    return Done()
