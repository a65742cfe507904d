"""`orc adopt`: write jobs into the ledger again that it has forgotten."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from orc.orchestrator.cli.options import json_option
from orc.orchestrator.cli.session import open_ledger
from orc.orchestrator.cli.ui import output
from orc.orchestrator.cli.ui.display import waiting
from orc.orchestrator.cli.ui.output import echo

if TYPE_CHECKING:
    from orc.orchestrator.engine.adoption import AdoptionResult


@click.command("adopt")
@click.option("--dry-run", is_flag=True, help="List the jobs that the ledger does not know; ask and change nothing.")
@json_option
def command(dry_run: bool, as_json: bool) -> int:
    """Find jobs that have a directory in the state directory and that the ledger does not know.

    Their clusters are asked what became of them, and they are written into the ledger: after it was deleted, or
    replaced by an old backup. Exit status 1 when a cluster could not be asked.
    """
    from orc.orchestrator.engine import adoption
    from orc.orchestrator.engine.submission import unknown

    client = open_ledger()
    ws = client.workspace
    kept = unknown(ws)
    if dry_run:
        found = [adoption.AdoptionResult(one.job.id, one.job.cluster, 0) for one in kept]
    else:
        with waiting(f"asking the clusters about {len(kept)} jobs"):
            found = [adoption.adopt(ws, one) for one in kept]
            client.refresh([one.job for one in found if one.attempts])
        client.session.leave_reconciler()
    if as_json:
        output.echo_json({"dry_run": dry_run, "jobs": [asdict(one) for one in found]})
    elif not found:
        echo("the ledger knows every job that has a directory here")
    else:
        rows = [(one.job, one.cluster, _result(one, dry_run)) for one in found]
        echo(output.table(("JOB", "CLUSTER", "RESULT"), rows))
    return int(any(one.error for one in found))


def _result(found: AdoptionResult, dry_run: bool) -> str:
    if dry_run:
        return "not in the ledger"
    if found.error:
        return f"left: {found.error}"
    if not found.attempts:
        return "left: its cluster has nothing of it"
    return f"adopted, attempts: {found.attempts}"
