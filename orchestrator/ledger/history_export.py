"""Export of the ledger into a file that any other ledger can import."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import IO, TYPE_CHECKING, Any

from orc.orchestrator.ledger.database import Connection
from orc.orchestrator.ledger.history_format import BATCH, FORMAT, TABLES, ExportedTable
from orc.orchestrator.ledger.records import dump
from orc.orchestrator.ledger.version import HEAD

if TYPE_CHECKING:
    from orc.orchestrator.ledger.store import Ledger


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
