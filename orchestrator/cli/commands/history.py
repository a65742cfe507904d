"""`orc export`, `orc import`: the history of all jobs, into a file and out of one."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import click

from orc.launchers.errors import LaunchError
from orc.orchestrator.cli.options import json_option
from orc.orchestrator.cli.session import open_ledger
from orc.orchestrator.cli.ui import output, questions
from orc.orchestrator.cli.ui.output import echo, echo_result


@click.command("export")
@click.argument("file", type=click.Path(dir_okay=False, allow_dash=True))
@click.option("--force", is_flag=True, help="Overwrite an existing FILE.")
@json_option
def export_(file: str, force: bool, as_json: bool) -> int:
    """Write the history of all jobs into FILE (- for standard output), as JSON lines for `orc import`.

    Jobs may run and be submitted meanwhile: the file shows one moment. It has no secrets and no tokens in it.
    """
    from orc.orchestrator.ledger.history import export

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


@click.command("import")
@click.argument("file", type=click.Path(dir_okay=False, allow_dash=True))
@click.option(
    "--take-over",
    is_flag=True,
    help="Go on with the file's live jobs and schedules here, after showing what will run. The other ledger must rest.",
)
@click.option("-y", "--yes", is_flag=True, help="With --take-over: go on without asking.")
@json_option
def import_(file: str, take_over: bool, yes: bool, as_json: bool) -> int:
    """Read FILE (- for standard input), which `orc export` wrote, into this ledger: all of it or nothing.

    It is read as an archive: nothing of it runs. Jobs that had not ended come in as cancelled, schedules as disabled.
    Jobs that are here already stay as they are, so that a second time changes nothing.
    """
    from orc.orchestrator.ledger.history import import_history

    if yes and not take_over:
        raise click.UsageError("--yes goes with --take-over")
    ledger = open_ledger(reconciler=False).workspace.ledger
    where = "standard input" if file == "-" else file
    try:
        with click.open_file(file, encoding="utf-8") as opened:
            if take_over:
                lines = list(opened)  # what is imported is what was shown, even if the file is written meanwhile
                _agree(lines, where, yes=yes)
                report = import_history(ledger, lines, where, take_over=True)
            else:
                report = import_history(ledger, opened, where)
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "not text in UTF-8"
        raise LaunchError(f"cannot read the file: {why}", where=file, hint="`orc export FILE` writes one") from error
    if as_json:
        output.echo_json(
            {
                "file": file,
                "added": report.added,
                "known": report.known,
                "ended": report.ended,
                "disabled": report.disabled,
            }
        )
        return 0
    echo(f"added {report.added['jobs']} jobs with {report.added['events']} events")
    if report.known["jobs"]:
        echo(f"{report.known['jobs']} jobs were here already")
    if report.ended:
        echo(f"{report.ended} jobs had not ended: here they are cancelled, and do not run")
    if report.disabled:
        echo(f"{report.disabled} schedules came in disabled; `orc schedule resume NAME` starts one")
    return 0


def _agree(lines: list[str], where: str, *, yes: bool) -> None:
    """Print what will run, and ask.

    Raises `InvalidImport`, `click.UsageError` where orc cannot ask, and `click.exceptions.Exit` for a no.
    """
    from orc.orchestrator.ledger.history import live_work

    work = live_work(lines, where)
    for each in work:
        spec = each.spec.get("job", each.spec) if each.what == "schedule" else each.spec
        program = next((f"{key} {spec[key]}" for key in ("script", "module", "command") if spec.get(key)), "?")
        echo(f"{each.what} {each.name}  {each.state}  of {each.owner}  runs {program}", err=True)
    if not work or yes:
        return
    questions.agree(f"go on with these {len(work)} here, with the rights of this account")
