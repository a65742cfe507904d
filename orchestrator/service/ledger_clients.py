"""Clients of the ledger for requests: a bounded number of them, each used by one request at a time."""

from __future__ import annotations

import contextlib
import queue
from collections.abc import Callable, Iterator

from orc.orchestrator.client import Client
from orc.orchestrator.engine.passes import stamp
from orc.orchestrator.insight.curves import MeasuredJobs
from orc.orchestrator.ledger.database import LedgerError
from orc.orchestrator.service.slow_reads import LOOK_S


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
