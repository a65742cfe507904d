"""`orc hosts`: commands on the hosts of a cluster."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import click

from orc.launchers.errors import SpecError
from orc.orchestrator.cli.options import SECONDS, cluster_argument, json_option
from orc.orchestrator.cli.ui import output
from orc.orchestrator.cli.ui.output import echo

if TYPE_CHECKING:
    from orc.launchers.hosts.commands import Script
    from orc.launchers.remote.transport import Transport


@click.group("hosts")
def command() -> None:
    """Run commands on the hosts of a cluster."""


@command.command("run")
@cluster_argument
@click.option("--host", "chosen", multiple=True, metavar="NAME", help="Only on this host. May be repeated.")
@click.option("--timeout", type=SECONDS, default=3600.0, help="Give up a host after this time without output (3600 s).")
@json_option
@click.argument("program", nargs=-1, required=True, metavar="-- PROGRAM [ARG]...")
def run_command(name: str, chosen: tuple[str, ...], timeout: float, as_json: bool, program: tuple[str, ...]) -> int:
    """Run PROGRAM on all hosts of the cluster NAME at once.

    Lines begin with the host's name. The exit status is the highest of all hosts; 5 means that a host did not answer,
    127 that the program is missing. No shell reads the words: `-- sh -c '...'` starts one.
    """
    from contextlib import closing

    from orc.launchers.backends import open_backend
    from orc.launchers.backends.base import Backend
    from orc.launchers.hosts.commands import Script
    from orc.launchers.spec.clusters import get_cluster

    with closing(open_backend(get_cluster(name))) as backend:
        if type(backend).stores is Backend.stores:
            raise SpecError(
                f"clusters of kind {backend.kind} have no hosts that are reached from here",
                where=f"cluster {name}",
                hint="`orc exec` runs programs beside a running job.",
            )
        transports = {host: transport for host, (transport, _) in backend.stores().roots.items()}
        script = Script((f"exec {shlex.join(program)}",))
        return run_and_report(
            _select(transports, chosen, name), script, timeout, document={"cluster": name} if as_json else None
        )


def run_and_report(
    transports: Mapping[str, Transport],
    script: Script,
    silence_s: float,
    *,
    document: dict[str, Any] | None,
    noun: str = "host",
) -> int:
    """Run *script* on all hosts, show its output and return the highest exit status.

    Lines come with the host's name in front, problems go to stderr. With a *document* that is printed as JSON, the
    results in it below the plural of *noun*.
    """
    from orc.launchers.hosts.commands import run_on_hosts, worst_status

    lines: dict[str, list[str]] = {name: [] for name in transports}

    def show(name: str, line: str) -> None:
        if document is None:
            echo(f"{name}: {line}")
        else:
            lines[name].append(line)

    results = run_on_hosts(transports, script, show, silence_s=silence_s)
    if document is not None:
        rows = [
            {noun: name, "status": result.status, "problem": result.problem, "output": lines[name]}
            for name, result in results.items()
        ]
        output.echo_json({**document, f"{noun}s": rows})
        return worst_status(results)
    failed = {name: result for name, result in results.items() if result.status}
    for name, result in failed.items():
        echo(f"{name}: {result.problem or f'ended with status {result.status}'}", err=True)
    if failed:
        echo(f"failed on {len(failed)} of {len(results)} {noun}s", err=True)
    return worst_status(results)


def _select(transports: Mapping[str, Transport], chosen: tuple[str, ...], cluster: str) -> dict[str, Transport]:
    """Return the transports of the *chosen* hosts, or of all. Raises `SpecError` for a host that is none."""
    for name in chosen:
        if name not in transports:
            raise SpecError(
                f"cluster {cluster} has no host {name!r}", where="--host", hint=f"Its hosts: {', '.join(transports)}."
            )
    return {name: transport for name, transport in transports.items() if not chosen or name in chosen}
