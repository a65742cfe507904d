"""`orc reconcile`, hidden: the detached reconciler of `orc submit` (`orc.orchestrator.engine.detached`)."""

from __future__ import annotations

import time

import click

from orc.orchestrator.cli.options import json_option


@click.command("reconcile", hidden=True)
@json_option
def command(as_json: bool) -> None:
    """Run passes until every job has ended; ends at once where another process does that."""
    from orc.orchestrator.cli.ui.output import echo, echo_json_line
    from orc.orchestrator.client import Client
    from orc.orchestrator.engine import detached

    def report_line(text: str) -> None:
        if as_json:
            echo_json_line({"at": time.time(), "what": text})
        else:
            echo(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}")

    detached.run(lambda: Client(reconciler=False), report_line)
