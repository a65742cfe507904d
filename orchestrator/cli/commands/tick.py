"""`orc tick`, hidden: what a local agent starts when an attempt ends, so that retries need no daemon."""

from __future__ import annotations

import click

from orc.orchestrator.cli.options import json_option
from orc.orchestrator.cli.session import open_ledger
from orc.orchestrator.cli.ui import output


@click.command("tick", hidden=True)
@click.option("--job", "job", required=True, metavar="ID", help="The job to look at.")
@json_option
def command(job: str, as_json: bool) -> None:
    """Run one reconciler pass over a job, waiting first for the backoff of a retry that is due."""
    client = open_ledger(reconciler=False)
    view = client.tick(client.resolve(job))
    if as_json:
        output.echo_json(view.to_dict())
