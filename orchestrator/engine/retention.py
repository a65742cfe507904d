"""Retention: the snapshots that the ledger's jobs still need, and the removal of others at a cluster."""

from __future__ import annotations

import json
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING

from orc.orchestrator.ledger import dependencies, schedules
from orc.orchestrator.ledger.lifecycle import TERMINAL_JOB

if TYPE_CHECKING:
    from orc.launchers.errors import LaunchError
    from orc.launchers.snapshot.gc import GcReport, GcRequest
    from orc.orchestrator.ledger.store import Ledger
    from orc.orchestrator.workspace import Workspace

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
        waited_for = {one.on_job for one, _ in dependencies.of_jobs(connection)}  # their outputs may still be taken
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
    from orc.launchers.errors import LaunchError
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
