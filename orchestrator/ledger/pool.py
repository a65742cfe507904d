"""Pool of ledgers for a process of many threads."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from orc.orchestrator.ledger.database import Database
from orc.orchestrator.ledger.errors import LedgerError
from orc.orchestrator.ledger.opening import open_database
from orc.orchestrator.ledger.store import Ledger


class LedgerPool:
    """Ledgers that are open already, for the threads of a service; thread-safe.

    ``with pool.ledger() as ledger:`` lends one; nobody else has it meanwhile. Arguments are those of
    `open_database`, which is called again only when all open ones are lent.
    """

    def __init__(self, state_dir: Path, url: str | None = None, clock: Callable[[], float] = time.time) -> None:
        self._state_dir, self._url, self._clock = state_dir, url, clock
        self._lock = threading.Lock()
        self._free: list[Database] = [open_database(state_dir, url)]
        self._closed = False

    @contextmanager
    def ledger(self) -> Iterator[Ledger]:
        """Lend a ledger. Raises `LedgerError`, as does its use."""
        with self._lock:
            if self._closed:
                raise LedgerError("the ledger was closed: the service is ending")
            database = self._free.pop() if self._free else None
        if database is None:
            database = open_database(self._state_dir, self._url)
        try:
            yield Ledger(database, self._clock)
        finally:
            with self._lock:
                keep = not self._closed
                if keep:
                    self._free.append(database)
            if not keep:
                database.close()

    def close(self) -> None:
        """Close the ledgers; those that are lent, as soon as they come back."""
        with self._lock:
            self._closed = True
            free, self._free = self._free, []
        for database in free:
            database.close()
