"""`orc export`: write the ledger into a file."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import click

from orc.launchers.errors import LaunchError
from orc.orchestrator.cli.options import json_option
from orc.orchestrator.cli.session import open_ledger
from orc.orchestrator.cli.ui.output import echo_result


@click.command("export")
@click.argument("file", type=click.Path(dir_okay=False, allow_dash=True))
@click.option("--force", is_flag=True, help="Overwrite an existing FILE.")
@json_option
def command(file: str, force: bool, as_json: bool) -> int:
    """Write the history of all jobs into FILE (- for standard output), as JSON lines for `orc import`.

    Jobs may run and be submitted meanwhile: the file shows one moment. It has no secrets and no tokens in it.
    """
    from orc.orchestrator.ledger.history_format import export

    ledger = open_ledger().workspace.ledger
    if file == "-":
        export(ledger, sys.stdout)
        return 0
    path = Path(file)
    if path.exists() and not force:
        raise LaunchError("the file is there already", where=file, hint="choose another name, or --force")
    new = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        descriptor = os.open(new, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8") as opened:
            counts = export(ledger, opened)
            opened.flush()
            os.fsync(opened.fileno())
        new.replace(path)
    except OSError as error:
        what = f"cannot write the file: {error.strerror or error}"
        raise LaunchError(what, where=file, hint="name a file in a directory that you can write to") from error
    finally:
        new.unlink(missing_ok=True)
    echo_result(
        as_json,
        {"file": file, "rows": counts},
        f"wrote {counts['jobs']} jobs with {counts['events']} events into {file}",
    )
    return 0
