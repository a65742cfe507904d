"""`orc notifications`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from orc.launchers.errors import LaunchError
from orc.orchestrator.cli.options import json_option, limit_option, output_options
from orc.orchestrator.cli.session import open_client
from orc.orchestrator.cli.ui import jobtext, output
from orc.orchestrator.cli.ui.display import waiting
from orc.orchestrator.cli.ui.output import echo_result

if TYPE_CHECKING:
    from orc.orchestrator.views import NotificationView


@click.group("notifications")
def command() -> None:
    """List notifications, send failed ones again, test a target."""


@command.command("list")
@click.option("--job", metavar="JOB", help="Only notifications about this job.")
@click.option(
    "--state",
    "states",
    multiple=True,
    type=click.Choice(["due", "sent", "dead"]),
    help="Only in this state. May be repeated.",
)
@limit_option
@output_options("json", "yaml")
def list_command(job: str | None, states: tuple[str, ...], limit: int, form: str | None) -> None:
    """List notifications, newest first: due, sent, and given up with the reason."""
    client = open_client()
    found = client.notifications(job_id=client.resolve(job) if job else None, states=states, limit=limit)
    told = {"notifications": [one.to_dict() for one in found]}
    header = ("ID", "JOB", "EVENT", "TARGET", "STATE", "TRIES", "NEXT", "ERROR")
    output.listing(form, told, header, [_row(one) for one in found], "no notifications")


def _row(one: NotificationView) -> list[str]:
    next_at = "-" if one.next_at is None else output.clock(one.next_at)
    error = jobtext.first_line(one.error)
    return [str(one.id), one.job, one.event, one.target, one.state, str(one.tries), next_at, error]


@command.command("retry")
@click.argument("jobs", metavar="[JOB]...", nargs=-1)
@json_option
def retry_command(jobs: tuple[str, ...], as_json: bool) -> None:
    """Send notifications about JOBs again that were given up. [default: about all jobs]"""
    client = open_client()
    chosen = [client.resolve(job) for job in jobs]
    if not jobs:
        chosen = list(dict.fromkeys(one.job for one in client.notifications(states=("dead",), limit=500)))
    count = sum(client.retry_notifications(job_id) for job_id in chosen)
    echo_result(as_json, {"due": count}, f"{count} due again")


@command.command("test")
@click.argument("target")
@json_option
def test_command(target: str, as_json: bool) -> None:
    """Send a test to TARGET now, from here: a name of notifications.yaml, or an address as in a job file."""
    import time
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
