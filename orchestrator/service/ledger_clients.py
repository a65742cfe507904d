"""Clients of the ledger for requests: a bounded number, each used by one at a time; the writing of the audit log."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future

from orc.orchestrator.client import Client
from orc.orchestrator.engine.passes import stamp
from orc.orchestrator.insight.metrics import MeasuredJobs
from orc.orchestrator.ledger.database import Connection, LedgerError
from orc.orchestrator.service.request_limits import LOOK_S


class LedgerClients:
    """Pool of clients. What a request opens (backends, connections to hosts) the next one uses again.

    A client opened before clusters.yaml was changed is closed, so that every request sees the file as it is.
    """

    def __init__(self, open_client: Callable[[], Client], limit: int) -> None:
        self._open = open_client
        self._measured = MeasuredJobs(LOOK_S)  # one for all: what one request has read the next one has
        self._free: queue.LifoQueue[tuple[Client, object] | None] = queue.LifoQueue()
        for _ in range(limit):
            self._free.put(None)

    @contextlib.contextmanager
    def client(self, *, writes: bool = False) -> Iterator[Client]:
        """Lend a client; waits while all are in use. Call it in a thread, never in the event loop.

        Args:
            writes: The ledger will be changed.

        Raises:
            LedgerError: The ledger cannot be opened, or, with *writes*, not be changed.
        """
        kept = self._free.get()
        try:
            if kept is not None and kept[1] != stamp(kept[0].session.clusters_file):
                kept[0].close()
                kept = None
            if kept is None:
                client = self._open()
                client.session.serves = True
                client.session.measured = self._measured
                kept = (client, stamp(client.session.clusters_file))
            ledger = kept[0].workspace.ledger
            if writes and ledger.volatile:
                raise LedgerError(f"the ledger can only be read: {ledger.volatile}", hint="free some space")
            yield kept[0]
        finally:
            # A copy in memory grows old: the next request tries the ledger itself.
            if kept is not None and kept[0].workspace.ledger.volatile:
                kept[0].close()
                kept = None
            self._free.put(kept)

    def close(self) -> None:
        """Close the clients that no request uses; a later request opens another."""
        idle = []
        with contextlib.suppress(queue.Empty):
            while True:
                idle.append(self._free.get_nowait())
        for kept in idle:
            if kept is not None:
                kept[0].close()
            self._free.put(None)


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
