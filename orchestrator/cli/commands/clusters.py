"""`orc clusters`: list, show, check, discover."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import click

from orc.launchers.errors import LaunchError
from orc.launchers.plugins import BACKENDS
from orc.orchestrator.cli.invocation import cluster_argument, json_option
from orc.orchestrator.cli.ui import output
from orc.orchestrator.cli.ui.display import waiting
from orc.orchestrator.cli.ui.output import echo, finding_text

if TYPE_CHECKING:
    from orc.launchers.backends.base import HostReport, SupportsDiscovery
    from orc.launchers.findings import Finding
    from orc.launchers.spec.clusters import Cluster


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
        return click.Command(cmd_name, params=params, callback=partial(_discover, found), help=discover.help)


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
def discover() -> None:
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
        output.warn(finding)
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
        what = f"there is a cluster {name} already, and it stays as it is"
        hint = "Give the new one another name with --name, or change the entry by hand."
        raise LaunchError(what, where=str(file), hint=hint)


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
            what = f"with the new entry the file could not be read any more: {error.what}"
            raise LaunchError(what, where=str(file), hint="Nothing was written; add the entry by hand.") from None
        if name not in known:
            raise LaunchError("the entry does not fit at the end of the file", where=str(file), hint="Add it by hand.")
        trial.replace(target)
    except OSError as error:
        raise LaunchError(f"the file cannot be written: {error.strerror}", where=str(file)) from None
    finally:
        trial.unlink(missing_ok=True)


@click.group("clusters", invoke_without_command=True)
@json_option
@click.pass_context
def clusters_command(context: click.Context, as_json: bool) -> None:
    """List, show, check and discover the clusters of clusters.yaml (and the built-in `local`)."""
    if context.invoked_subcommand is None:
        context.exit(_list(as_json))
    elif as_json:  # `orc clusters --json check lab` means the same as `orc clusters check lab --json`
        context.default_map = {name: {"as_json": True} for name in clusters_command.commands}


clusters_command.add_command(discover)


@clusters_command.command("list")
@json_option
def list_command(as_json: bool) -> int:
    """List the clusters; entries that are wrong are shown with their errors, and the exit status is 1."""
    return _list(as_json)


def _list(as_json: bool) -> int:
    from orc.launchers.paths import clusters_file
    from orc.launchers.spec.clusters import read_clusters

    clusters, wrong = read_clusters()
    found = [_settings(cluster) for name, cluster in clusters.items() if name not in wrong]
    if as_json:
        errors = {name: str(error) for name, error in wrong.items()}
        output.echo_json({"file": str(clusters_file()), "clusters": found, "errors": errors})
    else:
        echo(output.table(("CLUSTER", "KIND", "ROOT"), [(c["name"], c["kind"], c["root"] or "?") for c in found]))
        for name, error in wrong.items():
            echo(output.block({"what": f"{name}: {error.what}", "where": error.where, "do": error.hint}), err=True)
        echo(f"\nclusters file: {clusters_file()}{'' if clusters_file().exists() else ' (does not exist)'}")
    return int(bool(wrong))


def _settings(cluster: Cluster) -> dict[str, Any]:
    """Return the cluster as JSON with the root that it has by default; `None` where its options are wrong."""
    from orc.launchers.backends import open_backend

    settings: dict[str, Any] = cluster.model_dump(mode="json")
    try:
        return {**settings, "root": open_backend(cluster).root}
    except LaunchError:  # `orc clusters check` says what is wrong
        return settings


@clusters_command.command("show")
@cluster_argument
@json_option
def show_command(name: str, as_json: bool) -> None:
    """Show the settings of one cluster."""
    from orc.launchers.spec.clusters import get_cluster

    output.document(_settings(get_cluster(name)), "json" if as_json else "yaml")


@clusters_command.command("check")
@cluster_argument
@json_option
def check_command(name: str, as_json: bool) -> int:
    """Check that a cluster can take a job: programs, reachability, disk. Changes nothing."""
    from orc.launchers.backends import open_backend
    from orc.launchers.backends.base import SupportsHostSurvey
    from orc.launchers.spec.clusters import get_cluster

    backend = open_backend(get_cluster(name))
    with waiting(f"asking {name}"):
        hosts = backend.survey() if isinstance(backend, SupportsHostSurvey) else None
        findings = check(name) if hosts is None else [finding for host in hosts for finding in host.findings]
    if as_json:
        told = {"cluster": name, "findings": [finding_dict(finding) for finding in findings]}
        output.echo_json(told if hosts is None else {**told, "hosts": [_host_dict(host) for host in hosts]})
    else:
        if hosts is not None:
            echo(_host_table(hosts, _holders(name)) + ("\n" if findings else ""))
        echo(findings_text(findings) or f"{name}: nothing to complain about")
    return int(any(finding.level == "error" for finding in findings))


def _holders(cluster: str) -> dict[str, list[str]]:
    """Return the jobs that hold slots of each host, as the ledger has it."""
    from orc.orchestrator.client import Client

    held: dict[str, list[str]] = {}
    with Client() as client:
        for kept in client.workspace.ledger.reservations(cluster):
            held.setdefault(kept.host, []).append(f"{kept.job} ({kept.slots})")
    return held


def _host_dict(host: HostReport) -> dict[str, Any]:
    labels, findings = list(host.labels), [finding_dict(finding) for finding in host.findings]
    return {**asdict(host), "labels": labels, "findings": findings}


def _host_table(hosts: Sequence[HostReport], holders: Mapping[str, Sequence[str]]) -> str:
    header = ("HOST", "REACHED", "USER", "PYTHON", "TORCH", "CPUS", "GPUS", "FREE DISK", "SLOTS", "LABELS", "HELD BY")
    rows = []
    for host in hosts:
        told = [*output.cells(host, "user python torch cpus gpus"), output.size(host.free_bytes)]
        held = ", ".join(holders.get(host.name, ())) or "-"
        reached, slots = "yes" if host.reached else "no", str(host.slots or "1 job")
        about = told if host.python else ["-"] * 6
        rows.append((host.name, reached, *about, slots, ", ".join(host.labels) or "-", held))
    return output.table(header, rows)


def check(name: str) -> list[Finding]:
    """Render a small job for the cluster and let its backend check the plan. Raises `LaunchError`."""
    from orc.launchers.backends import open_backend
    from orc.launchers.backends.base import Snapshot
    from orc.launchers.ids import AttemptId
    from orc.launchers.snapshot.runtime_tree import runtime_bundle
    from orc.launchers.spec import JobSpec
    from orc.launchers.spec.clusters import get_cluster

    backend = open_backend(get_cluster(name))
    # No launcher is named: the cluster may have one of its own, as SageMaker's data parallelism has.
    spec = JobSpec.model_validate({"name": "check", "module": "this", "cluster": name})
    runtime = runtime_bundle().bundle
    found = backend.preflight(backend.render(spec, Snapshot(runtime, runtime), AttemptId("check-000000", 1)))
    if not any(finding.unreachable for finding in found):
        found = [*backend.check(), *found]
    return found


def finding_dict(finding: Finding) -> dict[str, str]:
    """Return a finding as JSON: level, what, where, do."""
    return {"level": finding.level, "what": finding.what, "where": finding.where, "do": finding.hint}


def findings_text(findings: list[Finding]) -> str:
    """Findings as blocks."""
    return "\n".join(map(finding_text, findings))
