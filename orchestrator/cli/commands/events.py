"""`orc events`."""

from __future__ import annotations

import click

from orc.orchestrator.cli.options import job_argument, json_option
from orc.orchestrator.cli.ui.output import echo


@click.command("events")
@job_argument
@json_option
def command(job: str, as_json: bool) -> None:
    """Print the history of JOB, oldest first."""
    from orc.orchestrator.cli.session import open_client
    from orc.orchestrator.cli.ui import output

    client = open_client()
    events = client.events(client.resolve(job))
    if as_json:
        output.echo_json({"events": [event.to_dict() for event in events]})
        return
    rows = [
        (
            output.clock(event.at),
            f"a{event.attempt}" if event.attempt else "",
            str(event.kind),
            " ".join(f"{key}={value}" for key, value in event.data.items() if value not in (None, "", {}, [])),
        )
        for event in events
    ]
    echo(output.table(("AT", "ATTEMPT", "EVENT", "DATA"), rows))
