"""Housekeeping: once a day old jobs and what only they needed are removed from the ledger.

Any number of services may share one ledger: a lease in it lets one of them do it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING

from orc.orchestrator.ledger import audit, content_holders, leases
from orc.orchestrator.ledger.prune import PruneRule, prune

if TYPE_CHECKING:
    from orc.orchestrator.client import Client
    from orc.orchestrator.service.settings import Settings

_ROW = ("duties", {"name": "retention"})  # whose lease it is
_DUE = "(next_at IS NULL OR next_at <= :now OR done_at > :now)"  # a clock that was set back makes it due
EVERY_S = 86400.0
LEASE_S = 3600.0
LOOK_S = 60.0  # between two looks whether it is due
HOLDERS_S = 90 * 86400.0  # for which it is remembered who has had a content
_END_S = 5.0
UNANSWERED_S = 600.0  # after which nobody answers a request of which no service has said that it works on it

logger = logging.getLogger("orc.service")


def keep_house(client: Client, settings: Settings, changes: Collection[str] = ()) -> str | None:
    """Keep house where that is due and no other process does it; return a summary. Raises `LedgerError`.

    *changes* are the intents of the requests that this service works on.
    """
    ws = client.workspace
    ledger, now = ws.ledger, ws.clock()
    if ledger.volatile:
        return None
    with ledger.database.write() as connection:
        audit.keep_alive(connection, sorted(changes), now)
        audit.settle(connection, now - UNANSWERED_S)
        if not leases.take(connection, *_ROW, ws.owner, now, LEASE_S, _DUE):
            return None
    done = ""
    if settings.keep_jobs is not None:
        report = prune(ledger, PruneRule(now - settings.keep_jobs, settings.keep_failed))
        done = f"removed {report.jobs} jobs that ended long ago, with {report.events} events"
    with ledger.database.write() as connection:
        content_holders.forget(connection, now - HOLDERS_S)
        if settings.keep_audit is not None:
            audit.prune(connection, now - settings.keep_audit, now, user=ws.user)
        leases.give_back(connection, *_ROW, ws.owner, next_at=now + EVERY_S, done_at=now)
    return done


class Housekeeper:
    """Thread that keeps house, with a client of its own. A context manager; leaving it ends the thread."""

    def __init__(self, open_client: Callable[[], Client], settings: Settings, changes: Collection[str] = ()) -> None:
        self._open_client, self._settings, self._changes = open_client, settings, changes
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work, name="orc-housekeeping", daemon=True)

    def __enter__(self) -> Housekeeper:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(_END_S)  # what is under way is done in transactions: it may end with the process

    def _work(self) -> None:
        while not self._stop.is_set():
            try:
                with self._open_client() as client:
                    # A copy in memory, which there is while the disk is full, grows old: another client looks again.
                    while not self._stop.is_set() and not client.workspace.ledger.volatile:
                        if done := keep_house(client, self._settings, self._changes):
                            logger.info(done)
                        self._stop.wait(LOOK_S)
                self._stop.wait(LOOK_S)
            except Exception as error:  # noqa: BLE001 - its disk is full, its server away: it may be over at the next look
                logger.warning("housekeeping: %s", str(error) or type(error).__name__)
                self._stop.wait(LOOK_S)
