"""Commands that show and end jobs: `orc list`, `orc status`, `orc wait`, `orc cancel`, `orc tag`."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import click

from orc.launchers.errors import LaunchError
from orc.orchestrator.cli.invocation import (
    LIVE_STATES,
    SECONDS,
    ask_clusters,
    filter_options,
    job_argument,
    job_ids,
    limit_option,
    open_client,
    optional_jobs_argument,
    output_options,
    refresh_option,
)
from orc.orchestrator.cli.ui import jobtext, output
from orc.orchestrator.cli.ui.display import agree, display, ring, waiting
from orc.orchestrator.cli.ui.output import ExitCode, echo, of_states, rendered

if TYPE_CHECKING:
    from orc.orchestrator.clients.surface import JobsClient
    from orc.orchestrator.views import JobRow, JobView


STALE_S = 60.0  # a state that is older is asked for again, the detached reconciler having failed to
WITHIN_S = 2.0
WATCH_INTERVAL_S = 2.0


def show(jobs: Sequence[JobRow | JobView], form: str | None, text: Callable[[], str], **more: Any) -> None:
    """Print *jobs* as *form*: JSON or YAML with *more* in it, their ids (name), or the *text*."""
    if form in ("json", "yaml"):
        output.document({"jobs": [job.to_dict() for job in jobs], **more}, form)
    elif jobs:
        echo("\n".join(job.id for job in jobs) if form == "name" else text())


@click.command("list")
@filter_options()
@limit_option
@click.option("-w", "--watch", "watching", is_flag=True, help="Show it again whenever it changes, until Ctrl-C.")
@click.option("--refresh/--no-refresh", default=True, help="Ask the clusters about old states, for at most 2 s.")
@output_options("json", "yaml", "wide", "name")
def list_command(wanted: Mapping[str, Any], limit: int, watching: bool, refresh: bool, form: str | None) -> None:
    """List jobs of the ledger, newest first, with the age of each live state (`orc status` asks the clusters)."""
    if watching and form in ("json", "yaml", "name"):
        raise click.UsageError(f"--watch shows a table, and -o {form} is none", click.get_current_context())
    client = open_client()

    def read_rows() -> list[JobRow]:
        rows = client.jobs(**wanted, limit=limit)
        old = time.time() - STALE_S
        if stale := [row.id for row in rows if refresh and row.age_from is not None and row.age_from < old]:
            with waiting(f"asking the clusters about {len(stale)} jobs, for {WITHIN_S:.0f} s at most"):
                client.refresh_within(stale, WITHIN_S)
            rows = client.jobs(**wanted, limit=limit)
        return rows

    if watching:
        watch(read_rows, form == "wide")
    rows = read_rows()
    show(rows, form, lambda: job_table(rows, form == "wide"))
    if not rows and form not in ("json", "yaml"):
        echo("no jobs", err=True)
        from orc.orchestrator.client import Client
        from orc.orchestrator.engine.job_copies import unknown

        if isinstance(client, Client) and not client.jobs(limit=1) and (lost := unknown(client.workspace)):
            echo(f"jobs here that the ledger does not know: {len(lost)}; `orc adopt` restores them", err=True)


def job_table(rows: Sequence[JobRow], wide: bool = False) -> str:
    """Return the rows as a table; a *wide* one has more columns, and none is cut to the terminal."""
    now = time.time()
    header = ["JOB", "STATE", "CLUSTER", "CREATED", "TIME", "SEEN"]
    if wide:
        header += ["NAME", "BACKEND", "ATTEMPTS", "HOSTS", "TAGS"]
    cells = []
    for job in rows:
        row = [
            job.id,
            output.state(job.state),
            job.cluster,
            output.clock(job.created_at),
            output.duration((job.ended_at or now) - job.created_at),
            "-" if job.age_from is None else f"{output.duration(now - job.age_from)} ago",
        ]
        if wide:
            tags = ",".join(f"{key}={value}" for key, value in sorted(job.tags.items()))
            row += [job.name, job.backend, str(job.attempts), ",".join(job.hosts) or "-", tags or "-"]
        cells.append([*row, jobtext.first_line(job.reason)])
    return output.table([*header, "REASON"], cells, fit=not wide)


def fitting(rows: Sequence[JobRow], wide: bool, height: int) -> str:
    """Return the table of the newest jobs, which *height* lines have room for, and how many more there are.

    The others are not laid out at all: with 10,000 jobs that would take longer than the time between two looks.
    """
    room = max(height - 2, 1)  # beside the header, and the line below
    more = f"\n... and {len(rows) - room:,} more: `orc list --state RUNNING`, --name, --tag" if len(rows) > room else ""
    return job_table(rows[:room], wide) + more


def watch(read_rows: Callable[[], list[JobRow]], wide: bool) -> NoReturn:
    """Show the table whenever it changes: in its place on a terminal, as lines of what has changed elsewhere."""
    rows = read_rows()
    if sys.stdout.isatty():
        from rich.live import Live
        from rich.text import Text

        with Live(auto_refresh=False, vertical_overflow="crop") as screen:
            while True:
                text = fitting(rows, wide, screen.console.size.height)
                screen.update(Text.from_ansi(rendered(text), no_wrap=True), refresh=True)
                time.sleep(WATCH_INTERVAL_S)
                rows = read_rows()
    shown: dict[str, tuple[str, str]] = {}
    while True:
        if changed := [row for row in rows if shown.get(row.id) != (row.state, row.reason)]:
            lines = job_table(changed, wide)
            echo(lines if not shown else lines.partition("\n")[2])
            sys.stdout.flush()
        shown |= {row.id: (row.state, row.reason) for row in rows}
        time.sleep(WATCH_INTERVAL_S)
        rows = read_rows()


@click.command("status")
@optional_jobs_argument
@refresh_option
@output_options("json", "yaml", "wide", "name")
def status_command(jobs: tuple[str, ...], refresh: bool, form: str | None) -> None:
    """Show attempts, hosts, ranks and the first failure of JOBs. [default: all live jobs]"""
    client = open_client()
    ids = job_ids(client, jobs) or [row.id for row in client.jobs(states=LIVE_STATES, limit=1000)]
    # The clusters have nothing to add about jobs that have ended, and a pass takes longer to load than to show them.
    if refresh and (live := [job_id for job_id in ids if client.job(job_id).state in LIVE_STATES]):
        ask_clusters(client, live)
    views = [client.job(job_id) for job_id in ids]
    show(views, form, lambda: "\n\n".join(jobtext.details(view, checkpoint_dir(client, view)) for view in views))
    if not views and form not in ("json", "yaml"):
        echo("no job is under way; `orc list` shows the ended ones", err=True)


def checkpoint_dir(client: JobsClient, view: JobView) -> str | None:
    """Return the place of the job's checkpoints; `None` when its cluster is not configured any more."""
    from orc.orchestrator.client import Client

    if not isinstance(client, Client):
        return None  # the service's clusters are not known here
    try:
        return client.workspace.backend_of_user(view.cluster, view.owner).checkpoint_dir(view.spec, view.id)
    except LaunchError:
        return None


@click.command("wait")
@optional_jobs_argument
@click.option("--timeout", type=SECONDS, metavar="SECONDS", help="Give up after this time: exit status 6.")
@click.option("--bell", is_flag=True, help="Ring when the jobs have ended, in the terminal and on the desktop.")
@output_options("json", "yaml", "name")
def wait_command(jobs: tuple[str, ...], timeout: float | None, bell: bool, form: str | None) -> int:
    """Wait until JOBs have ended. [default: the newest]

    Exit status: 0 all succeeded, 1 a job failed, 3 a job was cancelled, 6 timed out.
    """
    client = open_client()
    ids = job_ids(client, jobs or ("@last",))
    with display(silent=form is not None) as shown:

        def on_change(view: JobView) -> None:
            if len(ids) > 1 or not view.ended:  # how the only one ended is printed below
                shown.show(jobtext.headline(view))

        views = client.wait(ids, timeout_s=timeout, on_change=on_change)
    headlines = [jobtext.headline(view) for view in views]
    if bell:
        ring("orc", headlines)
    timed_out = not all(view.ended for view in views)
    show(views, form, lambda: "\n".join(headlines), timed_out=timed_out)
    return int(ExitCode.TIMED_OUT if timed_out else of_states(view.state for view in views))


@click.command("cancel")
@optional_jobs_argument
@filter_options(LIVE_STATES)
@click.option("--grace", type=SECONDS, metavar="SECONDS", help="Time from SIGTERM to SIGKILL.")
@click.option("-y", "--yes", is_flag=True, help="Stop the jobs that filters choose without asking.")
@output_options("json", "yaml", "name")
def cancel_command(
    jobs: tuple[str, ...], wanted: Mapping[str, Any], grace: float | None, yes: bool, form: str | None
) -> None:
    """Stop JOBs: SIGTERM to every rank, SIGKILL after the grace. Jobs that have ended stay as they are.

    Name the jobs, or choose among the live ones with --state, --name, --tag and --group.
    """
    context = click.get_current_context()
    filtered = any(value is not None for value in wanted.values())
    if jobs and filtered:
        raise click.UsageError("give JOBs, or choose them with --state, --name, --tag and --group", context)
    if not jobs and not filtered:
        raise click.UsageError("name the JOBs; `orc list` shows them, and @last is the newest", context)
    client = open_client()
    if filtered:
        rows = client.jobs(**{**wanted, "states": wanted["states"] or LIVE_STATES}, limit=None)
        ids = [row.id for row in rows]
        if not ids:
            echo("no live job matches", err=True)
        elif not yes:
            echo("\n".join(jobtext.headline(client.job(job_id)) for job_id in ids), err=True)
            agree(f"cancel {len(ids)} job{'s' if len(ids) > 1 else ''}")
    else:
        ids = job_ids(client, jobs)
    unreached: dict[str, str] = {}
    with waiting(f"telling the clusters to stop {len(ids)} job{'s' if len(ids) != 1 else ''}"):
        views = client.cancel(ids, grace_s=grace, on_unreachable=unreached.update) if ids else []
    output.warn_unreachable(unreached, "the wish is kept; `orc status` and `orc wait` pass it on once it answers")

    def line(view: JobView) -> str:
        asked = "asked to stop" if view.cluster not in unreached else "to be stopped, not told yet"
        return jobtext.headline(view) + ("" if view.ended else f"  {asked}; `orc wait` waits for the end")

    show(views, form, lambda: "\n".join(map(line, views)))


@click.command("tag")
@job_argument
@click.argument("changes", metavar="[KEY=VALUE | KEY-]...", nargs=-1)
@output_options("json", "yaml")
def tag_command(job: str, changes: tuple[str, ...], form: str | None) -> None:
    """Set tags of JOB, remove them with KEY-, and print its tags."""
    wanted: dict[str, str | None] = {}
    for text in changes:
        key, equals, value = text.partition("=")
        if not equals and (not text.endswith("-") or len(text) < 2):
            raise click.UsageError(f"expected KEY=VALUE or KEY-, not {text!r}", click.get_current_context())
        wanted[key if equals else text[:-1]] = value if equals else None
    client = open_client()
    job_id = client.resolve(job)
    view = client.set_tags(job_id, wanted) if wanted else client.job(job_id)
    if not output.document({"id": view.id, "tags": dict(view.tags)}, form):
        for key, value in sorted(view.tags.items()):
            echo(f"{key}={value}")
