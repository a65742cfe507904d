"""`orc quota`: how much users and projects may have in flight, in the service that is logged in to, else the ledger."""

from __future__ import annotations

import click

from orc.launchers.errors import LaunchError
from orc.orchestrator.cli.options import json_option
from orc.orchestrator.cli.session import open_client
from orc.orchestrator.cli.ui.output import echo_result, listing

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
    from orc.orchestrator.api.clusters import set_quota

    scope, name = _named(user, project)
    set_quota(open_client(reconciler=False).session, scope, name, resource, amount)
    told = {"scope": scope, "name": name, "resource": resource, "amount": amount}
    echo_result(as_json, told, f"{scope} {name}: {amount:g} {resource}")


@command.command("remove")
@whose
@click.argument("resource", type=click.Choice(RESOURCES))
@json_option
def remove_command(user: str | None, project: str | None, resource: str, as_json: bool) -> None:
    """Remove the limit on RESOURCE for a user or project."""
    from orc.orchestrator.api.clusters import list_quotas, set_quota

    scope, name = _named(user, project)
    session = open_client(reconciler=False).session
    if not any((q.scope, q.name, q.resource) == (scope, name, resource) for q in list_quotas(session).quotas):
        raise LaunchError(f"the {scope} {name} has no quota of {resource}", hint="`orc quota list` shows the quotas")
    set_quota(session, scope, name, resource)
    echo_result(
        as_json, {"scope": scope, "name": name, "resource": resource}, f"{scope} {name}: any number of {resource}"
    )


@command.command("list")
@json_option
def list_command(as_json: bool) -> None:
    """List the quotas, with their current use."""
    from orc.orchestrator.api.clusters import list_quotas

    found = list_quotas(open_client(reconciler=False).session)
    rows = [(q.scope, q.name, q.resource, f"{q.used:.10g}", f"{q.amount:g}") for q in found.quotas]
    listing(as_json, found.to_dict(), ("SCOPE", "NAME", "RESOURCE", "USED", "QUOTA"), rows, "no quotas")


def _named(user: str | None, project: str | None) -> tuple[str, str]:
    if bool(user) == bool(project):
        raise click.UsageError("give --user NAME or --project NAME")
    return ("user", user) if user else ("project", project or "")
