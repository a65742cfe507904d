"""Loop of passes: one after the other, soon again while something moves and seldom when nothing does.

The detached reconciler runs one for all clusters, the threads of a service one for each.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from orc.orchestrator.engine.polling import FRESH_S

if TYPE_CHECKING:
    from pathlib import Path
    from typing import Self

    from orc.orchestrator.engine.writing import PassReport
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
