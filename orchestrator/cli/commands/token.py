"""`orc token`: tokens of the service that is logged in to, else of the ledger that this machine uses."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from orc.orchestrator.cli.options import AGE, json_option
from orc.orchestrator.cli.session import open_client
from orc.orchestrator.cli.ui import output
from orc.orchestrator.cli.ui.output import echo, echo_result

if TYPE_CHECKING:
    from collections.abc import Mapping

    from orc.orchestrator.clients.surface import JobsClient


class _Span(click.ParamType["float | None"]):
    """Time like 90d, 12h or never, in seconds."""

    name = "span"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float | None:
        seconds = None if value == "never" else AGE.convert(value, param, ctx)
        # A number alone might be meant in days.
        if seconds is not None and not (str(value)[-1].isalpha() and 0 < seconds <= 3660 * 86400):
            self.fail(f"{value!r} is no time: 90d, 12h, 30m, or never.", param, ctx)
        return seconds


@click.group("token")
def command() -> None:
    """Create, list and revoke tokens of the service.

    They are those of the service that is logged in to (`orc login`), for its admins; else those in the ledger that this
    machine uses, where whoever can open it can make one for anybody.
    """


@command.command("create")
@click.option("--user", required=True, metavar="NAME", help="User of the token: jobs sent with it belong to NAME.")
@click.option(
    "--role",
    type=click.Choice(["viewer", "user", "admin"]),
    default="user",
    show_default=True,
    help="A viewer reads, a user changes their own jobs, an admin changes all.",
)
@click.option(
    "--expires",
    type=_Span(),
    default="90d",
    show_default=True,
    metavar="TIME",
    help="Time until it expires, like 12h, or never.",
)
@click.option("--note", default="", help="A note about its purpose.")
@json_option
def create_command(user: str, role: str, expires: float | None, note: str, as_json: bool) -> None:
    """Create a token and print it, only this once."""
    from orc.orchestrator.api.access import create_token

    client = _client()
    made = create_token(client.session, user, role, expires, note).to_dict()
    _note(client, "create_token", made["id"], user=user, role=role)
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
    from orc.orchestrator.api.access import list_tokens

    found = list_tokens(_client().session).to_dict()["tokens"]

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
    header = ("TOKEN", "USER", "ROLE", "STATE", "CREATED", "EXPIRES", "USED", "NOTE")
    output.listing(as_json, {"tokens": found}, header, rows, "no tokens")


@command.command("revoke")
@click.argument("token_ids", metavar="TOKEN...", nargs=-1, required=True)
@json_option
def revoke_command(token_ids: tuple[str, ...], as_json: bool) -> None:
    """Revoke tokens by their ids, from now on."""
    from orc.orchestrator.api.access import revoke_token

    client = _client()
    revoked: list[Mapping[str, Any]] = []
    for token_id in token_ids:
        revoked.append(vars(revoke_token(client.session, token_id)))
        _note(client, "revoke_token", token_id)
    echo_result(
        as_json, {"tokens": revoked}, "\n".join(f"{record['id']} of {record['user']} is revoked" for record in revoked)
    )


def _state(token: Mapping[str, Any]) -> str:
    import time

    if token["revoked_at"] is not None:
        return "revoked"
    return "expired" if token["expires_at"] is not None and token["expires_at"] <= time.time() else "valid"


def _client() -> JobsClient:
    """Return the client of the service that commands go to, else of the ledger, which has to be writable."""
    from orc.orchestrator.client import Client
    from orc.orchestrator.ledger.database import LedgerError

    client = open_client(reconciler=False)
    if isinstance(client, Client) and (why := client.workspace.ledger.volatile):
        raise LedgerError(f"the ledger can only be read: {why}", hint="free some space")
    return client


def _note(client: JobsClient, action: str, subject: str, **data: str) -> None:
    """Write down what was changed in the ledger; a service does that itself."""
    import getpass

    from orc.orchestrator.client import Client
    from orc.orchestrator.ledger import audit

    if not isinstance(client, Client):
        return
    ledger = client.workspace.ledger
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
