"""Schedules: a job is submitted whenever its cron expression is due, once, by whichever reconciler comes first.

The change of the schedule and the new job are one transaction, and the change names the revision that was read: of two
reconcilers that see the same due schedule, one writes both, and the other neither.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from orc.launchers.errors import LaunchError, SpecError
from orc.launchers.ids import AttemptId, new_job_id
from orc.launchers.secrets import resolve_secrets
from orc.orchestrator.engine import cron as times
from orc.orchestrator.engine import job_secrets
from orc.orchestrator.engine.placement import render_anywhere
from orc.orchestrator.engine.submission import CheckedJob, record, row_of
from orc.orchestrator.ledger import groups, schedules
from orc.orchestrator.ledger.database import Conflict
from orc.orchestrator.ledger.records import QueueEntry

if TYPE_CHECKING:
    from orc.launchers.spec import JobSpec
    from orc.orchestrator.engine.submission import Submission
    from orc.orchestrator.ledger.records import NewJob
    from orc.orchestrator.ledger.schedules import ScheduleRecord
    from orc.orchestrator.ledger.transaction import Transaction
    from orc.orchestrator.workspace import Workspace


class _HasNames(Protocol):
    @property
    def id(self) -> str: ...

    @property
    def name(self) -> str: ...


Named = TypeVar("Named", bound=_HasNames)

LATE_S = 300.0  # later than so much, a time counts as missed


def create(
    ws: Workspace,
    each: Submission,
    *,
    name: str,
    cron: str,
    timezone: str,
    missed: str = "skip",
    overlap: str = "skip",
) -> ScheduleRecord:
    """Store a schedule with the id of *each*, which is submitted each time; the values of its secrets are kept for it.

    Raises `SpecError` for what is no schedule, and what rendering the job raises.
    """
    spec = each.spec
    check(spec, cron, timezone)
    backend = ws.backend(spec.cluster)
    secrets = resolve_secrets(spec.secrets, {**os.environ, **each.secrets})
    render_anywhere(ws, spec, each.snapshot, AttemptId(new_job_id(spec.name), 1), each.owner)
    described = {
        "job": ws.subscriptions()(spec).model_dump(mode="json"), "backend": backend.kind, "origin": ws.origin,
        "missed": missed, "overlap": overlap,
    }  # fmt: skip
    if each.request:
        described["request"] = each.request
    if each.encrypted and secrets:
        described["sealed"] = job_secrets.encrypt(ws.state_dir, each.id, secrets)
    now = ws.clock()
    made = schedules.ScheduleRecord(
        each.id, name, each.owner, cron, timezone, True, times.due_after(cron, timezone, now), None, None,
        described, each.snapshot.digests, each.source,
    )  # fmt: skip
    with job_secrets.until_recorded(ws, each.id):
        if not each.encrypted:
            job_secrets.keep(ws.state_dir, each.id, secrets)
        with ws.ledger.transaction() as tx:
            if schedules.named(tx.connection, each.owner, name) is not None:
                raise SpecError(f"there is a schedule {name!r} already", hint="delete it first, or give another --name")
            groups.create(tx.connection, groups.GroupRecord(each.id, "schedule", name, each.owner, now))
            schedules.create(tx.connection, made)
    ws.on_live_job()
    return made


def check(spec: JobSpec, cron: str, timezone: str) -> None:
    """Raise `SpecError` for a time that never comes, and for a job that cannot be scheduled."""
    times.check(cron, timezone)
    if spec.sweep is not None or spec.array is not None:
        raise SpecError("a schedule submits one job at a time, no sweep or array", where=spec.name)
    if spec.depends_on or spec.inputs:
        raise SpecError("a scheduled job waits for the clock, not for other jobs", where=spec.name)


def next_due(ws: Workspace) -> float | None:
    """Return when the next schedule is due; `None` where there is none."""
    with ws.ledger.database.read() as connection:
        due = [found.next_at for found in schedules.all_schedules(connection) if found.enabled]
    return min((at for at in due if at is not None), default=None)


def fire_due(ws: Workspace) -> list[str]:
    """Submit the jobs of all schedules that are due; return their ids. Passes send them. Raises `LedgerError`."""
    with ws.ledger.database.read() as connection:
        due = schedules.due(connection, ws.clock())
    return [job for schedule in due if (job := _fire(ws, schedule)) is not None]


def _fire(ws: Workspace, schedule: ScheduleRecord) -> str | None:
    now = ws.clock()
    assert schedule.next_at is not None
    newest = times.newest_due(schedule.cron, schedule.timezone, schedule.next_at, now)
    following = times.due_after(schedule.cron, schedule.timezone, now)
    runs = now - newest <= LATE_S or schedule.spec["missed"] == "run_once"
    if runs and schedule.spec["overlap"] == "skip" and schedule.last_job is not None:
        last = ws.ledger.job(schedule.last_job)
        runs = last is None or last.state.terminal
    new = _job(schedule, now) if runs else None
    changes: dict[str, Any] = {"next_at": following}
    if new is not None:
        changes |= {"last_at": newest, "last_job": new.id}

    def change(tx: Transaction) -> None:
        schedules.update(tx.connection, schedule, **changes)

    try:
        if new is None:
            with ws.ledger.transaction() as tx:
                change(tx)
            return None
        record(ws, [_with_secrets(ws, schedule, new)], within=change)
    except Conflict:  # another reconciler has done it
        return None
    return new.id


def _job(schedule: ScheduleRecord, now: float) -> NewJob:
    spec: Mapping[str, Any] = schedule.spec["job"]
    return row_of(
        spec, now, id=new_job_id(spec["name"]), backend=schedule.spec["backend"], source=f"schedule:{schedule.id}",
        digests=schedule.digests, origin=schedule.spec["origin"], owner=schedule.owner, group_id=schedule.id,
    )  # fmt: skip


def _with_secrets(ws: Workspace, schedule: ScheduleRecord, new: NewJob) -> CheckedJob:
    """Return *new* with the secrets of the schedule, where this machine has them; elsewhere the job waits for them.

    Those of a service's schedule stay encrypted.
    """
    if ciphertext := schedule.spec.get("sealed"):
        # A text that does not open here is no reason to look elsewhere: the job says that it does not.
        with suppress(job_secrets.DecryptionError):
            values = job_secrets.decrypt(ws.state_dir, schedule.id, ciphertext)
            ciphertext = job_secrets.encrypt(ws.state_dir, new.id, values)
        return CheckedJob(QueueEntry(new, ciphertext=ciphertext))
    secrets: Mapping[str, str] = {}
    with suppress(SpecError):
        secrets = job_secrets.load(ws.state_dir, schedule.id, schedule.spec["job"]["secrets"])
    return CheckedJob(QueueEntry(new), secrets)


def change(ws: Workspace, schedule_id: str, *, enabled: bool) -> ScheduleRecord:
    """Pause a schedule, or resume it: what was due meanwhile is not made up for. Raises `SpecError`."""
    while True:
        try:
            with ws.ledger.transaction() as tx:
                found = schedules.find(tx.connection, schedule_id)
                if found is None:
                    raise SpecError(f"no such schedule: {schedule_id}")
                following = times.due_after(found.cron, found.timezone, tx.now)
                changed = schedules.update(tx.connection, found, enabled=enabled, next_at=following)
        except Conflict:
            continue
        if enabled:
            ws.on_live_job()
        return changed


def remove(ws: Workspace, schedule_id: str) -> None:
    """Delete a schedule; its jobs stay, those that run go on."""
    with ws.ledger.transaction() as tx:
        schedules.remove(tx.connection, schedule_id)
    job_secrets.remove(ws.state_dir, schedule_id)


def all_schedules(ws: Workspace) -> list[ScheduleRecord]:
    """Return all schedules, by name."""
    with ws.ledger.database.read() as connection:
        return schedules.all_schedules(connection)


def resolve(ws: Workspace, ref: str) -> ScheduleRecord:
    """Return the schedule of this id or name, or the start of its id. Raises `LaunchError`."""
    return chosen(all_schedules(ws), ref)


def chosen(every: Sequence[Named], ref: str) -> Named:
    """Return the one among *every* schedule that has this id or name, or the start of its id. Raises `LaunchError`."""
    from orc.launchers.spec.problems import nearest

    found = [one for one in every if ref in (one.id, one.name)] or [one for one in every if one.id.startswith(ref)]
    if len(found) == 1:
        return found[0]
    if found:
        raise LaunchError(f"{ref!r} is not unique", hint=f"it may be {', '.join(one.id for one in found[:5])}")
    raise LaunchError(
        f"no such schedule: {ref}{nearest(ref, [one.name for one in every])}", hint="`orc schedule list` shows them"
    )


def is_kept(ws: Workspace, name: str) -> bool:
    """Return True where *name* is the id of a schedule, whose secrets are kept."""
    with ws.ledger.database.read() as connection:
        return schedules.find(connection, name) is not None
