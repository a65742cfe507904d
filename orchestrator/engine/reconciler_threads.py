"""Threads of the reconciler: endless passes, for `orc serve`. Each cluster with live jobs has a thread of its own.

So a cluster that hangs, or whose backend has a defect, keeps no other waiting. Several of them may run on one ledger,
in one process or on several machines: claims and leases in the ledger decide who takes a step, and any of them may be
killed at any time.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from orc.orchestrator.engine import orphans, schedules
from orc.orchestrator.engine.pass_loop import PassLoop, stamp
from orc.orchestrator.ledger.lifecycle import ACTIVE_JOB

if TYPE_CHECKING:
    from orc.orchestrator.engine.pass_loop import Passes


LOOK_S = 1.0  # between two looks at the ledger for live jobs; a cluster whose jobs have changed gets a pass then
STOP_S = 30.0  # for which the end waits for passes that are under way; what they leave behind is found by the next one
_RETRY_S = (1.0, 30.0)  # between tries to reach a ledger that cannot be used

log = logging.getLogger("orc.reconciler")


@dataclass(frozen=True)
class ClusterPasses:
    """Passes over the jobs of one cluster. Times are seconds since the epoch."""

    cluster: str
    live: int = 0  # jobs that had not ended after the last pass
    passes: int = 0
    pass_at: float | None = None  # the end of the last one
    took_s: float = 0.0
    error: str = ""  # why nothing can be said about its jobs, or what went wrong with the pass


@dataclass(frozen=True)
class ReconcilerStatus:
    """State of the threads, for a health check."""

    running: bool
    error: str  # why it cannot see the ledger
    clusters: tuple[ClusterPasses, ...]


class ReconcilerThreads:
    """Runs passes until it is stopped. *open_client* opens a client for the thread that calls it."""

    def __init__(self, open_client: Callable[[], Passes], *, look_s: float = LOOK_S) -> None:
        self.new_client = open_client  # for the thread that calls it
        self._look_s = look_s
        self._lock = threading.Lock()
        self._status = ReconcilerStatus(False, "", ())
        self._clusters: dict[str, ClusterPasses] = {}
        self._workers: dict[str, _Worker] = {}

    @property
    def status(self) -> ReconcilerStatus:
        """The state of the threads now; from any thread."""
        with self._lock:
            return replace(self._status, clusters=tuple(self._clusters[name] for name in sorted(self._clusters)))

    def run(self, stop: threading.Event) -> None:
        """Run passes until *stop* is set, then wait for those under way, `STOP_S` at most."""
        self._note(running=True)
        client: Passes | None = None
        wait_s = self._look_s
        try:
            while not stop.is_set():
                try:
                    client = client or self.new_client()
                    self._look(client, stop)
                    wait_s = self._look_s
                except Exception as error:  # noqa: BLE001 - whatever it is, it may be over at the next look
                    self._fail("the ledger cannot be used", error)
                    _close(client)
                    client = None
                    wait_s = min(max(wait_s * 2, _RETRY_S[0]), _RETRY_S[1])
                stop.wait(wait_s)
        finally:
            _close(client)
            until = time.monotonic() + STOP_S
            for worker in self._workers.values():
                worker.wake.set()
            for worker in self._workers.values():
                worker.thread.join(max(until - time.monotonic(), 0.0))
            self._note(running=False)

    def _look(self, client: Passes, stop: threading.Event) -> None:
        """Let every cluster with live jobs have its thread, and wake those whose jobs have changed."""
        ledger = client.workspace.ledger
        schedules.fire_due(client.workspace)
        states = ", ".join(f"'{state}'" for state in sorted(ACTIVE_JOB))
        with ledger.database.read() as connection:
            rows = connection.tuples(
                "SELECT cluster, COUNT(*), SUM(revision) FROM jobs "  # noqa: S608
                f"WHERE state IN ({states}) GROUP BY cluster"
            )
        self._note(error="")
        live = {cluster for cluster, _, _ in rows}
        rows += [(cluster, 0, 0) for cluster in sorted(orphans.due_clusters(client.workspace) - live)]
        for cluster, count, revisions in rows:
            worker = self._workers.get(cluster)
            if worker is None or not worker.thread.is_alive():
                self._workers[cluster] = worker = _Worker(self, cluster, stop)
                worker.thread.start()
            elif worker.mark != (count, revisions):
                worker.wake.set()
            worker.mark = (count, revisions)

    def _note(self, **changes: object) -> None:
        with self._lock:
            self._status = replace(self._status, **changes)  # type: ignore[arg-type]

    def _fail(self, what: str, error: Exception) -> None:
        text = str(error) or type(error).__name__
        if text != self._status.error:
            log.warning("%s: %s", what, text)
        self._note(error=text)

    def note_pass(self, done: ClusterPasses) -> None:
        """Keep what the last pass over a cluster has come to."""
        with self._lock:
            before = self._clusters.get(done.cluster)
            self._clusters[done.cluster] = replace(done, passes=before.passes + 1 if before else 1)
        if done.error and (before is None or before.error != done.error):
            log.warning("%s: %s", done.cluster, done.error)


class _Worker:
    """Thread that runs passes over the jobs of one cluster, as long as there are some."""

    def __init__(self, threads: ReconcilerThreads, cluster: str, stop: threading.Event) -> None:
        self.cluster = cluster
        self.wake = threading.Event()
        self.mark: tuple[int, int] | None = None
        self._threads, self._stop = threads, stop
        self.thread = threading.Thread(target=self._work, name=f"orc-passes-{cluster}", daemon=True)

    def _work(self) -> None:
        client: Passes | None = None
        passes: PassLoop | None = None
        described: tuple[int, ...] = ()
        failures = 0
        while not self._stop.is_set():
            began = time.monotonic()
            done = ClusterPasses(self.cluster, live=1)
            length = _RETRY_S[0]
            try:
                if (
                    client is not None and stamp(client.clusters_file) != described
                ):  # another description of the clusters
                    _close(client)
                    client = None
                if client is None or passes is None:
                    client = self._threads.new_client()
                    passes = PassLoop(client, self.cluster)
                    described = stamp(client.clusters_file)
                found = passes.run()
                error = found.trouble.get(self.cluster) or found.trouble.get("ledger", "")
                done = replace(done, live=1 if found.jobs is None else len(found.jobs), error=error)
                length = passes.wait_s()
                failures = 0
            except Exception as problem:  # noqa: BLE001 - whatever it is, the next pass with a new client may succeed
                failures += 1
                done = replace(done, error=str(problem) or type(problem).__name__)
                _close(client)
                client = passes = None
                length = min(_RETRY_S[0] * 2.0 ** min(failures, 8), _RETRY_S[1])
            self._threads.note_pass(replace(done, pass_at=time.time(), took_s=time.monotonic() - began))
            if not done.live:
                break  # the next job on this cluster brings another thread
            self.wake.wait(length)
            self.wake.clear()
        _close(client)


def _close(client: Passes | None) -> None:
    """Close *client*, however broken it is."""
    if client is not None:
        with contextlib.suppress(Exception):
            client.close()
