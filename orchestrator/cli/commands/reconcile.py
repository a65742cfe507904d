"""Hidden commands that run passes: `orc reconcile`, the detached one of `orc submit`, and `orc tick`.

A local agent starts the latter when an attempt ends, so that retries need no daemon.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import click

from orc.orchestrator.cli.options import json_option
from orc.orchestrator.cli.session import open_ledger
from orc.orchestrator.cli.ui import output
from orc.orchestrator.cli.ui.output import echo, echo_json_line

if TYPE_CHECKING:
    from orc.orchestrator.ledger.store import Ledger


@click.command("reconcile", hidden=True)
@json_option
def reconcile(as_json: bool) -> None:
    """Run passes until every job has ended; ends at once where another process does that."""
    from orc.orchestrator.api.session import LedgerSession
    from orc.orchestrator.engine import detached
    from orc.orchestrator.notifications.delivery import Deliverer, drain

    def report_line(text: str) -> None:
        if as_json:
            echo_json_line({"at": time.time(), "what": text})
        else:
            echo(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}")

    def open_ledger() -> Ledger:
        return LedgerSession(reconciler=False).workspace.ledger

    with Deliverer(open_ledger, report_line=report_line):
        detached.run(lambda: LedgerSession(reconciler=False), report_line)
    with LedgerSession(reconciler=False) as session:
        # The last job's end is told, too.
        drain(session.workspace.ledger, lambda: not session.workspace.state_dir.is_dir())


@click.command("tick", hidden=True)
@click.option("--job", "job", required=True, metavar="ID", help="The job to look at.")
@json_option
def tick(job: str, as_json: bool) -> None:
    """Run one reconciler pass over a job, waiting first for the backoff of a retry that is due."""
    client = open_ledger(reconciler=False)
    view = client.tick(client.resolve(job))
    if as_json:
        output.echo_json(view.to_dict())
