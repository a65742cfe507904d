"""`orc list`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from orc.orchestrator.cli.options import json_option
from orc.orchestrator.cli.ui.output import echo

if TYPE_CHECKING:
    from orc.orchestrator.views import JobRow

STALE_S = 60.0  # a state that is older is asked for again, the detached reconciler having failed to
WITHIN_S = 2.0
STATES = ("QUEUED", "PREPARED", "SUBMITTING", "PENDING", "RUNNING", "SUCCEEDED", "FAILED", "CANCELLED")


def tag_pair(text: str) -> tuple[str, str]:
    """``key=value`` as a pair. Raises `click.UsageError`."""
    key, equals, value = text.partition("=")
    if not key or not equals:
        raise click.UsageError(f"--tag takes key=value, not {text!r}", click.get_current_context())
    return key, value


@click.command("list")
@click.option(
    "--state", "states", multiple=True, type=click.Choice(STATES, case_sensitive=False), help="May be repeated."
)
@click.option("--name", help="Jobs of this name.")
@click.option("--tag", "tags", multiple=True, metavar="KEY=VALUE", help="Jobs with this tag. May be repeated.")
@click.option("--limit", type=click.IntRange(1), default=50, show_default=True, help="How many at most.")
@click.option("--refresh/--no-refresh", default=True, help="Ask, for 2 s at most, about states that are old.")
@json_option
def command(
    states: tuple[str, ...], name: str | None, tags: tuple[str, ...], limit: int, refresh: bool, as_json: bool
) -> None:
    """List jobs, newest first, as the ledger has them, with the age of what is not final (`orc status` asks)."""
    import time

    from orc.orchestrator.cli.session import open_client
    from orc.orchestrator.cli.ui import jobtext, output

    wanted = dict(tag_pair(tag) for tag in tags)
    client = open_client()

    def read_rows() -> list[JobRow]:
        return client.jobs(states=states or None, name=name, tags=wanted or None, limit=limit)

    rows = read_rows()
    stale = [row.id for row in rows if row.age_from is not None and time.time() - row.age_from > STALE_S]
    if stale and refresh:
        client.refresh_within(stale, WITHIN_S)
        rows = read_rows()
    if as_json:
        output.echo_json({"jobs": [job.to_dict() for job in rows]})
        return
    if not rows:
        echo("no jobs", err=True)
        from orc.orchestrator.engine.job_files import unknown

        if lost := unknown(client.workspace):
            echo(f"jobs that have a directory here and are not in the ledger: {len(lost)}; `orc adopt`", err=True)
        return
    now = time.time()
    cells = [
        (
            job.id,
            output.state(job.state),
            job.cluster,
            output.clock(job.created_at),
            output.duration((job.ended_at or now) - job.created_at),
            "-" if job.age_from is None else f"{output.duration(now - job.age_from)} ago",
            jobtext.first_line(job.reason),
        )
        for job in rows
    ]
    echo(output.table(("JOB", "STATE", "CLUSTER", "CREATED", "TIME", "SEEN", "REASON"), cells))
