"""`orc clusters discover`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from orc.orchestrator.cli.options import json_option
from orc.orchestrator.cli.ui.output import echo


@click.command("discover")
@click.argument("kind", type=click.Choice(["slurm"]))
@click.option("--login", metavar="[USER@]HOST", help="Login node, reached over SSH; this machine unless given.")
@click.option("--ssh-config", metavar="PATH", help="SSH configuration instead of ~/.ssh/config.")
@click.option("--conf", metavar="PATH", help="slurm.conf over there, when it is not the system's.")
@click.option("--bin", metavar="PATH", help="Directory of sbatch and so on over there, when not on the PATH.")
@click.option("--name", metavar="NAME", help="What the cluster is called in clusters.yaml; its own name unless given.")
@click.option("--write", is_flag=True, help="Append the entry to clusters.yaml.")
@json_option
def command(kind: str, name: str | None, write: bool, as_json: bool, **ways: str | None) -> None:
    """Print an entry for clusters.yaml, made from what a cluster says about itself.

    Asks sinfo, scontrol and sacctmgr; changes nothing over there. An entry that exists already is never changed.
    """
    import dataclasses

    import yaml

    from orc.launchers.backends.base import Finding
    from orc.launchers.backends.slurm.discovery import discover, entry, entry_name
    from orc.launchers.paths import clusters_file
    from orc.orchestrator.cli.ui import output, reporting

    file = clusters_file()
    if name is not None and write:
        refuse_known(name, file)
    options = {key: value for key, value in ways.items() if value is not None}
    facts = discover(options)
    called = name or entry_name(facts)
    text = entry(called, facts, options)
    if not as_json:
        echo(text, nl=False)
    if not (facts.python and facts.torch):
        lacking = f"{facts.python} has no torch" if facts.python else "no Python 3.9 or newer was found"
        do = f"change `python:` of {called} to one that the nodes have; `orc clusters check {called}` looks at it"
        reporting.warn(Finding("warning", lacking, "where the cluster is entered", do))
    if write:
        append(called, text, file)
    if as_json:
        found: dict[str, Any] = {"name": called, "entry": yaml.safe_load(text)[called], **dataclasses.asdict(facts)}
        output.echo_json({**found, "file": str(file), "written": write})
    else:
        echo(f"\n{'added to' if write else 'not written; --write adds it to'} {file}", err=True)


def refuse_known(name: str, file: Path) -> None:
    """Raises `LaunchError` when *file* has an entry of that name, or is not a clusters file."""
    from orc.launchers.errors import LaunchError
    from orc.launchers.spec.clusters import load_clusters

    if name in (load_clusters(file) if file.exists() else {"local"}):
        raise LaunchError(
            f"there is a cluster {name} already, and it stays as it is",
            where=str(file),
            hint="Give the new one another name with --name, or change the entry by hand.",
        )


def append(name: str, text: str, file: Path) -> None:
    """Put *text* at the end of the clusters file, all of it or nothing. Raises `LaunchError`."""
    import stat

    from orc.launchers.errors import LaunchError
    from orc.launchers.remote.files import write_file
    from orc.launchers.spec.clusters import load_clusters

    refuse_known(name, file)
    target = file.resolve()
    before = target.read_text(encoding="utf-8") if target.exists() else ""
    after = f"{before.rstrip()}\n\n{text}" if before.strip() else text
    trial = target.with_name(f".{target.name}.new")
    try:
        write_file(str(trial), after.encode(), stat.S_IMODE(target.stat().st_mode) if target.exists() else 0o600)
        try:
            known = load_clusters(trial)
        except LaunchError as error:
            raise LaunchError(
                f"with the new entry the file could not be read any more: {error.what}",
                where=str(file),
                hint="Nothing was written; add the entry by hand.",
            ) from None
        if name not in known:
            raise LaunchError("the entry does not fit at the end of the file", where=str(file), hint="Add it by hand.")
        trial.replace(target)
    except OSError as error:
        raise LaunchError(f"cannot be written: {error.strerror}", where=str(file)) from None
    finally:
        trial.unlink(missing_ok=True)
