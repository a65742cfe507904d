"""Calls for schedules: jobs that are submitted by the clock."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from orc.orchestrator.api.call import Bounds, Digests, Key, NewMember, Secrets, Text, call
from orc.orchestrator.api.rights import Kind
from orc.orchestrator.api.session import LedgerSession
from orc.orchestrator.views import ScheduleView, View

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
