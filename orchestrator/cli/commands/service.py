"""Commands of a service, its users and their limits: `orc serve`, `login`, `token`, `quota`, `notifications` ..."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from orc.launchers.errors import LaunchError
from orc.orchestrator.cli.invocation import (
    Parsed,
    json_option,
    limit_option,
    open_client,
    open_service,
    output_options,
    seconds,
)
from orc.orchestrator.cli.ui import jobtext, output
from orc.orchestrator.cli.ui.display import waiting
from orc.orchestrator.cli.ui.output import cells, echo, echo_json, echo_json_line, echo_result, listing

if TYPE_CHECKING:
    from orc.orchestrator.clients.surface import JobsClient
    from orc.orchestrator.ledger.tokens import TokenRecord


@click.command("login")
@click.argument("url", metavar="URL")
@click.option("--token-file", type=click.Path(), help="File of mode 0600 that holds the token.")
@click.option("--ca", type=click.Path(), help="File of the certificates to trust instead of the system's.")
@click.option("--insecure-http", is_flag=True, help="Agree to send the token unencrypted over a network.")
@json_option
def login_command(url: str, token_file: str | None, ca: str | None, insecure_http: bool, as_json: bool) -> None:
    """Store a token for the service at URL. From then on commands go to it, not to the ledger of this machine.

    orc asks for the token on a terminal, or reads it from standard input: others could see an argument.
    """
    from orc.orchestrator.clients import logins

    address = logins.checked_url(url)
    trusted = str(Path(ca).expanduser().absolute()) if ca else ""
    logins.refuse_clear_text(logins.Login(address, insecure_http=insecure_http))
    token = logins.token_file(Path(token_file)) if token_file else _asked(address)
    login = logins.Login(address, token, trusted, insecure_http)
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
def logout_command(url: str | None, as_json: bool) -> None:
    """Forget the token for the service at URL (default: the one in use). Commands then use the ledger of this machine.

    The token stays valid: `orc token revoke` ends it for everybody who has it.
    """
    from orc.orchestrator.clients import logins

    current, stored = logins.read()
    address = logins.checked_url(url) if url else current
    if not address or not logins.forget(address):
        hint = f"logged in to {', '.join(stored)}" if stored else "`orc login URL` logs in"
        raise LaunchError(f"not logged in to {address or 'a service'}", hint=hint)
    echo_result(as_json, {"url": address}, f"forgot the token for {address}")


@click.command("whoami")
@json_option
def whoami_command(as_json: bool) -> None:
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


def _span(text: str) -> float | None:
    """Return a time like 90d, 12h or never in seconds. Raises `ValueError`."""
    length = None if text == "never" else seconds(text)
    # A number alone might be meant in days.
    if length is not None and not (text[-1].isalpha() and 0 < length <= 3660 * 86400):
        raise ValueError(f"{text!r} is no time: 90d, 12h, 30m, or never.")
    return length


@click.group("token")
def token_command() -> None:
    """Create, list and revoke tokens of the service.

    They are those of the service that is logged in to (`orc login`), for its admins; else those in the ledger that this
    machine uses, where whoever can open it can make one for anybody.
    """


@token_command.command("create")
@click.option("--user", required=True, metavar="NAME", help="User of the token: jobs sent with it belong to NAME.")
@click.option(
    "--role", type=click.Choice(["viewer", "user", "admin"]), default="user", show_default=True,
    help="A viewer reads, a user changes their own jobs, an admin changes all.",
)  # fmt: skip
@click.option(
    "--expires", type=Parsed("span", _span), default="90d", show_default=True, metavar="TIME",
    help="Time until it expires, like 12h, or never.",
)  # fmt: skip
@click.option("--note", default="", help="A note about its purpose.")
@json_option
def create_token_command(user: str, role: str, expires: float | None, note: str, as_json: bool) -> None:
    """Create a token and print it, only this once."""
    from orc.orchestrator.api.access import create_token

    client = _client()
    made = create_token(client.session, user, role, expires, note)
    _note(client, "create_token", made.id, user=user, role=role)
    if as_json:
        echo_json(made.to_dict())
        return
    echo(made.token)
    until = "never" if made.expires_at is None else output.clock(made.expires_at)
    echo(f"{made.id} of {user} ({role}), expires {until}; it is shown this once", err=True)


@token_command.command("list")
@json_option
def list_tokens_command(as_json: bool) -> None:
    """List the tokens, without their secrets."""
    from orc.orchestrator.api.access import list_tokens

    found = list_tokens(_client().session)
    times = "created_at expires_at last_used_at note"
    rows = [[*cells(token, "id user role"), _state(token), *cells(token, times)] for token in found.tokens]
    header = ("TOKEN", "USER", "ROLE", "STATE", "CREATED", "EXPIRES", "USED", "NOTE")
    listing(as_json, found.to_dict(), header, rows, "no tokens")


@token_command.command("revoke")
@click.argument("token_ids", metavar="TOKEN...", nargs=-1, required=True)
@json_option
def revoke_token_command(token_ids: tuple[str, ...], as_json: bool) -> None:
    """Revoke tokens by their ids, from now on."""
    from orc.orchestrator.api.access import revoke_token

    client, revoked = _client(), []
    for token_id in token_ids:
        revoked.append(revoke_token(client.session, token_id))
        _note(client, "revoke_token", token_id)
    text = "\n".join(f"{token.id} of {token.user} is revoked" for token in revoked)
    echo_result(as_json, {"tokens": [vars(token) for token in revoked]}, text)


def _state(token: TokenRecord) -> str:
    if token.revoked_at is not None:
        return "revoked"
    return "valid" if token.valid(time.time()) else "expired"


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
        who = {"user": getpass.getuser(), "address": "cli"}
        audit.append(connection, at=ledger.now(), action=action, subject=subject, data=data, **who)


RESOURCES = ("gpus", "jobs", "cost")


def whose(function: click.decorators.FC) -> click.decorators.FC:
    """Add ``--user`` and ``--project``, of which one is needed."""
    function = click.option("--project", metavar="NAME", help="For all jobs of this project.")(function)
    return click.option("--user", metavar="NAME", help="For all jobs of this user.")(function)


@click.group("quota")
def quota_command() -> None:
    """Limit the live jobs, GPUs and cost of users and projects, over all clusters."""


@quota_command.command("set")
@whose
@click.argument("resource", type=click.Choice(RESOURCES))
@click.argument("amount", type=click.FloatRange(0))
@json_option
def set_quota_command(user: str | None, project: str | None, resource: str, amount: float, as_json: bool) -> None:
    """Allow AMOUNT of RESOURCE: gpus or jobs at one time, or cost in 30 days. Further jobs wait; the others stay."""
    from orc.orchestrator.api.clusters import set_quota

    scope, name = _named(user, project)
    set_quota(open_client(reconciler=False).session, scope, name, resource, amount)
    told = {"scope": scope, "name": name, "resource": resource, "amount": amount}
    echo_result(as_json, told, f"{scope} {name}: {amount:g} {resource}")


@quota_command.command("remove")
@whose
@click.argument("resource", type=click.Choice(RESOURCES))
@json_option
def remove_quota_command(user: str | None, project: str | None, resource: str, as_json: bool) -> None:
    """Remove the limit on RESOURCE for a user or project."""
    from orc.orchestrator.api.clusters import list_quotas, set_quota

    scope, name = _named(user, project)
    session = open_client(reconciler=False).session
    if not any((q.scope, q.name, q.resource) == (scope, name, resource) for q in list_quotas(session).quotas):
        raise LaunchError(f"the {scope} {name} has no quota of {resource}", hint="`orc quota list` shows the quotas")
    set_quota(session, scope, name, resource)
    told = {"scope": scope, "name": name, "resource": resource}
    echo_result(as_json, told, f"{scope} {name}: any number of {resource}")


@quota_command.command("list")
@json_option
def list_quotas_command(as_json: bool) -> None:
    """List the quotas, with their current use."""
    from orc.orchestrator.api.clusters import list_quotas

    found = list_quotas(open_client(reconciler=False).session)
    rows = [(q.scope, q.name, q.resource, f"{q.used:.10g}", f"{q.amount:g}") for q in found.quotas]
    listing(as_json, found.to_dict(), ("SCOPE", "NAME", "RESOURCE", "USED", "QUOTA"), rows, "no quotas")


def _named(user: str | None, project: str | None) -> tuple[str, str]:
    if bool(user) == bool(project):
        raise click.UsageError("give --user NAME or --project NAME")
    return ("user", user) if user else ("project", project or "")


@click.group("notifications")
def notifications_command() -> None:
    """List notifications, send failed ones again, test a target."""


@notifications_command.command("list")
@click.option("--job", metavar="JOB", help="Only notifications about this job.")
@click.option(
    "--state", "states", multiple=True, type=click.Choice(["due", "sent", "dead"]),
    help="Only in this state. May be repeated.",
)  # fmt: skip
@limit_option
@output_options("json", "yaml")
def list_notifications_command(job: str | None, states: tuple[str, ...], limit: int, form: str | None) -> None:
    """List notifications, newest first: due, sent, and given up with the reason."""
    client = open_client()
    found = client.notifications(job_id=client.resolve(job) if job else None, states=states, limit=limit)
    told = {"notifications": [sent.to_dict() for sent in found]}
    header = ("ID", "JOB", "EVENT", "TARGET", "STATE", "TRIES", "NEXT", "ERROR")
    names = "id job event target state tries next_at"
    rows = [[*cells(sent, names), jobtext.first_line(sent.error)] for sent in found]
    listing(form, told, header, rows, "no notifications")


@notifications_command.command("retry")
@click.argument("jobs", metavar="[JOB]...", nargs=-1)
@json_option
def retry_notifications_command(jobs: tuple[str, ...], as_json: bool) -> None:
    """Send notifications about JOBs again that were given up. [default: about all jobs]"""
    client = open_client()
    chosen = [client.resolve(job) for job in jobs]
    if not jobs:
        chosen = list(dict.fromkeys(one.job for one in client.notifications(states=("dead",), limit=500)))
    count = sum(client.retry_notifications(job_id) for job_id in chosen)
    echo_result(as_json, {"due": count}, f"{count} due again")


@notifications_command.command("test")
@click.argument("target")
@json_option
def test_target_command(target: str, as_json: bool) -> None:
    """Send a test to TARGET now, from here: a name of notifications.yaml, or an address as in a job file."""
    import uuid

    from orc.launchers.secrets import resolve_secrets
    from orc.orchestrator.notifications.delivery import send
    from orc.orchestrator.notifications.sending import Undelivered
    from orc.orchestrator.notifications.targets import Policy, load_settings, target_of

    found = target_of(target, load_settings(), Policy(), resolve_secrets)
    payload: dict[str, object] = {"event": "test", "job": "orc", "reason": "orc notifications test"}
    try:
        with waiting(f"sending to {found.shown}"):
            send(found, payload, f"test-{uuid.uuid4().hex[:12]}", time.time())
    except Undelivered as error:
        raise LaunchError(f"the test did not arrive: {error}", where=found.shown) from None
    echo_result(as_json, {"target": found.shown, "sent": True}, f"sent to {found.shown}")


@click.command("serve")
@click.option("--host", metavar="ADDRESS", help="Address to listen on. [default: 127.0.0.1]")
@click.option("--port", type=click.IntRange(0, 65535), help="Port to listen on; 0 takes a free one. [default: 8770]")
@click.option("--tls-cert", type=click.Path(path_type=Path), help="Certificate chain (PEM).")
@click.option("--tls-key", type=click.Path(path_type=Path), help="Key of the certificate (PEM).")
@click.option("--behind-proxy", is_flag=True, default=None, help="A proxy ends TLS and passes on the caller's address.")
@click.option(
    "--allowed-host", "allowed_hosts", multiple=True, metavar="NAME",
    help="Host name that requests may use. May be repeated.",
)  # fmt: skip
@click.option(
    "--access-log", type=click.Choice(["text", "json"]), help="Form of the access log; json: one object on each line."
)
@click.option("--no-reconciler", is_flag=True, help="Only serve; another process runs the passes.")
@click.option(
    "--config", type=click.Path(path_type=Path, dir_okay=False), help="File of settings instead of service.yaml."
)
@json_option
def serve_command(
    allowed_hosts: tuple[str, ...], no_reconciler: bool, config: Path | None, as_json: bool, **given: Any
) -> None:
    """Serve the ledger over HTTP: REST API, event streams and web page, and run the passes of the reconciler.

    Settings are flags, ORC_SERVE_* variables, or keys of service.yaml (docs/reference/rest-api.md). Every request needs
    a token (`orc token create`). Without --host the service accepts requests only from this machine.
    """
    import logging

    try:
        from orc.orchestrator.service.server import serve
        from orc.orchestrator.service.settings import load_settings
    except ImportError as error:
        what = f"the service needs {error.name or error}, which is not installed here"
        raise LaunchError(what, hint="pip install 'orc-launch[service]'") from None
    from orc.orchestrator.client import Client

    chosen = {**given, "allowed_hosts": allowed_hosts or None, "reconciler": False if no_reconciler else None}
    settings = load_settings(chosen, config)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    if settings.access_log == "json":
        bare = logging.StreamHandler()  # on stderr as well, with nothing before or behind the object
        bare.setFormatter(logging.Formatter("%(message)s"))
        access = logging.getLogger("orc.service.access")
        access.addHandler(bare)
        access.propagate = False

    def tell(url: str) -> None:
        echo_json_line({"url": url}) if as_json else echo(f"serving on {url}")

    serve(settings, lambda: Client(reconciler=False), tell)
