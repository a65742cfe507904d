"""A database of which each transaction and each statement is counted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from orc.orchestrator.ledger.database import Connection, Database
from orc.orchestrator.ledger.store import Ledger


class CountedDatabase:
    """The database, with what is done in it in *counted*: ``transactions`` and ``statements``."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self.counted = Counter[str]()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._database, name)

    @contextmanager
    def read(self) -> Iterator[Connection]:
        self.counted["transactions"] += 1
        with self._database.read() as connection:
            yield _CountedConnection(connection, self.counted)  # type: ignore[misc]

    @contextmanager
    def write(self) -> Iterator[Connection]:
        self.counted["transactions"] += 1
        with self._database.write() as connection:
            yield _CountedConnection(connection, self.counted)  # type: ignore[misc]


class _CountedConnection:
    def __init__(self, connection: Connection, counted: Counter[str]) -> None:
        self._connection, self._counted = connection, counted

    def __getattr__(self, name: str) -> Any:
        self._counted["statements"] += 1
        return getattr(self._connection, name)


@contextmanager
def counting(ledger: Ledger) -> Iterator[Counter[str]]:
    """Count what is done with *ledger* in this context."""
    plain = ledger.database
    counted = CountedDatabase(plain)
    ledger.database = counted  # type: ignore[assignment]
    try:
        yield counted.counted
    finally:
        ledger.database = plain
