"""Deliverer: a thread that delivers what is due, so that no pass and no request ever waits for a target."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from orc.launchers.errors import LaunchError
from orc.orchestrator.ledger import outbox
from orc.orchestrator.notifications.delivery import deliver_due
from orc.orchestrator.notifications.targets import Policy

if TYPE_CHECKING:
    from orc.orchestrator.ledger.store import Ledger

LOOK_S = 2.0  # between two looks into the outbox
TROUBLE_S = 30.0  # ... while the ledger cannot be used


class Deliverer:
    """Thread that delivers, with a ledger of its own. Used as a context manager; leaving it ends the thread.

    A delivery that is under way when the context is left goes on for its time-out at most; should the process end
    meanwhile, another process delivers it again.
    """

    def __init__(
        self,
        open_ledger: Callable[[], Ledger],
        *,
        policy: Policy = Policy(),  # noqa: B008 - frozen
        report_line: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._open_ledger = open_ledger
        self._policy = policy
        self._report_line = report_line
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work, name="orc-notifications", daemon=True)

    def __enter__(self) -> Deliverer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(LOOK_S)

    def _work(self) -> None:
        ledger: Ledger | None = None
        trouble = ""
        while not self._stop.is_set():
            length = LOOK_S
            try:
                ledger = ledger or self._open_ledger()
                for why in deliver_due(ledger, policy=self._policy).dead:
                    self._report_line(f"notification given up: {why}")
                trouble = ""
            except LaunchError as error:  # its disk is full, its server away: what is due waits
                length = TROUBLE_S
                if str(error) != trouble:
                    trouble = str(error)
                    self._report_line(f"notifications: {trouble}")
                _close(ledger)
                ledger = None
            self._stop.wait(length)
        _close(ledger)


def _close(ledger: Ledger | None) -> None:
    if ledger is not None:
        ledger.close()


def drain(ledger: Ledger, until: Callable[[], bool]) -> None:
    """Deliver until nothing is due any more, over all tries, or until *until* is true. Raises `LedgerError`."""
    while not until():
        deliver_due(ledger)
        with ledger.database.read() as connection:
            at = outbox.next_due(connection)
        if at is None:
            return
        time.sleep(min(max(at - time.time(), 0.1), LOOK_S))
