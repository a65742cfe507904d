"""`orc logout`."""

from __future__ import annotations

import click

from orc.launchers.errors import LaunchError
from orc.orchestrator.cli.options import json_option
from orc.orchestrator.cli.ui.output import echo_result


@click.command("logout")
@click.argument("url", metavar="[URL]", required=False)
@json_option
def command(url: str | None, as_json: bool) -> None:
    """Forget the token for the service at URL (default: the one in use). Commands then use the ledger of this machine.

    The token stays valid: `orc token revoke` ends it for everybody who has it.
    """
    from orc.orchestrator.clients import logins

    current, stored = logins.read()
    address = logins.checked_url(url) if url else current
    if not address or not logins.forget(address):
        known = ", ".join(stored)
        raise LaunchError(
            f"not logged in to {address}" if address else "not logged in to a service",
            hint=f"logged in to {known}" if known else "`orc login URL` logs in",
        )
    echo_result(as_json, {"url": address}, f"forgot the token for {address}")
