"""Pruning of jobs that ended long ago: with their attempts, events and tags, some of them in each transaction."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from orc.orchestrator.ledger.database import Connection, batches, insert, one_of
from orc.orchestrator.ledger.lifecycle import TERMINAL_JOB

if TYPE_CHECKING:
    from orc.orchestrator.ledger.store import Ledger

BATCH = 500  # jobs of one transaction at most, and
EVENTS = 2000  # of them, unless a single job has more: others wait for it
_ENDED = ", ".join(f"'{state}'" for state in sorted(TERMINAL_JOB))
# In the order in which nothing refers to what is gone.
_OF_JOBS = (
    *("reservations", "culprits", "attempts", "job_tags", "sightings", "sealed_secrets", "notifications"),
    *("dependencies", "late_copies", "events"),
)
_UNNEEDED = (
    "NOT EXISTS (SELECT 1 FROM dependencies d JOIN jobs l ON l.id = d.job_id "  # noqa: S608
    f"WHERE d.on_job = j.id AND l.state NOT IN ({_ENDED}))",
    "NOT EXISTS (SELECT 1 FROM groups g JOIN jobs l ON l.group_id = g.id "  # noqa: S608
    f"WHERE g.id = j.group_id AND g.kind <> 'schedule' AND l.state NOT IN ({_ENDED}))",
    "NOT EXISTS (SELECT 1 FROM notifications n WHERE n.job_id = j.id AND n.state = 'due')",
    "j.id <> COALESCE((SELECT job_id FROM events ORDER BY id DESC LIMIT 1), '')",
)


@dataclass(frozen=True)
class PruneRule:
    """Jobs to remove: those that had ended before *ended_before*, seconds since the epoch."""

    ended_before: float
    keep_failed: bool = False
    cluster: str | None = None


@dataclass(frozen=True)
class PruneReport:
    """Result of pruning."""

    jobs: int
    events: int
    groups: int = 0


def prunable(connection: Connection, rule: PruneRule, limit: int | None = None) -> list[str]:
    """Return the ids of the jobs that *rule* removes, oldest first, *limit* at most.

    Never one that is live, that a live job depends on, whose sweep, array or pipeline has live jobs, or about which
    a notification has still to be sent. The job of the newest event stays, too: SQLite would give its id again.
    """
    states = ", ".join(f"'{state}'" for state in sorted(TERMINAL_JOB) if not (rule.keep_failed and state == "FAILED"))
    parameters: dict[str, object] = {"before": rule.ended_before}
    # A job that has ended before was made before, which an index knows.
    parts = [f"j.state IN ({states}) AND j.created_at < :before AND COALESCE(j.ended_at, j.updated_at) < :before"]
    if rule.cluster is not None:
        parts.append("j.cluster = :cluster")
        parameters["cluster"] = rule.cluster
    bound = "" if limit is None else f" LIMIT {int(limit)}"
    rows = connection.tuples(
        f"SELECT j.id FROM jobs j WHERE {' AND '.join([*parts, *_UNNEEDED])} ORDER BY j.created_at, j.id{bound}",  # noqa: S608
        parameters,
    )
    return [row[0] for row in rows]


def prune(ledger: Ledger, rule: PruneRule) -> PruneReport:
    """Remove the jobs of *rule*, and groups that are empty then. Raises `LedgerError` in the middle of it at worst.

    Only what the ledger knows is removed: logs, checkpoints and snapshots are not touched. The ids stay known
    (`was_pruned`), so that `orc adopt` brings none of the jobs back.
    """
    jobs = events = 0
    for batch_jobs, batch_events in _batches(ledger, rule):
        jobs, events = jobs + batch_jobs, events + batch_events
    with ledger.transaction() as tx:
        groups = tx.connection.execute(
            "DELETE FROM groups WHERE created_at < :before AND kind <> 'schedule' "
            "AND NOT EXISTS (SELECT 1 FROM jobs WHERE group_id = groups.id)",
            {"before": rule.ended_before},
        )
    return PruneReport(jobs, events, groups)


def would_prune(ledger: Ledger, rule: PruneRule) -> PruneReport:
    """Return the report of a `prune` without changing anything."""
    with ledger.database.read() as connection:
        ids = prunable(connection, rule)
        events = 0
        for some in batches(ids):
            these, parameters = one_of("job_id", some)
            events += connection.tuples(f"SELECT count(*) FROM events WHERE {these}", parameters)[0][0]  # noqa: S608
    return PruneReport(len(ids), events)


def was_pruned(connection: Connection, job_ids: list[str]) -> set[str]:
    """Return those of *job_ids* that were removed by `prune`."""
    found: set[str] = set()
    for some in batches(job_ids):
        these, parameters = one_of("job_id", some)
        found |= {row[0] for row in connection.tuples(f"SELECT job_id FROM pruned_jobs WHERE {these}", parameters)}  # noqa: S608
    return found


def _batches(ledger: Ledger, rule: PruneRule) -> Iterator[tuple[int, int]]:
    """Remove one batch after the other; yield the numbers of its jobs and events."""
    while True:
        with ledger.transaction() as tx:
            found = prunable(tx.connection, rule, BATCH)
            ids = _few_enough(tx.connection, found)
            events = _remove(tx.connection, ids, tx.now) if ids else 0
        yield len(ids), events
        if len(found) < BATCH and len(ids) == len(found):
            return


def _few_enough(connection: Connection, ids: list[str]) -> list[str]:
    """Return the first of *ids*, one at least, that have no more than `EVENTS` events together."""
    these, parameters = one_of("job_id", ids)
    query = f"SELECT job_id, count(*) FROM events WHERE {these} GROUP BY job_id"  # noqa: S608
    counts = dict(connection.tuples(query, parameters))
    sums = itertools.accumulate(counts.get(job_id, 0) for job_id in ids)
    return [
        job_id for number, (job_id, so_far) in enumerate(zip(ids, sums, strict=True)) if not number or so_far <= EVENTS
    ]


def _remove(connection: Connection, ids: list[str], now: float) -> int:
    """Remove these jobs from the ledger; return the number of their events."""
    # From here on, and only of these jobs, events can be deleted.
    gone = [{"job_id": job_id, "at": now} for job_id in ids]
    insert(connection, "pruned_jobs", *gone, conflict="ON CONFLICT (job_id) DO NOTHING")
    removed = {}
    for table, column in (("dependencies", "on_job"), *((table, "job_id") for table in _OF_JOBS), ("jobs", "id")):
        these, parameters = one_of(column, ids)
        removed[table] = connection.execute(f"DELETE FROM {table} WHERE {these}", parameters)  # noqa: S608
    return removed["events"]
