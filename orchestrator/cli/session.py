"""The client of one command."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from orc.orchestrator.client import Client


def open_client(*, reconciler: bool = True) -> Client:
    """Return a client that is closed when the command ends. Raises `LaunchError`.

    Where jobs are live, a reconciler is left behind that goes on with them, unless *reconciler* is false.
    """
    from orc.orchestrator.client import Client

    client = Client(reconciler=reconciler)
    click.get_current_context().call_on_close(client.close)
    if why := client.workspace.ledger.volatile:
        from orc.orchestrator.cli.ui.output import echo
        from orc.orchestrator.cli.ui.reporting import block

        where = client.workspace.ledger.database.url.removeprefix("sqlite:///")
        do = "free some space: jobs go on, what becomes of them is recorded later, retries wait"
        fields = {"what": f"the ledger can only be read: {why}", "where": where, "do": do}
        echo(block(fields, "warning"), err=True)
    client.leave_reconciler()
    return client
