"""`orc gc`: remove snapshots, environments and working copies that no job needs."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from typing import TYPE_CHECKING, Any

import click

from orc.orchestrator.cli.options import AGE, cluster_option, json_option
from orc.orchestrator.cli.ui.output import echo

if TYPE_CHECKING:
    from orc.launchers.errors import LaunchError
    from orc.launchers.snapshot.gc import GcReport


@click.command("gc")
@cluster_option
@click.option("--dry-run", is_flag=True, help="Say what would be removed; change nothing.")
@click.option(
    "--older-than",
    type=AGE,
    default="7d",
    show_default=True,
    metavar="AGE",
    help="Keep what was used within this time; at least an hour.",
)
@click.option(
    "--work", is_flag=True, help="Remove the working copies of ended jobs too; not their checkpoints and logs."
)
@json_option
def command(cluster: str | None, dry_run: bool, older_than: float, work: bool, as_json: bool) -> int:
    """Remove snapshots and environments that no job needs, from the state directory or (--cluster) from a cluster.

    Kept is what jobs need that have not ended, and what was used lately. Of a job whose snapshot is removed,
    `orc resubmit` is no longer possible. Exit status 1 when a host could not be cleaned.
    """
    from orc.launchers.errors import LaunchError
    from orc.launchers.remote.transport import LocalTransport
    from orc.launchers.snapshot.gc import GcRequest
    from orc.launchers.transfer.targets import Targets, collect_garbage
    from orc.orchestrator.cli.session import open_ledger
    from orc.orchestrator.cli.ui import output
    from orc.orchestrator.engine.retention import snapshot_needs

    client = open_ledger()
    needed = snapshot_needs(client.workspace.ledger)
    request = GcRequest("", older_than, needed.digests, needed.ended, work, dry_run)
    if cluster is None:
        here = Targets({"here": (LocalTransport(), str(client.workspace.state_dir))}, {})
        found = collect_garbage(here, request)
    else:
        with closing(client.workspace.backend(cluster)) as backend:
            found = collect_garbage(backend.stores(), request)
    if as_json:
        output.echo_json({"dry_run": dry_run, "hosts": [_to_dict(host, result) for host, result in found.items()]})
    else:
        echo(_table(found, dry_run))
        for host, result in found.items():
            problems = [str(result)] if isinstance(result, LaunchError) else result.problems
            for problem in problems:
                echo(f"\n{host}: {problem}")
    return int(any(isinstance(result, LaunchError) or result.problems for result in found.values()))


def _to_dict(host: str, result: GcReport | LaunchError) -> dict[str, Any]:
    if isinstance(result, Exception):
        return {"host": host, "error": str(result)}
    told = result.to_dict()
    return {"host": host, "error": None, **told, "bytes": told.pop("size")}


def _table(found: Mapping[str, GcReport | LaunchError], dry_run: bool) -> str:
    from orc.orchestrator.cli.ui import output

    rows = []
    for host, result in found.items():
        if isinstance(result, Exception):
            rows.append((host, *["-"] * 6))
            continue
        counts = (len(result.snapshots), result.contents, len(result.environments), len(result.work))
        rows.append((host, *map(str, counts), output.size(result.size), str(result.kept)))
    freed = "WOULD FREE" if dry_run else "FREED"
    return output.table(("HOST", "SNAPSHOTS", "CONTENTS", "ENVIRONMENTS", "WORK", freed, "KEPT"), rows)
