"""`orc list`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import click

from orc.orchestrator.cli.options import filter_options, limit_option, output_options, tag_pairs
from orc.orchestrator.cli.session import open_client
from orc.orchestrator.cli.ui import jobtext, output
from orc.orchestrator.cli.ui.display import waiting
from orc.orchestrator.cli.ui.output import echo, rendered

if TYPE_CHECKING:
    from orc.orchestrator.clients.surface import JobsClient
    from orc.orchestrator.views import JobRow

STALE_S = 60.0  # a state that is older is asked for again, the detached reconciler having failed to
WITHIN_S = 2.0
INTERVAL_S = 2.0


@click.command("list")
@filter_options()
@limit_option
@click.option("-w", "--watch", "watching", is_flag=True, help="Show it again whenever it changes, until Ctrl-C.")
@click.option("--refresh/--no-refresh", default=True, help="Ask the clusters about old states, for at most 2 s.")
@output_options("json", "yaml", "wide", "name")
def command(
    states: tuple[str, ...],
    name: str | None,
    tags: tuple[str, ...],
    group: str | None,
    limit: int,
    watching: bool,
    refresh: bool,
    form: str | None,
) -> None:
    """List jobs of the ledger, newest first, with the age of each live state (`orc status` asks the clusters)."""
    if watching and form in ("json", "yaml", "name"):
        raise click.UsageError(f"--watch shows a table, and -o {form} is none", click.get_current_context())
    wanted = tag_pairs(tags)
    client = open_client()

    def read_rows() -> list[JobRow]:
        return client.jobs(states=states or None, name=name, tags=wanted, group=group, limit=limit)

    rows = fresh(client, read_rows) if refresh else read_rows()
    if watching:
        watch(lambda: fresh(client, read_rows) if refresh else read_rows(), rows, form == "wide")
    else:
        show(client, rows, form)


def fresh(client: JobsClient, read_rows: Callable[[], list[JobRow]]) -> list[JobRow]:
    """Return the rows, after a poll of the clusters of those with old states."""
    import time

    rows = read_rows()
    stale = [row.id for row in rows if row.age_from is not None and time.time() - row.age_from > STALE_S]
    if stale:
        with waiting(f"asking the clusters about {len(stale)} jobs, for {WITHIN_S:.0f} s at most"):
            client.refresh_within(stale, WITHIN_S)
        rows = read_rows()
    return rows


def show(client: JobsClient, rows: Sequence[JobRow], form: str | None) -> None:
    """Print the rows as *form*: json, yaml, name, wide or a table."""
    if output.document({"jobs": [job.to_dict() for job in rows]}, form):
        return
    if not rows:
        echo("no jobs", err=True)
        from orc.orchestrator.client import Client
        from orc.orchestrator.engine.submission import unknown

        if isinstance(client, Client) and (lost := unknown(client.workspace)):
            echo(f"jobs here that the ledger does not know: {len(lost)}; `orc adopt` restores them", err=True)
    elif form == "name":
        echo("\n".join(job.id for job in rows))
    else:
        echo(table(rows, form == "wide"))


def table(rows: Sequence[JobRow], wide: bool = False) -> str:
    """Return the rows as a table; a *wide* one has more columns, and none is cut to the terminal."""
    import time

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
    if len(rows) <= room:
        return table(rows, wide)
    return f"{table(rows[:room], wide)}\n... and {len(rows) - room:,} more: `orc list --state RUNNING`, --name, --tag"


def watch(read_rows: Callable[[], list[JobRow]], rows: list[JobRow], wide: bool) -> None:
    """Show the table whenever it changes: in its place on a terminal, as lines of what has changed elsewhere."""
    import sys
    import time

    if sys.stdout.isatty():
        from rich.live import Live
        from rich.text import Text

        with Live(auto_refresh=False, vertical_overflow="crop") as screen:
            while True:
                text = fitting(rows, wide, screen.console.size.height)
                screen.update(Text.from_ansi(rendered(text), no_wrap=True), refresh=True)
                time.sleep(INTERVAL_S)
                rows = read_rows()
    shown: dict[str, tuple[str, str]] = {}
    while True:
        if changed := [row for row in rows if shown.get(row.id) != (row.state, row.reason)]:
            lines = table(changed, wide)
            echo(lines if not shown else lines.partition("\n")[2])
            sys.stdout.flush()
        shown |= {row.id: (row.state, row.reason) for row in rows}
        time.sleep(INTERVAL_S)
        rows = read_rows()
