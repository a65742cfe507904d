"""`orc schedule`: jobs by the clock."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from orc.orchestrator.cli.options import cluster_option, job_file_argument, json_option, set_option
from orc.orchestrator.cli.ui.output import echo

if TYPE_CHECKING:
    from orc.orchestrator.ledger.schedules import ScheduleRecord

schedule_argument = click.argument("schedule", metavar="SCHEDULE")


@click.group("schedule")
def command() -> None:
    """Submit a job again and again, by the clock."""


@command.command("create")
@click.argument("cron", metavar="CRON")
@job_file_argument
@cluster_option
@set_option
@click.option("--name", help="What people call it; the job's name unless given.")
@click.option("--timezone", "zone", default="UTC", show_default=True, metavar="ZONE", help="An IANA name.")
@click.option(
    "--missed", type=click.Choice(["skip", "run_once"]), default="skip", show_default=True,
    help="What becomes of times at which nothing of orc ran: nothing, or one job for all of them.",
)  # fmt: skip
@click.option(
    "--overlap", type=click.Choice(["allow", "skip"]), default="skip", show_default=True,
    help="What becomes of a time at which the last job has not ended.",
)  # fmt: skip
@click.option("-y", "--yes", is_flag=True, help="Do not ask whether a large snapshot is meant.")
@json_option
def create(
    cron: str,
    job_file: str,
    cluster: str | None,
    overrides: tuple[str, ...],
    name: str | None,
    zone: str,
    missed: str,
    overlap: str,
    yes: bool,
    as_json: bool,
) -> None:
    """Submit the job in JOB.yaml (./job.yaml unless given) whenever CRON is due: five fields, like '0 3 * * mon-fri'.

    Its snapshot is taken now: what is changed later needs another schedule.
    """
    import sys

    from orc.launchers.errors import SpecError
    from orc.orchestrator.cli.session import check_job, open_ledger
    from orc.orchestrator.cli.ui.submitting import submission_progress
    from orc.orchestrator.engine import cron as times
    from orc.orchestrator.engine import schedules, snapshots

    times.check(cron, zone)
    loaded = check_job(job_file, overrides, cluster, needs_clusters=True)
    if loaded.spec.sweep is not None or loaded.spec.array is not None:
        raise SpecError("a schedule submits one job at a time, no sweep or array", where=job_file)
    client = open_ledger()
    ws = client.workspace
    with submission_progress(silent=as_json or not sys.stderr.isatty(), yes=yes) as on_progress:
        snapshot = snapshots.take(ws.store, loaded, on_progress, ws.backend(loaded.spec.cluster))
        record = schedules.create(
            ws,
            loaded.spec,
            snapshot,
            name=name or loaded.spec.name,
            expression=cron,
            zone=zone,
            missed=missed,
            overlap=overlap,
            source=str(loaded.source_path.absolute()),
        )
    _report(record, as_json=as_json)


@command.command("list")
@json_option
def list_(as_json: bool) -> None:
    """List the schedules: when each is due next, and its last job."""
    from orc.orchestrator.cli.session import open_ledger
    from orc.orchestrator.cli.ui.output import echo_json, table
    from orc.orchestrator.ledger import schedules

    with open_ledger().workspace.ledger.database.read() as connection:
        found = schedules.all_schedules(connection)
    if as_json:
        echo_json({"schedules": [_document(record) for record in found]})
        return
    rows = [
        (r.id, r.name, r.cron, r.timezone, _next(r), r.spec["missed"], r.spec["overlap"], r.last_job or "-")
        for r in found
    ]
    echo(table(("ID", "NAME", "CRON", "TIME ZONE", "NEXT", "MISSED", "OVERLAP", "LAST JOB"), rows))


@command.command("pause")
@schedule_argument
@json_option
def pause(schedule: str, as_json: bool) -> None:
    """Submit nothing until the schedule is resumed; jobs that run go on."""
    _change(schedule, enabled=False, as_json=as_json)


@command.command("resume")
@schedule_argument
@json_option
def resume(schedule: str, as_json: bool) -> None:
    """Go on with a schedule that was paused; what was due meanwhile is not made up for."""
    _change(schedule, enabled=True, as_json=as_json)


@command.command("delete")
@schedule_argument
@json_option
def delete(schedule: str, as_json: bool) -> None:
    """Forget a schedule; its jobs stay, and those that run go on."""
    from orc.orchestrator.cli.session import open_ledger
    from orc.orchestrator.cli.ui.output import echo_json
    from orc.orchestrator.engine import schedules

    ws = open_ledger().workspace
    record = schedules.resolve(ws, schedule)
    schedules.remove(ws, record.id)
    if as_json:
        echo_json({"deleted": record.id})
    else:
        echo(f"deleted {record.id}")


def _change(schedule: str, *, enabled: bool, as_json: bool) -> None:
    from orc.orchestrator.cli.session import open_ledger
    from orc.orchestrator.engine import schedules

    ws = open_ledger().workspace
    _report(schedules.change(ws, schedules.resolve(ws, schedule).id, enabled=enabled), as_json=as_json)


def _report(record: ScheduleRecord, *, as_json: bool) -> None:
    from orc.orchestrator.cli.ui.output import echo_json

    if as_json:
        echo_json(_document(record))
    else:
        echo(record.id)
        echo(f"next: {_next(record)}", err=True)


def _next(record: ScheduleRecord) -> str:
    from orc.orchestrator.engine.cron import shown

    if not record.enabled:
        return "paused"
    return shown(record.next_at, record.timezone) if record.next_at is not None else "-"


def _document(record: ScheduleRecord) -> dict[str, Any]:
    return {
        "id": record.id,
        "name": record.name,
        "owner": record.owner,
        "cron": record.cron,
        "timezone": record.timezone,
        "enabled": record.enabled,
        "next_at": record.next_at if record.enabled else None,
        "last_at": record.last_at,
        "last_job": record.last_job,
        "missed": record.spec["missed"],
        "overlap": record.spec["overlap"],
        "source": record.source,
    }
