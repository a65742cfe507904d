"""`orc events`."""

from __future__ import annotations

import click

from orc.orchestrator.cli.options import newest_job_argument, output_options
from orc.orchestrator.cli.session import open_client
from orc.orchestrator.cli.ui import output
from orc.orchestrator.cli.ui.output import echo


@click.command("events")
@newest_job_argument
@output_options("json", "yaml", "wide")
def command(job: str, form: str | None) -> None:
    """Print the history of JOB (default: the newest), oldest first, one line per event.

    With -o wide the raw data of each event is shown beside the words; --json has all of it.
    """
    from orc.orchestrator.cli.ui.event_text import sentence

    client = open_client()
    events = client.events(client.resolve(job))
    if output.document({"events": [event.to_dict() for event in events]}, form):
        return
    header, rows = ["AT", "ATTEMPT", "WHAT"], []
    if form == "wide":
        header[2:2] = ["EVENT"]
        header.append("DATA")
    for event in events:
        row = [
            output.clock(event.at),
            f"a{event.attempt}" if event.attempt else "",
            sentence(str(event.kind), event.data),
        ]
        if form == "wide":
            row[2:2] = [str(event.kind)]
            row.append(" ".join(f"{k}={v}" for k, v in event.data.items() if v not in (None, "", {}, [])))
        rows.append(row)
    echo(output.table(header, rows, fit=form != "wide"))
