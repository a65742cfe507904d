"""`orc whoami`."""

from __future__ import annotations

import click

from orc.orchestrator.cli.options import json_option
from orc.orchestrator.cli.session import open_service
from orc.orchestrator.cli.ui.output import echo_result


@click.command("whoami")
@json_option
def command(as_json: bool) -> None:
    """Show whether commands go to a service or to the ledger of this machine, and the user."""
    import getpass

    from orc.orchestrator.clients import logins

    login = logins.configured()
    if login is None:
        told = {"service": None, "user": getpass.getuser(), "role": None}
        text = f"{told['user']}, with the ledger of this machine"
    else:
        with open_service(login) as client:
            me = client.me()
        told = {"service": login.url, "user": me["user"], "role": me["role"]}
        text = f"{me['user']} ({me['role']}) at {login.url}"
    echo_result(as_json, told, text)
