"""Commands on the hosts of a cluster: `orc hosts`, `orc tpu-config`."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Mapping
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from orc.launchers.errors import BackendError, LaunchError, SpecError
from orc.orchestrator.cli.invocation import EITHER_SPELLING, SECONDS, cluster_argument, cluster_option_for, json_option
from orc.orchestrator.cli.ui import output
from orc.orchestrator.cli.ui.output import echo, echo_result

if TYPE_CHECKING:
    from orc.launchers.backends.base import Backend
    from orc.launchers.hosts.commands import Script
    from orc.launchers.remote.transport import Transport
    from orc.launchers.spec.clusters import Cluster


@click.group("hosts")
def hosts_command() -> None:
    """Run commands on the hosts of a cluster."""


@hosts_command.command("run")
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
    from orc.launchers.backends import open_backend
    from orc.launchers.backends.base import Backend
    from orc.launchers.hosts.commands import Script
    from orc.launchers.spec.clusters import get_cluster

    with closing(open_backend(get_cluster(name))) as backend:
        if type(backend).stores is Backend.stores:
            what = f"clusters of kind {backend.kind} have no hosts that are reached from here"
            raise SpecError(what, where=f"cluster {name}", hint="`orc exec` runs programs beside a running job.")
        transports = _transports(backend)
        if unknown := [host for host in chosen if host not in transports]:
            what = f"cluster {name} has no host {unknown[0]!r}"
            raise SpecError(what, where="--host", hint=f"Its hosts: {', '.join(transports)}.")
        wanted = {host: transport for host, transport in transports.items() if not chosen or host in chosen}
        script = Script((f"exec {shlex.join(program)}",))
        return run_and_report(wanted, script, timeout, document={"cluster": name} if as_json else None)


def _transports(backend: Backend) -> dict[str, Transport]:
    """Return the ways to the hosts of a cluster, by their names."""
    return {host: transport for host, (transport, _) in backend.stores().roots.items()}


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


PACKAGE = "orc-launch"
_WHEELS = "~/.cache/orc/wheels"  # on a worker


@click.command("tpu-config", context_settings=EITHER_SPELLING)
@cluster_option_for("Cluster of kind tpu. [default: the only one]")
@click.option("--tpu-name", metavar="NAME", help="Name of the TPU. [default: `name` of the cluster]")
@click.option("--tpu-zone", metavar="ZONE", help="Zone of the TPU. [default: the zones of the cluster]")
@click.option("--command", "commands", multiple=True, metavar="TEXT", help="A command to run. May be repeated.")
@click.option("--command-file", metavar="FILE", type=click.Path(), help="A file of commands to run.")
@click.option(
    "--config-file", metavar="FILE", type=click.Path(),
    help="Accelerate's configuration: tpu_name, tpu_zone, commands, command_file, tpu_use_sudo, tpu_env.",
)  # fmt: skip
@click.option(
    "--install-orc", "--install-accelerate", "install", is_flag=True, help=f"Install {PACKAGE} first, with pip."
)
@click.option(
    "--orc-version", "--accelerate-version", "version", metavar="VERSION", default="latest",
    help="Version of orc: latest (default), a version of the package index, or dev: a copy of the one here.",
)  # fmt: skip
@click.option("--use-sudo", is_flag=True, help="Run as root.")
@click.option(
    "--env", "variables", multiple=True, metavar="NAME=VALUE", help="Variable for the workers. May be repeated."
)
@click.option(
    "--worker", "workers", multiple=True, type=click.IntRange(0), help="Only on this worker. May be repeated."
)
@click.option(
    "--timeout", type=SECONDS, default=3600.0, help="Give up a worker after this time without output (3600 s)."
)
@click.option("--debug", is_flag=True, help="Print the commands; touch nothing.")
@json_option
def tpu_config_command(
    cluster: str | None,
    tpu_name: str | None,
    tpu_zone: str | None,
    commands: tuple[str, ...],
    command_file: str | None,
    config_file: str | None,
    install: bool,
    version: str,
    use_sudo: bool,
    variables: tuple[str, ...],
    workers: tuple[int, ...],
    timeout: float,
    debug: bool,
    as_json: bool,
) -> int:
    """Run commands on all workers of an existing TPU, to set it up.

    Commands of a file come first, then those of --command; each worker stops at the first that fails. Lines come with
    the worker's name in front. The exit status is the highest of all workers; 5 stands for one that did not answer.
    """
    from orc.launchers.accelerate.config_file import read_config
    from orc.launchers.backends import open_backend
    from orc.launchers.hosts.commands import Script
    from orc.launchers.local_build import wheel as local_wheel

    config = read_config(config_file).values if config_file else {}
    zone, name = tpu_zone or config.get("tpu_zone"), tpu_name or config.get("tpu_name")
    # What would be run, and where, can be told without a cluster when both are given.
    chosen = _cluster(cluster, zone, needed=not (debug and zone and name))
    name = name or (chosen.options.get("name") if chosen else None)
    if not name:
        raise click.UsageError("which TPU? Give --tpu-name, or `name` in the options of the cluster")
    given = commands or tuple(config.get("commands", ()))
    file = command_file or (None if commands else config.get("command_file"))
    python = (chosen.python if chosen else None) or "python3"
    wheel = local_wheel() if install and version == "dev" else None
    lines = [
        *([_install(python, version, wheel[0] if wheel else "")] if install else []),
        *(_commands_of(Path(file)) if file else []),
        *given,
    ]
    if not lines:
        raise click.UsageError("nothing to run: give --command, --command-file or --install-orc")
    env = {**_pairs(config.get("env", ())), **_pairs(variables)}
    script = Script(tuple(lines), env, use_sudo or bool(config.get("tpu_use_sudo")))
    if debug:
        _print_plan(chosen, zone, str(name), workers, script, as_json)
        return 0
    assert chosen is not None
    document = {"cluster": chosen.name, "tpu": name} if as_json else None
    chosen = chosen.model_copy(update={"options": {**chosen.options, "name": str(name)}})
    with closing(open_backend(chosen)) as backend:
        transports = _workers(backend, workers)
        if wheel:
            _copy(transports, *wheel)
        return run_and_report(transports, script, timeout, document=document, noun="worker")


def _copy(transports: Mapping[str, Transport], name: str, content: bytes) -> None:
    """Write the wheel *name* on all workers. Raises the `LaunchError` of the first that cannot have it."""
    from orc.launchers.remote.ssh.fanout import each

    def write(transport: Transport) -> None:
        transport.write(transport.expand(f"{_WHEELS}/{name}"), content)

    for worker, failed in each(transports, write).items():
        if isinstance(failed, LaunchError):
            raise failed.of(worker)


def _workers(backend: Backend, only: tuple[int, ...]) -> Mapping[str, Transport]:
    """Return the transports of all workers, or of those numbered in *only*. Raises `BackendError`."""
    found = _transports(backend)
    names = list(found)
    if missing := [number for number in only if number >= len(names)]:
        raise BackendError(f"there is no worker {missing[0]}; the TPU has {len(names)}", where=backend.cluster.name)
    return {names[number]: found[names[number]] for number in only} if only else found


def _cluster(name: str | None, zone: str | None, *, needed: bool) -> Cluster | None:
    """Return the cluster of kind tpu that is meant, which looks in *zone* alone if that is given.

    `None` where none is written down and none is *needed*.
    """
    from orc.launchers.backends import backend_class
    from orc.launchers.backends.base import SupportsProvisioning
    from orc.launchers.spec.clusters import get_cluster, read_clusters

    clusters, wrong = ({name: get_cluster(name)}, {}) if name is not None else read_clusters()
    if wrong:  # it may be the one that is meant
        raise next(iter(wrong.values()))
    found = {n: c for n, c in clusters.items() if issubclass(backend_class(c.kind), SupportsProvisioning)}
    if name is not None and not found:
        raise SpecError(f"{name} is of kind {clusters[name].kind}, not tpu", hint="`orc clusters` lists the clusters.")
    if not found and not needed:
        return None
    if not found:
        raise SpecError("there is no cluster of kind tpu", hint="Write one into clusters.yaml (project and zones).")
    if len(found) > 1:
        raise SpecError(f"several clusters are of kind tpu: {', '.join(found)}", hint="Give --cluster.")
    (cluster,) = found.values()
    return cluster if zone is None else cluster.model_copy(update={"options": {**cluster.options, "zones": [zone]}})


def _commands_of(file: Path) -> list[str]:
    try:
        text = file.expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no text"
        raise SpecError(f"the file cannot be read: {why}", where=str(file)) from None
    if not text.strip():
        raise SpecError("the file holds no commands", where=str(file))
    return [text.rstrip("\n")]  # as it is: a command may go over several lines


def _pairs(texts: Iterable[str]) -> dict[str, str]:
    found = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII):
            raise click.UsageError(f"{text!r} sets no variable; write NAME=VALUE")
        found[name] = value
    return found


def _install(python: str, version: str, wheel: str) -> str:
    if wheel:  # the shell knows the home directory
        return f"{shlex.join([python, '-m', 'pip', 'install', '--upgrade'])} {_WHEELS}/{shlex.quote(wheel)}"
    if version == "latest":
        wanted = ["--upgrade", PACKAGE]
    elif re.fullmatch(r"[0-9][A-Za-z0-9.!+_-]*", version, re.ASCII):
        wanted = [f"{PACKAGE}=={version}"]
    else:
        raise click.UsageError(f"{version!r} is no version; give latest, dev or one like 1.2.3")
    return shlex.join([python, "-m", "pip", "install", *wanted])


def _print_plan(
    cluster: Cluster | None, zone: str | None, name: str, workers: tuple[int, ...], script: Script, as_json: bool
) -> None:
    found = cluster.options.get("zones", []) if cluster else zone
    zones = [str(found)] if isinstance(found, str) else [str(one) for one in found or ()]
    argv = list(script.argv())
    where = {"cluster": cluster.name if cluster else None, "tpu": name, "zones": zones}
    which = f"worker {', '.join(map(str, workers))}" if workers else "all workers"
    whose = f" (cluster {cluster.name})" if cluster else ""
    head = f"# on {which} of the TPU {name} in {', '.join(zones)}{whose}:"
    echo_result(
        as_json,
        {**where, "workers": list(workers) or "all", "argv": argv, "script": script.text()},
        f"{head}\n{shlex.join(argv)} <<'EOF'\n{script.text()}\nEOF",
    )
