"""Format of an exported ledger, and the export: JSON lines, one for each row of the tables that make history.

The first line is the header, the last one counts the rows of each table, so that a file that was cut is recognised. In
between each line is ``[table, {column: value}]``; columns that hold JSON are kept as text, exactly as they are stored.
No secrets, no tokens or their hashes, no leases, claims and messages under way.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Any

from orc.orchestrator.ledger.database import HEAD, Connection
from orc.orchestrator.ledger.records import dump

if TYPE_CHECKING:
    from orc.orchestrator.ledger.store import Ledger


FORMAT = 1
BATCH = 1_000  # rows that are read, or written, at a time


@dataclass(frozen=True)
class ExportedTable:
    """Table of the file, with its columns and the key that gives the order of its rows."""

    name: str
    columns: tuple[str, ...]
    key: tuple[str, ...]
    job: str = ""  # the column that names the job that a row belongs to; empty for rows of no job


def _table(name: str, columns: str, key: str, job: str = "") -> ExportedTable:
    return ExportedTable(name, tuple(columns.split()), tuple(key.split()), job)


# Each after those that it refers to.
TABLES = (
    _table("groups", "id kind name owner created_at max_parallel spec", "id"),
    _table(
        "jobs",
        "id name cluster backend state reason attempt revision created_at updated_at ended_at next_attempt_at "
        "cancel_requested_at cancel_grace_s poll_error_at owner project priority group_id group_index not_before "
        "deadline_at source digests spec",
        "created_at id",
        "id",
    ),
    _table("job_tags", "job_id key value", "job_id key", "job_id"),
    _table(
        "attempts",
        "job_id number marker state cause reason plan_digest handle prepared_at submitted_at started_at ended_at "
        "first_negative_at cancel_sent_at restarts hosts progress exit sent_to",
        "job_id number",
        "job_id",
    ),
    _table("culprits", "job_id attempt host", "job_id attempt host", "job_id"),
    _table("reservations", "cluster host job_id attempt node slots at", "job_id attempt node", "job_id"),
    _table("sightings", "job_id at", "job_id", "job_id"),
    _table("dependencies", "job_id on_job condition", "job_id on_job", "job_id"),
    _table("events", "id job_id attempt at kind data", "id", "job_id"),
    _table(
        "schedules",
        "id name owner cron timezone enabled next_at last_at last_job spec digests source revision",
        "id",
    ),
    _table("quotas", "scope name resource amount", "scope name resource"),
    _table("audit", "id at username token_id address action subject data", "id"),
    _table("pruned_jobs", "job_id at", "job_id"),
)


def export(ledger: Ledger, file: IO[str]) -> dict[str, int]:
    """Write the ledger as it is at one moment into *file*; the number of rows of each table.

    Others write meanwhile. Memory does not grow with the ledger. Raises `LedgerError`, `OSError`.
    """
    counts = dict.fromkeys((table.name for table in TABLES), 0)
    _write(file, {"orc_ledger": FORMAT, "schema": HEAD, "exported_at": ledger.now()})
    with ledger.database.read() as connection:
        for table in TABLES:
            for row in _rows(connection, table):
                _write(file, [table.name, _without_secrets(dict(zip(table.columns, row, strict=True)))])
                counts[table.name] += 1
    _write(file, {"end": counts})
    return counts


def _write(file: IO[str], value: Any) -> None:
    file.write(json.dumps(value, separators=(",", ":"), ensure_ascii=False))
    file.write("\n")


def _without_secrets(row: dict[str, Any]) -> dict[str, Any]:
    """Return the row of a schedule with what no key opens in place of its sealed secrets; others as they are."""
    if "cron" not in row or '"sealed"' not in row["spec"]:
        return row
    spec = json.loads(row["spec"])
    return {**row, "spec": dump({**spec, "sealed": "-"} if "sealed" in spec else spec)}


def _rows(connection: Connection, table: ExportedTable) -> Iterator[tuple[Any, ...]]:
    """Yield all rows by the table's key, some of them in each query."""
    names = ", ".join(table.key)
    places = [table.columns.index(column) for column in table.key]
    marks = ", ".join(f":k{i}" for i in range(len(table.key)))
    last: tuple[Any, ...] | None = None
    while True:
        after = f"WHERE ({names}) > ({marks})" if last is not None else ""
        rows = connection.tuples(
            f"SELECT {', '.join(table.columns)} FROM {table.name} {after} "  # noqa: S608
            f"ORDER BY {names} LIMIT {BATCH}",
            {f"k{i}": last[place] for i, place in enumerate(places)} if last is not None else {},
        )
        yield from rows
        if len(rows) < BATCH:
            return
        last = rows[-1]
