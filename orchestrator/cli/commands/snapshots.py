"""Commands about snapshots on clusters: `orc sync`, `orc gc`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from orc.launchers.errors import BundleError, LaunchError
from orc.orchestrator.cli.invocation import AGE, cluster_option, json_option, open_ledger, set_option
from orc.orchestrator.cli.ui import output
from orc.orchestrator.cli.ui.display import READING, waiting
from orc.orchestrator.cli.ui.output import echo

if TYPE_CHECKING:
    from orc.launchers.backends.base import Backend
    from orc.launchers.snapshot.gc import GcReport
    from orc.launchers.snapshot.manifest import Bundle
    from orc.launchers.spec import LoadedJob
    from orc.launchers.transfer.delivery import Comparison, SyncReport
    from orc.orchestrator.client import Client
    from orc.orchestrator.engine.cleanup import Place


_SHOWN = 20  # files of each kind


class Tree(NamedTuple):
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
def sync_command(
    job_file: str | None, cluster: str | None, overrides: tuple[str, ...], explain: bool, as_json: bool
) -> int:
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
        output.echo_json(_sync_dict(name, bundles, trees, reports))
    elif explain:
        echo(_explanation(trees, reports))
    else:
        echo(_sync_table(bundles, reports))
    for report in reports.values():
        if report.error is not None and not as_json:
            echo(f"\n{report.error}", err=True)
    return int(any(report.error for report in reports.values()))


def _bundles(client: Client, loaded: LoadedJob | None, backend: Backend, explain: bool) -> dict[str, Bundle]:
    """Return the trees that have to be there, by name; stored here unless they are only compared."""
    from orc.launchers.snapshot.runtime_tree import runtime_bundle
    from orc.orchestrator.engine.job_source import scan_job, take
    from orc.orchestrator.engine.steps import silent

    store = client.workspace.store
    if loaded is None:
        runtime = runtime_bundle(cache=store.scan_cache)
        return {"runtime": runtime.bundle if explain else store.ingest(runtime)}
    if explain:
        snapshot = scan_job(loaded, backend, store.scan_cache, client.workspace.state_dir)[0]
    else:
        snapshot = take(store, loaded, silent, backend)
    by_digest = {bundle.digest: bundle for bundle in snapshot.bundles}
    return {name: by_digest[digest] for name, digest in snapshot.digests.items()}


def _compared(client: Client, loaded: LoadedJob | None, bundles: Mapping[str, Bundle]) -> list[Tree]:
    """Each tree against the one of the last job that was made from the same file."""
    from orc.launchers.transfer.delivery import compare

    job, digests = _last(client, loaded)
    found = []
    for name, bundle in bundles.items():
        old = None
        with suppress(KeyError, BundleError):  # it had none, or it was collected since
            old = client.workspace.store.load(digests[name])
        found.append(Tree(name, bundle, job if old else "", compare(old, bundle)))
    return found


def _last(client: Client, loaded: LoadedJob | None) -> tuple[str, dict[str, str]]:
    """Return the newest job made from the same file (without a file: of all), and its snapshots."""
    import json

    source = str(loaded.source_path.absolute()) if loaded and loaded.source_path else None
    where, parameters = ("WHERE source = :source", {"source": source}) if source else ("", {})
    with client.workspace.ledger.database.read() as connection:
        query = f"SELECT id, digests FROM jobs {where} ORDER BY created_at DESC, id LIMIT 1"  # noqa: S608
        rows = connection.tuples(query, parameters)
    return (str(rows[0][0]), json.loads(rows[0][1])) if rows else ("", {})


def _sync_dict(
    cluster: str, bundles: Mapping[str, Bundle], trees: Sequence[Tree], reports: Mapping[str, SyncReport]
) -> dict[str, Any]:
    from orc.launchers.transfer.delivery import lacking

    compared = {tree.name: {"against": tree.against or None, **tree.comparison.to_dict()} for tree in trees}
    snapshots = [
        {"name": name, "digest": b.digest, "files": len(b.entries), "bytes": b.size, **compared.get(name, {})}
        for name, b in bundles.items()
    ]
    hosts = [report.to_dict() for report in reports.values()]
    if trees:
        for told, report in zip(hosts, reports.values(), strict=True):
            told["missing"] = {n: [entry.path for entry in lacking(b, report.missing)] for n, b in bundles.items()}
    return {"cluster": cluster, "explained": bool(trees), "snapshots": snapshots, "hosts": hosts}


def _sync_table(bundles: Mapping[str, Bundle], reports: Mapping[str, SyncReport]) -> str:
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
            for kind in ("new", "changed", "removed"):
                entries = getattr(compared, kind)
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


@click.command("gc")
@cluster_option
@click.option("--dry-run", is_flag=True, help="Show what would be removed; change nothing.")
@click.option(
    "--older-than", type=AGE, default="7d", show_default=True, metavar="AGE",
    help="Keep snapshots and environments used within this time; at least an hour.",
)  # fmt: skip
@click.option(
    "--work", is_flag=True, help="Remove the working copies of ended jobs too; not their checkpoints and logs."
)
@json_option
def gc_command(cluster: str | None, dry_run: bool, older_than: float, work: bool, as_json: bool) -> int:
    """Remove snapshots and environments that no job needs, from the state directory or (--cluster) from a cluster.

    Where users have accounts of their own there, each account's are removed with its connection. Kept is what jobs need
    that have not ended, and what was used lately. Of a job whose snapshot is removed, `orc resubmit` is no longer
    possible. Exit status 1 when a host could not be cleaned.
    """
    from orc.launchers.remote.transport import LocalTransport
    from orc.launchers.snapshot.gc import GcRequest
    from orc.launchers.transfer.targets import Targets, collect_garbage
    from orc.orchestrator.engine.cleanup import collect_at, snapshot_needs

    client = open_ledger()
    needed = snapshot_needs(client.workspace.ledger)
    request = GcRequest("", older_than, needed.digests, needed.ended, work, dry_run)
    with waiting(f"looking for what no job needs, {f'on {cluster}' if cluster else 'here'}"):
        if cluster is None:
            here = Targets({"here": (LocalTransport(), str(client.workspace.state_dir))}, {})
            found = {(host, ""): result for host, result in collect_garbage(here, request).items()}
        else:
            found = collect_at(client.workspace, cluster, request)
    if as_json:
        output.echo_json({"dry_run": dry_run, "hosts": [_gc_dict(place, result) for place, result in found.items()]})
        return int(any(_problems(result) for result in found.values()))
    freed = "WOULD FREE" if dry_run else "FREED"
    header = ("HOST", "SNAPSHOTS", "CONTENTS", "ENVIRONMENTS", "WORK", freed, "KEPT")
    echo(output.table(header, [_gc_row(place, result) for place, result in found.items()]))
    for place, result in found.items():
        for problem in _problems(result):
            echo(f"\n{_shown(place)}: {problem}")
    return int(any(_problems(result) for result in found.values()))


def _problems(result: GcReport | LaunchError) -> Sequence[str]:
    return [str(result)] if isinstance(result, LaunchError) else result.problems


def _shown(place: Place) -> str:
    host, user = place
    return f"{host} ({user})" if user else host


def _gc_dict(place: Place, result: GcReport | LaunchError) -> dict[str, Any]:
    host, user = place
    where = {"host": host, **({"user": user} if user else {})}
    if isinstance(result, LaunchError):
        return {**where, "error": str(result)}
    told = result.to_dict()
    return {**where, "error": None, **told, "bytes": told.pop("size")}


def _gc_row(place: Place, result: GcReport | LaunchError) -> tuple[str, ...]:
    if isinstance(result, LaunchError):
        return (_shown(place), *["-"] * 6)
    counts = (len(result.snapshots), result.contents, len(result.environments), len(result.work))
    return (_shown(place), *map(str, counts), output.size(result.size), str(result.kept))
