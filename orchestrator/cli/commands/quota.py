"""`orc quota`: how much users and projects may have in flight, in the ledger that this machine uses."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from orc.launchers.errors import LaunchError
from orc.orchestrator.cli.options import json_option
from orc.orchestrator.cli.ui.output import echo_result, listing

if TYPE_CHECKING:
    from orc.orchestrator.workspace import Workspace

RESOURCES = ("gpus", "jobs", "cost")


def whose(function: click.decorators.FC) -> click.decorators.FC:
    """Add ``--user`` and ``--project``, of which one is needed."""
    function = click.option("--project", metavar="NAME", help="For all jobs of this project.")(function)
    return click.option("--user", metavar="NAME", help="For all jobs of this user.")(function)


@click.group("quota")
def command() -> None:
    """Limit the live jobs, GPUs and cost of users and projects, over all clusters."""


@command.command("set")
@whose
@click.argument("resource", type=click.Choice(RESOURCES))
@click.argument("amount", type=click.FloatRange(0))
@json_option
def set_command(user: str | None, project: str | None, resource: str, amount: float, as_json: bool) -> None:
    """Allow AMOUNT of RESOURCE: gpus or jobs at one time, or cost in 30 days. Further jobs wait; the others stay."""
    from orc.orchestrator.ledger import usage

    quota = usage.Quota(*_named(user, project), resource, amount)
    with _workspace().ledger.transaction() as tx:
        usage.put_quota(tx.connection, quota)
    echo_result(as_json, quota._asdict(), f"{quota.scope} {quota.name}: {amount:g} {resource}")


@command.command("remove")
@whose
@click.argument("resource", type=click.Choice(RESOURCES))
@json_option
def remove_command(user: str | None, project: str | None, resource: str, as_json: bool) -> None:
    """Remove the limit on RESOURCE for a user or project."""
    from orc.orchestrator.ledger import usage

    scope, name = _named(user, project)
    with _workspace().ledger.transaction() as tx:
        there = usage.remove_quota(tx.connection, scope, name, resource)
    if not there:
        raise LaunchError(f"the {scope} {name} has no quota of {resource}", hint="`orc quota list` shows the quotas")
    echo_result(
        as_json, {"scope": scope, "name": name, "resource": resource}, f"{scope} {name}: any number of {resource}"
    )


@command.command("list")
@json_option
def list_command(as_json: bool) -> None:
    """List the quotas, with their current use."""
    from orc.orchestrator.engine.limits import use_of_quotas

    found = use_of_quotas(_workspace())
    rows = [(q.scope, q.name, q.resource, f"{used:.10g}", f"{q.amount:g}") for q, used in found]
    told = {"quotas": [{**quota._asdict(), "used": used} for quota, used in found]}
    listing(as_json, told, ("SCOPE", "NAME", "RESOURCE", "USED", "QUOTA"), rows, "no quotas")


def _named(user: str | None, project: str | None) -> tuple[str, str]:
    if bool(user) == bool(project):
        raise click.UsageError("give --user NAME or --project NAME")
    return ("user", user) if user else ("project", project or "")


def _workspace() -> Workspace:
    """Return the workspace of this machine."""
    from orc.orchestrator.client import Client

    client = Client(reconciler=False)
    click.get_current_context().call_on_close(client.close)
    return client.workspace
