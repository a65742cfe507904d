"""`orc status`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from orc.launchers.errors import LaunchError
from orc.orchestrator.cli.options import LIVE_STATES, job_ids, optional_jobs_argument, output_options, refresh_option
from orc.orchestrator.cli.session import open_client
from orc.orchestrator.cli.session import refresh as ask_clusters
from orc.orchestrator.cli.ui import jobtext, output
from orc.orchestrator.cli.ui.output import echo

if TYPE_CHECKING:
    from orc.orchestrator.clients.surface import JobsClient
    from orc.orchestrator.views import JobView


def unended(client: JobsClient) -> list[str]:
    """Ids of the jobs that have not ended, newest first."""
    return [row.id for row in client.jobs(states=LIVE_STATES, limit=1000)]


@click.command("status")
@optional_jobs_argument
@refresh_option
@output_options("json", "yaml", "wide", "name")
def command(jobs: tuple[str, ...], refresh: bool, form: str | None) -> None:
    """Show attempts, hosts, ranks and the first failure of JOBs. [default: all live jobs]"""
    client = open_client()
    ids = job_ids(client, jobs) or unended(client)
    # The clusters have nothing to add about jobs that have ended, and a pass takes longer to load than to show them.
    if refresh and (live := [job_id for job_id in ids if client.job(job_id).state in LIVE_STATES]):
        ask_clusters(client, live)
    views = [client.job(job_id) for job_id in ids]
    if output.document({"jobs": [view.to_dict() for view in views]}, form):
        return
    if not views:
        echo("no job is under way; `orc list` shows the ended ones", err=True)
    elif form == "name":
        echo("\n".join(view.id for view in views))
    else:
        echo("\n\n".join(jobtext.details(view, checkpoint_dir(client, view)) for view in views))


def checkpoint_dir(client: JobsClient, view: JobView) -> str | None:
    """Return the place of the job's checkpoints; `None` when its cluster is not configured any more."""
    from orc.orchestrator.client import Client

    if not isinstance(client, Client):
        return None  # the service's clusters are not known here
    try:
        return client.workspace.backend_of_user(view.cluster, view.owner).checkpoint_dir(view.spec, view.id)
    except LaunchError:
        return None
