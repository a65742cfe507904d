"""`orc login`, `orc logout`, `orc whoami`: the service that commands go to, and its token."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from orc.launchers.errors import LaunchError
from orc.orchestrator.cli.options import json_option
from orc.orchestrator.cli.session import open_service
from orc.orchestrator.cli.ui.output import echo, echo_json, echo_result


@click.command("login")
@click.argument("url", metavar="URL")
@click.option("--token-file", type=click.Path(), help="File of mode 0600 that holds the token.")
@click.option("--ca", type=click.Path(), help="File of the certificates to trust instead of the system's.")
@click.option("--insecure-http", is_flag=True, help="Agree to send the token unencrypted over a network.")
@json_option
def login(url: str, token_file: str | None, ca: str | None, insecure_http: bool, as_json: bool) -> None:
    """Store a token for the service at URL. From then on commands go to it, not to the ledger of this machine.

    orc asks for the token on a terminal, or reads it from standard input: others could see an argument.
    """
    from orc.orchestrator.clients import logins
    from orc.orchestrator.clients.logins import Login

    address = logins.checked_url(url)
    trusted = str(Path(ca).expanduser().absolute()) if ca else ""
    logins.refuse_clear_text(Login(address, insecure_http=insecure_http))
    token = logins.token_file(Path(token_file)) if token_file else _asked(address)
    login = Login(address, token, trusted, insecure_http)
    with open_service(login) as client:
        me = client.me()
    place = logins.store(login)
    if as_json:
        echo_json({"url": address, "user": me["user"], "role": me["role"], "file": str(place)})
        return
    echo(f"logged in to {address} as {me['user']} ({me['role']})")
    echo(f"the token is in {place}; `orc logout` removes it", err=True)


def _asked(address: str) -> str:
    """Return the token that is typed, without showing it, or that comes in on standard input."""
    from orc.orchestrator.clients import logins

    if sys.stdin.isatty():
        return logins.checked_token(str(click.prompt(f"token for {address}", hide_input=True, err=True)).strip())
    return logins.checked_token(sys.stdin.readline(4096).strip(), "standard input")


@click.command("logout")
@click.argument("url", metavar="[URL]", required=False)
@json_option
def logout(url: str | None, as_json: bool) -> None:
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


@click.command("whoami")
@json_option
def whoami(as_json: bool) -> None:
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
