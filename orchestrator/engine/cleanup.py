"""Cleanup: what attempts have left in the cloud, and the snapshots that no job of the ledger needs any more."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING

from orc.launchers.errors import LaunchError
from orc.orchestrator.ledger import groups, schedules
from orc.orchestrator.ledger.lifecycle import TERMINAL_ATTEMPT, TERMINAL_JOB

if TYPE_CHECKING:
    from orc.launchers.backends.base import Leftover, SupportsCleanup
    from orc.launchers.snapshot.gc import GcReport, GcRequest
    from orc.orchestrator.ledger.store import Ledger
    from orc.orchestrator.workspace import Workspace

OVER: Collection[str] = ("over", "idle")  # what nobody has wanted to keep


def sweepable_clusters(ws: Workspace) -> tuple[list[str], dict[str, LaunchError]]:
    """Return the clusters of clusters.yaml on which something can be left, and the errors of others. Contacts none."""
    from orc.launchers.backends.base import SupportsCleanup

    return ws.clusters_with(SupportsCleanup)


def leftovers(ws: Workspace, cluster: str) -> list[Leftover]:
    """Return the remains that no live job needs. Raises `LaunchError` for a cluster that leaves none or is silent."""
    live, over = attempts_on(ws.ledger, cluster)
    return _sweeping(ws, cluster).leftovers(live, over)


def sweep(ws: Workspace, cluster: str, found: Sequence[Leftover]) -> dict[str, LaunchError]:
    """Remove *found*, many at a time; why some could not be, by their ids. What a job needs by now is left alone."""
    from orc.launchers.remote.ssh.fanout import each

    backend = _sweeping(ws, cluster)
    live, _ = attempts_on(ws.ledger, cluster)
    results = each({one.native_id: one for one in found if one.marker not in live}, backend.sweep)
    return {name: error for name, error in results.items() if isinstance(error, LaunchError)}


def attempts_on(ledger: Ledger, cluster: str) -> tuple[frozenset[str], frozenset[str]]:
    """Return the markers of all attempts on *cluster*: of live ones, and of those that are over."""
    query = (
        "SELECT a.marker, a.state, j.state FROM attempts AS a JOIN jobs AS j ON j.id = a.job_id "
        "WHERE j.cluster = :cluster"
    )
    with ledger.database.read() as connection:
        rows = connection.tuples(query, {"cluster": cluster})
    over = frozenset(marker for marker, own, job in rows if own in TERMINAL_ATTEMPT or job in TERMINAL_JOB)
    return frozenset(marker for marker, _, _ in rows) - over, over


def _sweeping(ws: Workspace, cluster: str) -> SupportsCleanup:
    from orc.launchers.backends.base import SupportsCleanup

    backend = ws.backend(cluster)
    if not isinstance(backend, SupportsCleanup):
        raise LaunchError(f"on clusters of kind {backend.kind} jobs leave nothing that costs money", where=cluster)
    return backend


Place = tuple[str, str]  # a host, and the user for whose account there; "" for that of this process


@dataclass(frozen=True)
class SnapshotNeeds:
    """For `orc gc`."""

    digests: frozenset[str]  # snapshots of jobs that run or may run again
    ended: frozenset[str]  # jobs that will not change any more


def snapshot_needs(ledger: Ledger) -> SnapshotNeeds:
    """Return the needs of all jobs, on whatever cluster. Raises `LedgerError`."""
    with ledger.database.read() as connection:
        rows = connection.tuples("SELECT id, state, digests FROM jobs")
        waited_for = {one.on_job for one, _ in groups.dependencies_of(connection)}  # their outputs may still be taken
        scheduled = [schedule.digests for schedule in schedules.all_schedules(connection)]
    ended = frozenset(job for job, state, _ in rows if state in TERMINAL_JOB)
    needed = [json.loads(text) for job, _, text in rows if job not in ended] + scheduled
    digests = frozenset(digest for digests in needed for digest in digests.values())
    return SnapshotNeeds(digests, ended - waited_for)


def collect_at(ws: Workspace, cluster: str, request: GcRequest) -> dict[Place, GcReport | LaunchError]:
    """Collect what each account of *cluster* keeps there, with its own connection; one that fails stops no other.

    What a job of any account needs (`GcRequest.keep`) stays in all of them: they may share a root. Raises `LaunchError`
    where there is but one connection and it fails as a whole.
    """
    from orc.launchers.transfer.targets import collect_garbage

    users = ws.accounts(cluster)
    found: dict[Place, GcReport | LaunchError] = {}
    for user in users:
        try:
            with closing(ws.backend_of_user(cluster, user)) as backend:
                found |= {(host, user): result for host, result in collect_garbage(backend.stores(), request).items()}
        except LaunchError as error:
            if len(users) == 1:
                raise
            found[cluster, user] = error
    return found
