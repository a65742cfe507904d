"""Session of an open ledger: the ledger, its clusters, and who asks. Calls and the Python client work over it."""

from __future__ import annotations

import copy
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from orc.launchers.errors import LaunchError
from orc.orchestrator.api.call import JobNotFound, Kind, Principal, without_places
from orc.orchestrator.ledger.database import LedgerError
from orc.orchestrator.ledger.store import Ledger
from orc.orchestrator.views import JobView, decode, encode
from orc.orchestrator.workspace import Workspace

if TYPE_CHECKING:
    from typing import Self

    from orc.launchers.backends.base import Backend
    from orc.launchers.spec import JobSpec
    from orc.launchers.spec.clusters import Cluster
    from orc.orchestrator.api.call import Call, P, R
    from orc.orchestrator.engine.steps import PassReport
    from orc.orchestrator.insight.metrics import MeasuredJobs
    from orc.orchestrator.ledger.records import JobRecord


Shown = TypeVar("Shown")


@dataclass(frozen=True)
class Caller(Principal):
    """Sender of a call: the user of this process, or the holder of a token of a service."""

    note: Callable[..., None] = lambda subject, **data: None  # names in the audit log what a call has made or changed
    max_upload: int = 0  # bytes that one upload of it may have

    def shown(self, view: Shown, owner: str) -> Shown:
        """Return *view*, which belongs to *owner*, without the places that the caller may not see."""
        if self.may_see(Kind.PLACES, owner):
            return view
        shown: Shown = decode(type(view), without_places(encode(view)))
        return shown


class LedgerSession:
    """An open ledger and the clusters of clusters.yaml. Calls are carried out in this process.

    Args:
        state_dir: The user's state directory unless given.
        clusters_file: ``clusters.yaml`` of the configuration directory unless given.
        backend_of: Stands in for the clusters in tests; so do *clock* and *sleep* for time.
        clock: Seconds since the epoch.
        sleep: Waits so many seconds.
        reconciler: Leave a process behind that goes on with live jobs.
    """

    def __init__(
        self,
        state_dir: Path | None = None,
        clusters_file: Path | None = None,
        *,
        backend_of: Callable[[str], Backend] | None = None,
        clock: Callable[[], float] = time.time,
        sleep: Callable[[float], None] = time.sleep,
        reconciler: bool = True,
    ) -> None:
        from orc.orchestrator.ledger.opening import open_database

        if state_dir is None:
            from orc.launchers import paths

            state_dir = paths.state_dir()
        self._backend_of = backend_of
        database = open_database(state_dir, os.environ.get("ORC_LEDGER_URL") or None, volatile=True)
        self.workspace = Workspace(
            state_dir,
            Ledger(database, clock),
            backend_of or self._open_backend,
            clusters_file,
            clock=clock,
            sleep=sleep,
        )
        self.caller = Caller(self.workspace.user)
        self.serves = False  # many people, in a service: the addresses that their jobs bring along are limited
        # Another process could not use backends that exist in this one only.
        self._detaches = reconciler and backend_of is None
        self.workspace.on_live_job = self._start_reconciler
        self.workspace.subscriptions = self.subscriptions

    @cached_property
    def measured(self) -> MeasuredJobs:
        """Cache of the measurements of jobs; a service has one for all sessions."""
        from orc.orchestrator.insight.metrics import MeasuredJobs

        return MeasuredJobs()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the ledger, and the connections to clusters."""
        self.workspace.close()

    def clone(self) -> LedgerSession:
        """Return a session like this one, for another thread."""
        ws = self.workspace
        return LedgerSession(
            ws.state_dir,
            ws.clusters_file,
            backend_of=self._backend_of,
            clock=ws.clock,
            sleep=ws.sleep,
            reconciler=self._detaches,
        )

    def on_behalf_of(self, caller: Caller) -> LedgerSession:
        """Return this session as *caller* has it."""
        session = copy.copy(self)
        session.caller = caller
        return session

    def carry_out(self, call: Call[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
        """Return the result of *call*, which is made here. Raises `LaunchError`."""
        return call.function(self, *args, **kwargs)

    def sleep(self, seconds: float) -> None:
        """Wait so many seconds."""
        self.workspace.sleep(seconds)

    # -- clusters

    @property
    def clusters_file(self) -> Path:
        """The file that describes the clusters; it need not exist."""
        from orc.launchers import paths

        return self.workspace.clusters_file or paths.clusters_file()

    def clusters(self) -> Mapping[str, Cluster]:
        """Return the clusters that `clusters_file` describes, as far as they are described well."""
        from orc.launchers.spec.clusters import read_clusters

        return read_clusters(self.workspace.clusters_file)[0]

    def cluster(self, name: str) -> Cluster:
        """Return a cluster. Raises `LaunchError` where there is none of that name."""
        from orc.launchers.spec.clusters import get_cluster

        return get_cluster(name, path=self.workspace.clusters_file)

    def _open_backend(self, cluster: str) -> Backend:
        from orc.launchers.backends import open_backend

        return open_backend(self.cluster(cluster), self.workspace.state_dir)

    def is_remote(self, clusters: set[str]) -> bool:
        """Return True when one of them is polled over a network or by its commands, and not by reading files here."""
        for cluster in clusters:
            try:
                if not self.workspace.backend(cluster).self_driving:
                    return True
            except LaunchError:
                return True  # its job's reason says what is wrong with the cluster
        return False

    def subscriptions(self) -> Callable[[JobSpec], JobSpec]:
        """Return what adds the subscriptions of the settings to a job. Both raise `LaunchError` for a wrong address."""
        from orc.orchestrator.notifications.targets import Policy, load_settings, subscribed

        return partial(subscribed, settings=load_settings(), policy=Policy(service=self.serves))

    # -- passes

    def leave_reconciler(self) -> None:
        """Start a detached reconciler where there is work for one and none runs: live jobs, messages, schedules."""
        ledger = self.workspace.ledger
        if self._detaches and not ledger.volatile and (ledger.any_active() or ledger.any_due()):
            self._start_reconciler()

    def _start_reconciler(self) -> None:
        if self._detaches:
            from orc.orchestrator.engine import detached

            ws = self.workspace
            detached.ensure(ws.state_dir, ws.ledger.database.url, ws.clusters_file)

    def reopen_ledger(self) -> None:
        """Use the ledger itself where it can be written now, else a copy in memory."""
        from orc.orchestrator.ledger.opening import open_database

        ledger = self.workspace.ledger
        if bool(ledger.database.unwritable()) == bool(ledger.volatile):
            return
        database = open_database(
            self.workspace.state_dir, os.environ.get("ORC_LEDGER_URL") or None, volatile=not ledger.volatile
        )
        ledger.database.close()
        ledger.database = database

    def refresh(
        self,
        job_ids: Sequence[str] | None = None,
        *,
        cluster: str | None = None,
        patience_s: float = 0.0,
        max_age_s: float | None = 0.0,
    ) -> PassReport:
        """Run one reconciler pass over *job_ids*, or all live jobs; report the clusters that did not answer.

        *cluster*, *patience_s* and *max_age_s* are those of `orc.orchestrator.engine.reconciler.reconcile`.
        While the ledger cannot be written, what was seen is only shown by this session, and nothing is started.
        """
        # Imported here because `orc list` needs no pass and has no time for one.
        from orc.orchestrator.engine.reconciler import reconcile

        self.reopen_ledger()
        try:
            return reconcile(self.workspace, job_ids, cluster=cluster, patience_s=patience_s, max_age_s=max_age_s)
        except LedgerError:
            if not self.workspace.ledger.database.unwritable():
                raise
            self.reopen_ledger()  # its disk has become full in the middle of it
            return reconcile(self.workspace, job_ids, cluster=cluster)

    # -- jobs

    def job(self, job_id: str) -> JobView:
        """Return a job and its attempts, as the ledger has them. Raises `JobNotFound`."""
        ledger = self.workspace.ledger
        with ledger.one_moment():
            return JobView.of(
                self.record(job_id),
                ledger.attempts(job_id),
                ledger.spec(job_id),
                ledger.tags(job_id),
                ledger.failed_hosts(job_id),
                ledger.seen_at(job_id),
            )

    def record(self, job_id: str) -> JobRecord:
        """Return the row of a job. Raises `JobNotFound`."""
        record = self.workspace.ledger.job(job_id)
        if record is None:
            raise JobNotFound(f"no such job: {job_id}", hint="`orc list` shows the jobs")
        return record
