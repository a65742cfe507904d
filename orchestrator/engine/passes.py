"""Loops of passes: one pass after the other, soon again while something moves and seldom when nothing does.

The detached reconciler runs one loop for all clusters. For `orc serve` each cluster with live jobs has a thread of its
own, so that one that hangs, or whose backend has a defect, keeps no other waiting. Several may run on one ledger, in
one process or on several machines: claims and leases in the ledger decide who takes a step, and any of them may be
killed at any time.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

from orc.orchestrator.engine import orphans, schedules
from orc.orchestrator.ledger.lifecycle import ACTIVE_JOB
from orc.orchestrator.ledger.polls import FRESH_S

if TYPE_CHECKING:
    from pathlib import Path
    from typing import Self

    from orc.orchestrator.engine.steps import PassReport
    from orc.orchestrator.ledger.records import JobRecord
    from orc.orchestrator.workspace import Workspace

# Seconds between two passes: a twentieth of the time since the state of a job changed, between these bounds. The first
# is for jobs on this machine, the second where a cluster has to be asked.
SHORTEST_S = (1.0, 5.0)
LONGEST_S = 30.0
# For so long a step of a job is left to its agents, where these start passes: they have its submitter's environment.
PATIENCE_S = 15.0


class Passes(Protocol):
    """Open ledger with which passes are run: a session of it."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...

    def close(self) -> None:
        """Close the ledger."""
        ...

    @property
    def workspace(self) -> Workspace:
        """The ledger and its clusters."""
        ...

    @property
    def clusters_file(self) -> Path:
        """The file that describes the clusters."""
        ...

    def refresh(
        self,
        job_ids: Sequence[str] | None = None,
        *,
        cluster: str | None = None,
        patience_s: float = 0.0,
        max_age_s: float | None = 0.0,
    ) -> PassReport:
        """Run one pass over *job_ids*, or all live jobs. Raises `LaunchError`."""
        ...

    def is_remote(self, clusters: set[str]) -> bool:
        """Return True when one of them is polled over a network or by its commands."""
        ...


@dataclass(frozen=True)
class Pass:
    """Result of one pass."""

    jobs: list[JobRecord] | None  # that have not ended; `None` where what has ended could not be written down
    trouble: Mapping[str, str]  # by cluster (or "ledger"): why nothing can be said


class PassLoop:
    """Passes over the live jobs (of *cluster*, if given) with one client, and the times between them."""

    def __init__(self, client: Passes, cluster: str | None = None) -> None:
        self._client, self._cluster = client, cluster
        self._states: dict[str, tuple[str, int]] | None = None
        self._changed_at = client.workspace.clock()
        self._due: list[float] = []
        self._away = False

    def run(self) -> Pass:
        """Run one pass. Raises `LaunchError` where the ledger cannot be used."""
        ws = self._client.workspace
        self._due = []
        trouble = self._client.refresh(cluster=self._cluster, patience_s=PATIENCE_S, max_age_s=None).unreachable
        jobs = [job for job in ws.ledger.active() if self._cluster in (None, job.cluster)]
        if ws.ledger.volatile:
            return Pass(None, {**trouble, "ledger": f"can only be read: {ws.ledger.volatile}"})
        if (states := {job.id: (str(job.state), job.number) for job in jobs}) != self._states:
            self._states, self._changed_at = states, ws.clock()
        self._due = [job.next_attempt_at for job in jobs if job.next_attempt_at is not None]
        self._away = self._client.is_remote({job.cluster for job in jobs})
        return Pass(jobs, trouble)

    def wait_s(self, *also: float | None) -> float:
        """Return the seconds until the next pass; *also* are times at which something else is due."""
        due = [*self._due, *(at for at in also if at is not None)]
        return pause(self._client.workspace.clock(), self._changed_at, due, SHORTEST_S[self._away])


def pause(now: float, last_change: float, due: list[float], shortest: float) -> float:
    """Return the seconds until the next pass; *due* are the times at which something is to be done."""
    length = min(max(shortest, (now - last_change) / 20), LONGEST_S)
    return min(length, max(min(due, default=now + length) - now, shortest))


def stamp(path: Path | None) -> tuple[int, ...]:
    """Return device, inode, time and size of a file, which tell its versions apart; nothing where it is not there."""
    try:
        status = path.stat() if path else None
    except OSError:
        return ()
    return (status.st_dev, status.st_ino, status.st_mtime_ns, status.st_size) if status else ()


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
                if client is not None and stamp(client.clusters_file) != described:  # the clusters are others now
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
