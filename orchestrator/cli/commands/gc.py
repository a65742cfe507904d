"""`orc gc`: remove snapshots, environments and working copies that no job needs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import click

from orc.launchers.errors import LaunchError
from orc.orchestrator.cli.options import AGE, cluster_option, json_option
from orc.orchestrator.cli.session import open_ledger
from orc.orchestrator.cli.ui import output
from orc.orchestrator.cli.ui.display import waiting
from orc.orchestrator.cli.ui.output import echo

if TYPE_CHECKING:
    from orc.launchers.snapshot.gc import GcReport
    from orc.orchestrator.engine.cleanup import Place


@click.command("gc")
@cluster_option
@click.option("--dry-run", is_flag=True, help="Show what would be removed; change nothing.")
@click.option(
    "--older-than",
    type=AGE,
    default="7d",
    show_default=True,
    metavar="AGE",
    help="Keep snapshots and environments used within this time; at least an hour.",
)
@click.option(
    "--work", is_flag=True, help="Remove the working copies of ended jobs too; not their checkpoints and logs."
)
@json_option
def command(cluster: str | None, dry_run: bool, older_than: float, work: bool, as_json: bool) -> int:
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
        output.echo_json({"dry_run": dry_run, "hosts": [_to_dict(place, result) for place, result in found.items()]})
    else:
        echo(_table(found, dry_run))
        for place, result in found.items():
            problems = [str(result)] if isinstance(result, LaunchError) else result.problems
            for problem in problems:
                echo(f"\n{_shown(place)}: {problem}")
    return int(any(isinstance(result, LaunchError) or result.problems for result in found.values()))


def _shown(place: Place) -> str:
    host, user = place
    return f"{host} ({user})" if user else host


def _to_dict(place: Place, result: GcReport | LaunchError) -> dict[str, Any]:
    host, user = place
    of_user = {"user": user} if user else {}
    if isinstance(result, Exception):
        return {"host": host, **of_user, "error": str(result)}
    told = result.to_dict()
    return {"host": host, **of_user, "error": None, **told, "bytes": told.pop("size")}


def _table(found: Mapping[Place, GcReport | LaunchError], dry_run: bool) -> str:
    rows = []
    for place, result in found.items():
        if isinstance(result, Exception):
            rows.append((_shown(place), *["-"] * 6))
            continue
        counts = (len(result.snapshots), result.contents, len(result.environments), len(result.work))
        rows.append((_shown(place), *map(str, counts), output.size(result.size), str(result.kept)))
    freed = "WOULD FREE" if dry_run else "FREED"
    return output.table(("HOST", "SNAPSHOTS", "CONTENTS", "ENVIRONMENTS", "WORK", freed, "KEPT"), rows)
