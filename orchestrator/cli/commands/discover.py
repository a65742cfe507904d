"""`orc clusters discover`."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import click

from orc.launchers.errors import LaunchError
from orc.launchers.plugins import BACKENDS
from orc.orchestrator.cli.options import json_option
from orc.orchestrator.cli.ui import output, reporting
from orc.orchestrator.cli.ui.display import waiting
from orc.orchestrator.cli.ui.output import echo

if TYPE_CHECKING:
    from orc.launchers.backends.base import SupportsDiscovery


class _Kinds(click.Group):
    """Sub-commands, one for each kind of cluster that can describe itself; its options are the backend's."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the kinds, in alphabetical order."""
        return [kind for kind in BACKENDS.kinds() if _discovering(kind) is not None]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return the command of one kind."""
        found = _discovering(cmd_name)
        if found is None:
            return None
        params: list[click.Parameter] = [
            click.Option([f"--{name.replace('_', '-')}"], metavar=metavar, help=text)
            for name, (metavar, text) in found.discovery_options.items()
        ]
        params += _common.params
        return click.Command(cmd_name, params=params, callback=partial(_discover, found), help=command.help)


def _discovering(kind: str) -> type[SupportsDiscovery] | None:
    from orc.launchers.backends import backend_class
    from orc.launchers.backends.base import SupportsDiscovery

    found = backend_class(kind) if BACKENDS.has(kind) else None
    return cast("type[SupportsDiscovery]", found) if isinstance(found, SupportsDiscovery) else None


@click.command()
@click.option("--name", metavar="NAME", help="Name of the entry in clusters.yaml. [default: the cluster's own name]")
@click.option("--write", is_flag=True, help="Append the entry to clusters.yaml.")
@json_option
def _common(**_: Any) -> None:
    """Hold the options that all kinds share."""


@click.command("discover", cls=_Kinds)
def command() -> None:
    """Print an entry for clusters.yaml, made from the facts that a cluster reports.

    Changes nothing over there. An entry that exists already is never changed.
    """


def _discover(
    backend: type[SupportsDiscovery], *, name: str | None, write: bool, as_json: bool, **ways: str | None
) -> None:
    from orc.launchers.paths import clusters_file
    from orc.launchers.spec import source

    file = clusters_file()
    if name is not None and write:
        refuse_known(name, file)
    with waiting("asking the cluster about itself"):
        found = backend.discover({key: value for key, value in ways.items() if value is not None}, name)
    if not as_json:
        echo(found.entry, nl=False)
    for finding in found.findings:
        reporting.warn(finding)
    if write:
        append(found.name, found.entry, file)
    if as_json:
        entry = source.parse(found.entry, found.name).data[found.name]
        output.echo_json({"name": found.name, "entry": entry, **found.facts, "file": str(file), "written": write})
    else:
        echo(f"\n{'added to' if write else 'not written; --write adds it to'} {file}", err=True)


def refuse_known(name: str, file: Path) -> None:
    """Raises `LaunchError` when *file* has an entry of that name, or is not a clusters file."""
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
        raise LaunchError(f"the file cannot be written: {error.strerror}", where=str(file)) from None
    finally:
        trial.unlink(missing_ok=True)
