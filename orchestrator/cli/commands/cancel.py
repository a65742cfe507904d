"""`orc cancel`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from orc.orchestrator.cli.options import (
    LIVE_STATES,
    SECONDS,
    filter_options,
    job_ids,
    optional_jobs_argument,
    output_options,
    tag_pairs,
)
from orc.orchestrator.cli.session import open_client
from orc.orchestrator.cli.ui import jobtext, output, questions, reporting
from orc.orchestrator.cli.ui.display import waiting
from orc.orchestrator.cli.ui.output import echo

if TYPE_CHECKING:
    from orc.orchestrator.clients.surface import JobsClient


@click.command("cancel")
@optional_jobs_argument
@filter_options(LIVE_STATES)
@click.option("--grace", type=SECONDS, metavar="SECONDS", help="Time from SIGTERM to SIGKILL.")
@click.option("-y", "--yes", is_flag=True, help="Stop the jobs that filters choose without asking.")
@output_options("json", "yaml", "name")
def command(
    jobs: tuple[str, ...],
    states: tuple[str, ...],
    name: str | None,
    tags: tuple[str, ...],
    group: str | None,
    grace: float | None,
    yes: bool,
    form: str | None,
) -> None:
    """Stop JOBs: SIGTERM to every rank, SIGKILL after the grace. Jobs that have ended stay as they are.

    Name the jobs, or choose among the live ones with --state, --name, --tag and --group.
    """
    context = click.get_current_context()
    filtered = bool(states or name is not None or tags or group is not None)
    if jobs and filtered:
        raise click.UsageError("give JOBs, or choose them with --state, --name, --tag and --group", context)
    if not jobs and not filtered:
        raise click.UsageError("name the JOBs; `orc list` shows them, and @last is the newest", context)
    wanted = tag_pairs(tags)
    client = open_client()
    if filtered:
        rows = client.jobs(states=states or LIVE_STATES, name=name, tags=wanted, group=group, limit=None)
        ids = [row.id for row in rows]
        if ids and not yes:
            _agree(client, ids)
        elif not ids:
            echo("no live job matches", err=True)
    else:
        ids = job_ids(client, jobs)
    unreached: dict[str, str] = {}
    with waiting(f"telling the clusters to stop {len(ids)} job{'s' if len(ids) != 1 else ''}"):
        views = client.cancel(ids, grace_s=grace, on_unreachable=unreached.update) if ids else []
    reporting.warn_unreachable(unreached, "the wish is kept; `orc status` and `orc wait` pass it on once it answers")
    if output.document({"jobs": [view.to_dict() for view in views]}, form):
        return
    for view in views:
        asked = "asked to stop" if view.cluster not in unreached else "to be stopped, not told yet"
        headline = f"{jobtext.headline(view)}" + ("" if view.ended else f"  {asked}; `orc wait` waits for the end")
        echo(view.id if form == "name" else headline)


def _agree(client: JobsClient, ids: list[str]) -> None:
    """Print the jobs that are about to be cancelled, and ask.

    Raises `click.UsageError` where orc cannot ask, and `click.exceptions.Exit` for a no.
    """
    echo("\n".join(jobtext.headline(client.job(job_id)) for job_id in ids), err=True)
    questions.agree(f"cancel {len(ids)} job{'s' if len(ids) > 1 else ''}")
