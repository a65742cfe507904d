"""`orc import`: read an exported ledger into this one."""

from __future__ import annotations

import sys

import click

from orc.orchestrator.cli.options import json_option
from orc.orchestrator.cli.ui.output import echo


@click.command("import")
@click.argument("file", type=click.Path(dir_okay=False, allow_dash=True))
@json_option
def command(file: str, as_json: bool) -> int:
    """Read FILE (- for standard input), which `orc export` wrote, into this ledger: all of it or nothing.

    Jobs that are here already stay as they are, so that a second time changes nothing.
    """
    from orc.launchers.errors import LaunchError
    from orc.orchestrator.cli.session import open_ledger
    from orc.orchestrator.cli.ui import output
    from orc.orchestrator.ledger.history_import import import_history

    ledger = open_ledger(reconciler=False).workspace.ledger
    try:
        if file == "-":
            report = import_history(ledger, sys.stdin, "standard input")
        else:
            with open(file, encoding="utf-8") as opened:  # noqa: PTH123
                report = import_history(ledger, opened, file)
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "not text in UTF-8"
        raise LaunchError(f"cannot read the file: {why}", where=file, hint="`orc export FILE` writes one") from error
    if as_json:
        output.echo_json({"file": file, "added": report.added, "known": report.known})
    else:
        echo(f"added {report.added['jobs']} jobs with {report.added['events']} events")
        if report.known["jobs"]:
            echo(f"{report.known['jobs']} jobs were here already")
    return 0
