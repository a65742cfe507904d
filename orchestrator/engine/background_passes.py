"""Passes in a thread: waiting for them has a limit, where a cluster that does not answer takes its time-outs."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from orc.orchestrator.engine.polling import FRESH_S

if TYPE_CHECKING:
    from orc.orchestrator.engine.pass_loop import Passes


class BackgroundPasses:
    """A thread with a client of its own that runs one pass after the other. Used as a context manager.

    A pass that has not ended when the context is left goes on; should the process end meanwhile, that is like any other
    crash in a pass, which loses nothing.
    """

    def __init__(self, open_client: Callable[[], Passes]) -> None:
        self._open_client = open_client
        self._wanted: queue.SimpleQueue[Sequence[str] | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()

    def __enter__(self) -> BackgroundPasses:
        threading.Thread(target=self._work, name="orc-passes", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._wanted.put(None)

    def run(self, job_ids: Sequence[str], timeout_s: float) -> bool:
        """Run one pass over *job_ids*; False when it takes longer than *timeout_s*. Raises what the pass raises."""
        self._wanted.put(job_ids)
        try:
            error = self._done.get(timeout=max(timeout_s, 0.0))
        except queue.Empty:
            return False
        if error is not None:
            raise error
        return True

    def _work(self) -> None:
        try:
            with self._open_client() as client:
                while (job_ids := self._wanted.get()) is not None:
                    client.refresh(job_ids, max_age_s=FRESH_S)
                    self._done.put(None)
        except BaseException as error:  # noqa: BLE001 - it is raised where it is waited for
            self._done.put(error)
