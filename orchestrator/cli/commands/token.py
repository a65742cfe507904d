"""`orc token`: tokens of the service that is logged in to, else of the ledger that this machine uses."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from orc.orchestrator.cli.options import json_option
from orc.orchestrator.cli.ui.output import echo

if TYPE_CHECKING:
    from collections.abc import Mapping

    from orc.orchestrator.clients.service import ServiceClient
    from orc.orchestrator.ledger.store import Ledger

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}


class _Span(click.ParamType["float | None"]):
    """Time like 90d, 12h or never, in seconds."""

    name = "span"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float | None:
        if value is None or value == "never" or isinstance(value, float):
            return None if value == "never" or value is None else float(value)
        number, unit = str(value)[:-1], str(value)[-1:]
        if not number.isdigit() or unit not in _UNITS or not 0 < int(number) * _UNITS[unit] <= 3660 * 86400:
            self.fail(f"{value!r} is no time: 90d, 12h, 30m, or never.", param, ctx)
        return float(int(number) * _UNITS[unit])


@click.group("token")
def command() -> None:
    """Create, list and revoke tokens of the service.

    They are those of the service that is logged in to (`orc login`), for its admins; else those in the ledger that this
    machine uses, where whoever can open it can make one for anybody.
    """


@command.command("create")
@click.option("--user", required=True, metavar="NAME", help="Whose it is: jobs sent with it belong to NAME.")
@click.option(
    "--role",
    type=click.Choice(["viewer", "user", "admin"]),
    default="user",
    show_default=True,
    help="viewer reads, user changes the own jobs, admin changes all.",
)
@click.option("--expires", type=_Span(), default="90d", show_default=True, metavar="TIME", help="Like 12h, or never.")
@click.option("--note", default="", help="What it is for.")
@json_option
def create_command(user: str, role: str, expires: float | None, note: str, as_json: bool) -> None:
    """Create a token and print it, this once."""
    from orc.orchestrator.cli.ui import output

    if service := _service():
        from orc.orchestrator.clients import tokens as requests

        made = service.ask(requests.create(user, role, expires, note))
    else:
        from orc.orchestrator.service import tokens

        ledger = _ledger()
        token, record = tokens.create(ledger, user, role, ledger.now(), expires_s=expires, note=note)
        _note(ledger, "create_token", record.id, user=user, role=role)
        made = {**vars(record), "token": token}
    if as_json:
        output.echo_json(made)
        return
    echo(made["token"])
    until = "never" if made["expires_at"] is None else output.clock(made["expires_at"])
    echo(f"{made['id']} of {user} ({role}), expires {until}; it is shown this once", err=True)


@command.command("list")
@json_option
def list_command(as_json: bool) -> None:
    """List the tokens, without their secrets."""
    from orc.orchestrator.cli.ui import output

    found: list[Mapping[str, Any]]
    if service := _service():
        from orc.orchestrator.clients import tokens as requests

        found = service.ask(requests.every())
    else:
        from orc.orchestrator.service import tokens

        found = [vars(record) for record in tokens.every(_ledger())]
    if as_json:
        output.echo_json({"tokens": found})
        return
    if not found:
        echo("no tokens", err=True)
        return

    def when(at: float | None) -> str:
        return "-" if at is None else output.clock(at)

    rows = [
        (
            *(str(one[name]) for name in ("id", "user", "role")),
            _state(one),
            *(when(one[name]) for name in ("created_at", "expires_at", "last_used_at")),
            str(one["note"]),
        )
        for one in found
    ]
    echo(output.table(("TOKEN", "USER", "ROLE", "STATE", "CREATED", "EXPIRES", "USED", "NOTE"), rows))


@command.command("revoke")
@click.argument("token_ids", metavar="TOKEN...", nargs=-1, required=True)
@json_option
def revoke_command(token_ids: tuple[str, ...], as_json: bool) -> None:
    """Revoke tokens by their ids, from now on."""
    from orc.orchestrator.cli.ui import output

    revoked: list[Mapping[str, Any]] = []
    if service := _service():
        from orc.orchestrator.clients import tokens as requests

        revoked += [service.ask(requests.revoke(token_id)) for token_id in token_ids]
    else:
        from orc.orchestrator.service import tokens

        ledger = _ledger()
        for token_id in token_ids:
            revoked.append(vars(tokens.revoke(ledger, token_id, ledger.now())))
            _note(ledger, "revoke_token", token_id)
    if as_json:
        output.echo_json({"tokens": revoked})
    else:
        echo("\n".join(f"{record['id']} of {record['user']} is revoked" for record in revoked))


def _state(token: Mapping[str, Any]) -> str:
    import time

    if token["revoked_at"] is not None:
        return "revoked"
    return "expired" if token["expires_at"] is not None and token["expires_at"] <= time.time() else "valid"


def _service() -> ServiceClient | None:
    """Return the client of the service that commands go to; `None` where they go to the ledger."""
    from orc.orchestrator.clients import logins

    login = logins.configured()
    if login is None:
        return None
    from orc.orchestrator.clients.connecting import service_client

    client = service_client(login)
    click.get_current_context().call_on_close(client.close)
    return client


def _ledger() -> Ledger:
    """Return the ledger of this machine, which has to be writable."""
    from orc.orchestrator.client import Client
    from orc.orchestrator.ledger.errors import LedgerError

    client = Client(reconciler=False)
    click.get_current_context().call_on_close(client.close)
    if client.workspace.ledger.volatile:
        raise LedgerError(f"the ledger can only be read: {client.workspace.ledger.volatile}", hint="free some space")
    return client.workspace.ledger


def _note(ledger: Ledger, action: str, subject: str, **data: str) -> None:
    import getpass

    from orc.orchestrator.ledger import audit

    with ledger.database.write() as connection:
        audit.append(
            connection,
            at=ledger.now(),
            user=getpass.getuser(),
            action=action,
            subject=subject,
            address="cli",
            data=data,
        )
