"""`orc sync`: bring a job's snapshot to a cluster before it is submitted, or show what would be sent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

from orc.launchers.errors import BundleError
from orc.orchestrator.cli.options import cluster_option, json_option, set_option
from orc.orchestrator.cli.session import open_ledger
from orc.orchestrator.cli.ui import output
from orc.orchestrator.cli.ui.display import READING, waiting
from orc.orchestrator.cli.ui.output import echo

if TYPE_CHECKING:
    from orc.launchers.backends.base import Backend, Snapshot
    from orc.launchers.snapshot.manifest import Bundle
    from orc.launchers.spec import LoadedJob
    from orc.launchers.transfer.delivery import Comparison, SyncReport
    from orc.orchestrator.client import Client

_SHOWN = 20  # files of each kind


@dataclass(frozen=True)
class Tree:
    """A snapshot of those that belong to the job."""

    name: str  # code, runtime, environment
    bundle: Bundle
    against: str  # the job whose snapshot it is compared with; empty when there is none
    comparison: Comparison


@click.command("sync")
@click.argument("job_file", metavar="[JOB.yaml]", type=click.Path(), required=False)
@cluster_option
@set_option
@click.option("--explain", is_flag=True, help="Show what would be sent, and why; change nothing on the cluster.")
@json_option
def command(job_file: str | None, cluster: str | None, overrides: tuple[str, ...], explain: bool, as_json: bool) -> int:
    """Bring the snapshots of the job in JOB.yaml to its cluster; without a job, orc's own runtime.

    `orc submit` does this by itself. Exit status 1 if a host could not be served; the others are.
    """
    from orc.launchers.transfer.delivery import sync
    from orc.orchestrator.engine.job_source import load_checked

    if job_file is None and cluster is None:
        raise click.UsageError("name a job file, or a cluster with --cluster", click.get_current_context())
    if job_file is None and overrides:
        raise click.UsageError("--set needs a job file", click.get_current_context())
    loaded = load_checked(job_file, overrides, cluster=cluster) if job_file is not None else None
    client = open_ledger()
    name = loaded.spec.cluster if loaded else str(cluster)
    with closing(client.workspace.backend_of_user(name, client.workspace.user)) as backend:
        with waiting(READING):
            targets = backend.stores()
            bundles = _bundles(client, loaded, backend, explain)
            trees = _compared(client, loaded, bundles) if explain else []
        with waiting(f"asking {name} what it has" if explain else f"uploading to {name}"):
            reports = sync(
                bundles.values(),
                client.workspace.store,
                targets.roots,
                shared=targets.shared,
                pythons=targets.pythons,
                dry_run=explain,
            )
    if as_json:
        output.echo_json(_to_dict(name, bundles, trees, reports))
    elif explain:
        echo(_explanation(trees, reports))
    else:
        echo(_table(bundles, reports))
    for report in reports.values():
        if report.error is not None and not as_json:
            echo(f"\n{report.error}", err=True)
    return int(any(report.error for report in reports.values()))


def _bundles(client: Client, loaded: LoadedJob | None, backend: Backend, explain: bool) -> dict[str, Bundle]:
    """Return the trees that have to be there, by name; stored here unless they are only compared."""
    from orc.launchers.snapshot.runtime_tree import runtime_bundle
    from orc.orchestrator.engine.job_source import scan_job, take

    store = client.workspace.store
    if loaded is None:
        runtime = runtime_bundle(cache=store.scan_cache)
        return {"runtime": runtime.bundle if explain else store.ingest(runtime)}
    if not explain:
        return _named(take(store, loaded, lambda *_: None, backend))
    return _named(scan_job(loaded, backend, store.scan_cache, client.workspace.state_dir)[0])


def _named(snapshot: Snapshot) -> dict[str, Bundle]:
    by_digest = {bundle.digest: bundle for bundle in snapshot.bundles}
    return {name: by_digest[digest] for name, digest in snapshot.digests.items()}


def _compared(client: Client, loaded: LoadedJob | None, bundles: Mapping[str, Bundle]) -> list[Tree]:
    """Each tree against the one of the last job that was made from the same file."""
    from orc.launchers.transfer.delivery import compare

    job, digests = _last(client, loaded)
    found = []
    for name, bundle in bundles.items():
        old = None
        if name in digests:
            try:
                old = client.workspace.store.load(digests[name])
            except BundleError:  # collected since
                old = None
        found.append(Tree(name, bundle, job if old else "", compare(old, bundle)))
    return found


def _last(client: Client, loaded: LoadedJob | None) -> tuple[str, dict[str, str]]:
    """Return the newest job made from the same file (without a file: of all), and its snapshots."""
    import json

    source = str(loaded.source_path.absolute()) if loaded and loaded.source_path else None
    where, parameters = ("WHERE source = :source", {"source": source}) if source else ("", {})
    with client.workspace.ledger.database.read() as connection:
        rows = connection.tuples(
            f"SELECT id, digests FROM jobs {where} ORDER BY created_at DESC, id LIMIT 1",  # noqa: S608
            parameters,
        )
    return (str(rows[0][0]), json.loads(rows[0][1])) if rows else ("", {})


# --- as text and as JSON ----------------------------------------------------------------------------------------------


def _to_dict(
    cluster: str, bundles: Mapping[str, Bundle], trees: Sequence[Tree], reports: Mapping[str, SyncReport]
) -> dict[str, Any]:
    from orc.launchers.transfer.delivery import lacking

    compared = {tree.name: {"against": tree.against or None, **tree.comparison.to_dict()} for tree in trees}
    snapshots = [
        {"name": name, "digest": b.digest, "files": len(b.entries), "bytes": b.size, **compared.get(name, {})}
        for name, b in bundles.items()
    ]
    hosts = []
    for report in reports.values():
        told = report.to_dict()
        if trees:
            told["missing"] = {
                name: [entry.path for entry in lacking(bundle, report.missing)] for name, bundle in bundles.items()
            }
        hosts.append(told)
    return {"cluster": cluster, "explained": bool(trees), "snapshots": snapshots, "hosts": hosts}


def _table(bundles: Mapping[str, Bundle], reports: Mapping[str, SyncReport]) -> str:
    rows = []
    for report in reports.values():
        what = "failed" if report.error else ", ".join(_names(bundles, report.new)) or "up to date"
        size = output.size(report.size) if report.contents else "-"
        rows.append((report.host, what, size, report.source or "-", output.duration(report.seconds)))
    return output.table(("HOST", "SYNCED", "SIZE", "FROM", "TOOK"), rows)


def _names(bundles: Mapping[str, Bundle], digests: Sequence[str]) -> list[str]:
    return [name for name, bundle in bundles.items() if bundle.digest in digests]


def _explanation(trees: Sequence[Tree], reports: Mapping[str, SyncReport]) -> str:
    lines = []
    for tree in trees:
        files, size = len(tree.bundle.entries), output.size(tree.bundle.size)
        counted = f"{files} file{'' if files == 1 else 's'}"
        lines.append(f"{output.style(tree.name, bold=True)} {tree.bundle.digest[:12]}: {counted}, {size}")
        compared = tree.comparison
        if tree.against:
            counts = f"{len(compared.new)} new, {len(compared.changed)} changed, {len(compared.removed)} removed"
            lines.append(f"  against {tree.against}: {counts}, {compared.unchanged} unchanged")
            for kind, entries in (("new", compared.new), ("changed", compared.changed), ("removed", compared.removed)):
                lines += [f"    {kind:8} {entry.path}  {output.size(entry.size)}" for entry in entries[:_SHOWN]]
                if len(entries) > _SHOWN:
                    lines.append(f"    {kind:8} ... and {len(entries) - _SHOWN} more")
        else:
            lines.append("  there is no earlier job of this file to compare with")
    rows = []
    bundles = {tree.name: tree.bundle for tree in trees}
    for report in reports.values():
        names = _names(bundles, report.new)
        if report.error:
            why = report.error.what
        elif not names:
            why = "it has all of it"
        elif report.contents:
            why = f"it does not have {' and '.join(names)}"
        else:
            why = f"it has all contents of {' and '.join(names)}, from other snapshots"
        rows.append((report.host, str(report.contents), output.size(report.size), why))
    return "\n".join([*lines, "", output.table(("HOST", "CONTENTS TO SEND", "SIZE", "WHY"), rows)])
