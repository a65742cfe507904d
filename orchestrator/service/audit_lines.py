"""Writing of the audit log by the threads of a service: few transactions for many lines."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future

from orc.orchestrator.ledger.database import Connection
from orc.orchestrator.service.ledger_clients import LedgerClients

_Change = Callable[[Connection], None]


class Lines:
    """Writing of the audit log. What comes while something is written goes with what comes next, in one transaction."""

    def __init__(self, clients: LedgerClients) -> None:
        self._clients, self._turn = clients, threading.Lock()
        self._waiting = deque[tuple[_Change, Future[None]]]()

    def write(self, change: _Change) -> None:
        """Return once *change* is durable. Raises `LaunchError`. Call it in a thread, never in the event loop."""
        done = Future[None]()
        self._waiting.append((change, done))
        with self._turn:
            if not done.done():
                self._commit([self._waiting.popleft() for _ in range(len(self._waiting))])
        done.result()

    def _commit(self, together: Sequence[tuple[_Change, Future[None]]]) -> None:
        try:
            with self._clients.client() as client, client.workspace.ledger.database.write() as connection:
                for change, _ in together:
                    change(connection)
        except Exception as error:  # noqa: BLE001 - who waits for it raises it
            if len(together) == 1:
                together[0][1].set_exception(error)
            else:
                for alone in together:  # what cannot be written keeps nothing else from it
                    self._commit([alone])
        else:
            for _, done in together:
                done.set_result(None)
