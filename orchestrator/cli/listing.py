"""`orc list`."""

from __future__ import annotations

import click

from orc.orchestrator.cli.options import json_option
from orc.orchestrator.cli.output import echo

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
@json_option
def command(states: tuple[str, ...], name: str | None, tags: tuple[str, ...], limit: int, as_json: bool) -> None:
    """List jobs, newest first, as the ledger has them (`orc status` looks afresh)."""
    import time

    from orc.orchestrator.cli import jobtext, output
    from orc.orchestrator.cli.session import open_client

    wanted = dict(tag_pair(tag) for tag in tags)
    rows = open_client().jobs(states=states or None, name=name, tags=wanted or None, limit=limit)
    if as_json:
        output.echo_json({"jobs": [job.to_dict() for job in rows]})
        return
    if not rows:
        echo("no jobs", err=True)
        return
    now = time.time()
    cells = [
        (
            job.id,
            output.state(job.state),
            job.cluster,
            output.clock(job.created_at),
            output.duration((job.ended_at or now) - job.created_at),
            jobtext.first_line(job.reason),
        )
        for job in rows
    ]
    echo(output.table(("JOB", "STATE", "CLUSTER", "CREATED", "TIME", "REASON"), cells))
