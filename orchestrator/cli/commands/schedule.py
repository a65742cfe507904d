"""`orc schedule`: jobs by the clock."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from orc.orchestrator.cli.options import cluster_option, job_file_argument, json_option, set_option, yes_option
from orc.orchestrator.cli.session import check_job, open_client
from orc.orchestrator.cli.ui.display import submission_progress
from orc.orchestrator.cli.ui.output import echo, echo_json, echo_result, listing

if TYPE_CHECKING:
    from orc.orchestrator.views import ScheduleView

schedule_argument = click.argument("schedule", metavar="SCHEDULE")


@click.group("schedule")
def command() -> None:
    """Submit a job again and again, by the clock."""


@command.command("create")
@click.argument("cron", metavar="CRON")
@job_file_argument
@cluster_option
@set_option
@click.option("--name", help="Name of the schedule. [default: the job's name]")
@click.option("--timezone", default="UTC", show_default=True, metavar="ZONE", help="An IANA name.")
@click.option(
    "--missed", type=click.Choice(["skip", "run_once"]), default="skip", show_default=True,
    help="After times at which nothing of orc ran: submit nothing, or one job for all of them.",
)  # fmt: skip
@click.option(
    "--overlap", type=click.Choice(["allow", "skip"]), default="skip", show_default=True,
    help="If the last job has not ended at a time: skip the time, or submit another job.",
)  # fmt: skip
@yes_option
@json_option
def create(
    cron: str,
    job_file: str,
    cluster: str | None,
    overrides: tuple[str, ...],
    name: str | None,
    timezone: str,
    missed: str,
    overlap: str,
    yes: bool,
    as_json: bool,
) -> None:
    """Submit the job in JOB.yaml (./job.yaml unless given) whenever CRON is due: five fields, like '0 3 * * mon-fri'.

    The schedule keeps the snapshot of now. Later changes of the code need another schedule.
    """
    from orc.orchestrator.engine.cron import check

    check(cron, timezone)
    loaded = check_job(job_file, overrides, cluster)
    with submission_progress(silent=as_json, yes=yes) as on_progress:
        view = open_client().create_schedule(
            loaded, cron, name=name or "", timezone=timezone, missed=missed, overlap=overlap, on_progress=on_progress
        )
    _report(view, as_json=as_json)


@command.command("list")
@json_option
def list_(as_json: bool) -> None:
    """List the schedules: when each is due next, and its last job."""
    found = open_client().schedules()
    rows = [(v.id, v.name, v.cron, v.timezone, _next(v), v.missed, v.overlap, v.last_job or "-") for v in found]
    header = ("ID", "NAME", "CRON", "TIME ZONE", "NEXT", "MISSED", "OVERLAP", "LAST JOB")
    listing(as_json, {"schedules": [view.to_dict() for view in found]}, header, rows)


@command.command("pause")
@schedule_argument
@json_option
def pause(schedule: str, as_json: bool) -> None:
    """Submit nothing until the schedule is resumed; running jobs go on."""
    _change(schedule, enabled=False, as_json=as_json)


@command.command("resume")
@schedule_argument
@json_option
def resume(schedule: str, as_json: bool) -> None:
    """Go on with a paused schedule; times in the pause stay skipped."""
    _change(schedule, enabled=True, as_json=as_json)


@command.command("delete")
@schedule_argument
@json_option
def delete(schedule: str, as_json: bool) -> None:
    """Delete a schedule; its jobs stay, and running jobs go on."""
    from orc.orchestrator.engine.schedules import chosen

    client = open_client()
    found = chosen(client.schedules(), schedule).id
    client.delete_schedule(found)
    echo_result(as_json, {"deleted": found}, f"deleted {found}")


def _change(schedule: str, *, enabled: bool, as_json: bool) -> None:
    from orc.orchestrator.engine.schedules import chosen

    client = open_client()
    _report(client.enable_schedule(chosen(client.schedules(), schedule).id, enabled=enabled), as_json=as_json)


def _report(view: ScheduleView, *, as_json: bool) -> None:
    if as_json:
        echo_json(view.to_dict())
    else:
        echo(view.id)
        echo(f"next: {_next(view)}", err=True)


def _next(view: ScheduleView) -> str:
    from orc.orchestrator.engine.cron import shown

    if not view.enabled:
        return "paused"
    return shown(view.next_at, view.timezone) if view.next_at is not None else "-"
