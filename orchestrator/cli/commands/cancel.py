"""`orc cancel`."""

from __future__ import annotations

import click

from orc.orchestrator.cli.options import SECONDS, jobs_argument, json_option
from orc.orchestrator.cli.ui.output import echo


@click.command("cancel")
@jobs_argument
@click.option("--grace", type=SECONDS, metavar="SECONDS", help="Between SIGTERM and SIGKILL.")
@json_option
def command(jobs: tuple[str, ...], grace: float | None, as_json: bool) -> None:
    """Stop JOBs: SIGTERM to every rank, SIGKILL after the grace. Jobs that have ended stay as they are."""
    from orc.orchestrator.cli.session import open_client
    from orc.orchestrator.cli.ui import jobtext, output, reporting

    client = open_client()
    untold: dict[str, str] = {}
    views = client.cancel([client.resolve(job) for job in jobs], grace_s=grace, on_unreachable=untold.update)
    reporting.warn_unreachable(untold, "the wish is kept; `orc status` and `orc wait` pass it on once it answers")
    if as_json:
        output.echo_json({"jobs": [view.to_dict() for view in views]})
        return
    for view in views:
        asked = "asked to stop" if view.cluster not in untold else "to be stopped, not told yet"
        echo(f"{jobtext.headline(view)}" + ("" if view.ended else f"  {asked}; `orc wait` waits for the end"))
