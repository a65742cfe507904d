"""The Python client: everything the command line and the service do with jobs."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orc.launchers.errors import SpecError
from orc.orchestrator.clients.cancel_calls import CancelCalls
from orc.orchestrator.clients.cluster_calls import ClusterCalls
from orc.orchestrator.clients.errors import JobNotFound as JobNotFound
from orc.orchestrator.clients.group_calls import GroupCalls
from orc.orchestrator.clients.wait_calls import WaitCalls
from orc.orchestrator.functions.calls import FunctionCalls
from orc.orchestrator.insight.calls import InsightCalls
from orc.orchestrator.insight.curves import MeasuredJobs
from orc.orchestrator.ledger.errors import LedgerError
from orc.orchestrator.ledger.lifecycle import JobState
from orc.orchestrator.ledger.store import Ledger
from orc.orchestrator.notifications.calls import NotificationCalls
from orc.orchestrator.views import EventView, JobRow, JobView
from orc.orchestrator.workspace import Workspace

if TYPE_CHECKING:
    from orc.launchers.backends.base import Backend
    from orc.launchers.spec import JobSpec, LoadedJob
    from orc.launchers.spec.clusters import Cluster
    from orc.orchestrator.engine.pass_report import PassReport
    from orc.orchestrator.ledger.records import JobRecord, Reservation


class Client(CancelCalls, ClusterCalls, FunctionCalls, GroupCalls, InsightCalls, NotificationCalls, WaitCalls):
    """Submit jobs, follow them, end them.

    Use it as a context manager or `close` it. *state_dir* defaults to ``$ORC_STATE_DIR`` or the user's state directory,
    *clusters_file* to ``$ORC_CLUSTERS`` or ``clusters.yaml`` in the configuration directory, the ledger to
    ``$ORC_LEDGER_URL`` or a file in *state_dir*. All methods raise `LaunchError` and its children only.

    With *reconciler*, `submit` leaves a process behind that goes on with live jobs
    (`orc.orchestrator.engine.detached`).

    `ServiceClient` has the same methods for the jobs of a service. *backend_of*, *clock* and *sleep* stand in for
    clusters and time in tests.
    """

    address = ""  # of a service: this one has none
    log_interval_s = 0.1

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
        self._clusters_file = clusters_file
        self._backend_of = backend_of
        database = open_database(state_dir, os.environ.get("ORC_LEDGER_URL") or None, volatile=True)
        self.workspace = Workspace(
            state_dir, Ledger(database, clock), backend_of or self._open_backend, clock=clock, sleep=sleep
        )
        self.serves = False  # many people, in a service: the addresses that their jobs bring along are limited
        self.measured = MeasuredJobs()
        # Another process could not use backends that exist in this one only.
        self._detaches = reconciler and backend_of is None
        self.workspace.on_live_job = self._start_reconciler
        self.workspace.subscribed = self._subscribed

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the ledger, and the connections to clusters."""
        self.workspace.close()

    @property
    def clusters_file(self) -> Path:
        """The file that describes the clusters; it need not exist."""
        from orc.launchers import paths

        return self._clusters_file or paths.clusters_file()

    def leave_reconciler(self) -> None:
        """Start a detached reconciler where there is work for one and none runs: live jobs, messages, schedules."""
        ledger = self.workspace.ledger
        if self._detaches and not ledger.volatile and (ledger.any_active() or self._any_due()):
            self._start_reconciler()

    def _any_due(self) -> bool:
        from orc.orchestrator.ledger import late_copies, outbox, schedules

        with self.workspace.ledger.database.read() as connection:
            at = outbox.next_due(connection)
            if at is not None and at <= self.workspace.clock():
                return True
            if late_copies.next_due(connection) is not None:
                return True
            return any(found.enabled for found in schedules.all_schedules(connection))

    def _start_reconciler(self) -> None:
        if self._detaches:
            from orc.orchestrator.engine import detached

            ws = self.workspace
            detached.ensure(ws.state_dir, ws.ledger.database.url, self._clusters_file)

    def _cluster(self, name: str) -> Cluster:
        from orc.launchers.spec.clusters import get_cluster

        return get_cluster(name, path=self._clusters_file)

    def _open_backend(self, cluster: str) -> Backend:
        from orc.launchers.backends import open_backend

        return open_backend(self._cluster(cluster), self.workspace.state_dir)

    # -- making jobs

    def submit(
        self, loaded: LoadedJob, *, on_progress: Callable[[str, Mapping[str, Any]], None] | None = None
    ) -> JobView:
        """Submit a job, exactly once whatever happens to this process.

        Args:
            loaded: The job, from `orc.launchers.spec.load.load_job`.
            on_progress: Called with ``("size", {files, bytes, folders, limit})`` before a file is read (what it raises
                then ends the submission), ``("hash", {bytes, done})``, ``("scan", {files})``,
                ``("snapshot", {bytes, done})``, ``("finding", {level, what, ...})``,
                ``("environment", {files, bytes})`` when one travels with the job, ``("stage", {})`` and
                ``("submit", {})``.

        Returns:
            The job as it is now: at its cluster, or QUEUED where there is no room for it.

        Raises:
            SpecError: *loaded* describes several jobs.
            LaunchError: The job certainly does not run.
        """
        from orc.orchestrator.engine.groups import start_job
        from orc.orchestrator.engine.snapshots import take
        from orc.orchestrator.engine.submission import silent

        progress = on_progress or silent
        if loaded.spec.sweep is not None or loaded.spec.array is not None:
            raise SpecError(
                "describes several jobs",
                where=str(loaded.source_path),
                hint="orc.launchers.spec.groups.load_jobs reads it, submit_group sends it",
            )
        # The cluster and its backend are looked up before any file is hashed: the cheapest mistakes show first.
        backend = self.workspace.backend(loaded.spec.cluster)
        loaded = loaded._replace(spec=self._subscribed(loaded.spec))
        snapshot = take(self.workspace.store, loaded, progress, backend)
        source = str(loaded.source_path.absolute()) if loaded.source_path else ""
        record = start_job(self.workspace, loaded.spec, snapshot, source=source, progress=progress)
        return self._submitted(record)

    def _subscribed(self, spec: JobSpec) -> JobSpec:
        """Return *spec* with the subscriptions of the settings. Raises `LaunchError` for a wrong address."""
        from orc.orchestrator.notifications.settings import load_settings
        from orc.orchestrator.notifications.targets import Policy, subscribed

        return subscribed(spec, load_settings(), Policy(service=self.serves))

    def resubmit(
        self,
        job_id: str,
        *,
        overrides: Sequence[str] = (),
        on_progress: Callable[[str, Mapping[str, Any]], None] | None = None,
    ) -> JobView:
        """Submit a new job with the specification and the snapshots of *job_id*; its source is ``job:<old id>``.

        Args:
            job_id: Id of the old job, which stays as it is.
            overrides: Changes of the specification, ``resources.nodes=4``, as after ``--set``.
            on_progress: As of `submit`.

        Raises:
            JobNotFound: There is no such job.
            SpecError: An override is wrong, or needs other files than the job has.
            LaunchError: The job certainly does not run.
        """
        from orc.orchestrator.engine.attempt_inputs import stored_snapshot
        from orc.orchestrator.engine.changed_spec import changed, digests_left
        from orc.orchestrator.engine.groups import start_job
        from orc.orchestrator.engine.submission import silent
        from orc.orchestrator.functions.keys import key_of

        ws = self.workspace
        old = self.job(job_id)
        spec = changed(old.spec, overrides, where=old.id)
        record = start_job(
            ws,
            spec,
            stored_snapshot(ws, digests_left(old.digests, old.spec, spec)),
            source=f"job:{old.id}",
            progress=on_progress or silent,
            given=key_of(ws.state_dir, old.digests["code"]),
        )
        return self._submitted(record)

    def submit_estimator(
        self,
        estimator: object,
        *,
        cluster: str,
        inputs: object = None,
        name: str | None = None,
        on_progress: Callable[[str, Mapping[str, Any]], None] | None = None,
    ) -> JobView:
        """Submit what *estimator* describes to a cluster of kind sagemaker.

        *estimator* is a mapping of the documented configuration keys and arguments of the SageMaker SDK's estimators,
        or an object that has them as attributes; *inputs* are those of its ``fit``. Raises `SpecError` for arguments
        that cannot be carried (docs/reference/sagemaker-options.md). *name* is the job's, *on_progress* as of `submit`.

        Returns:
            The new job.
        """
        from orc.launchers.backends.sagemaker.estimators import load_estimator

        loaded = load_estimator(estimator, self._cluster(cluster), name=name, inputs=inputs)
        return self.submit(loaded, on_progress=on_progress)

    def _submitted(self, record: JobRecord) -> JobView:
        if record.state is JobState.QUEUED:
            self.refresh([record.id])  # whoever seems to be in its way may have left since somebody looked
        return self.job(record.id)

    def set_tags(self, job_id: str, tags: Mapping[str, str | None]) -> JobView:
        """Set tags of a job; `None` removes one, and others stay. Return the job with them.

        Raises:
            JobNotFound: There is no such job.
            SpecError: A tag is none that a job file could have.
        """
        from orc.orchestrator.ledger.tags import checked_tags, write_tags

        changes = checked_tags(tags)
        self._checked_id(job_id)
        with self.workspace.ledger.transaction() as tx:
            write_tags(tx, job_id, changes)
        return self.job(job_id)

    def _reopen_ledger(self) -> None:
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

    # -- looking at jobs

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
        While the ledger cannot be written, what was seen is only shown by this client, and nothing is started.
        """
        # Imported here because `orc list` needs no pass and has no time for one.
        from orc.orchestrator.engine.reconciler import reconcile

        self._reopen_ledger()
        try:
            return reconcile(self.workspace, job_ids, cluster=cluster, patience_s=patience_s, max_age_s=max_age_s)
        except LedgerError:
            if not self.workspace.ledger.database.unwritable():
                raise
            self._reopen_ledger()  # its disk has become full in the middle of it
            return reconcile(self.workspace, job_ids, cluster=cluster)

    def refresh_within(self, job_ids: Sequence[str], seconds: float) -> None:
        """Run one pass over *job_ids*; wait *seconds* for it at most."""
        from orc.orchestrator.engine.background_passes import BackgroundPasses

        self._reopen_ledger()
        if self.workspace.ledger.volatile:
            self.refresh(job_ids)
            return
        with BackgroundPasses(self._clone) as passes:
            passes.run(job_ids, seconds)

    def job(self, job_id: str) -> JobView:
        """Return the job as the ledger has it.

        Raises:
            JobNotFound: There is no such job.
        """
        ledger = self.workspace.ledger
        record = ledger.job(job_id)
        if record is None:
            raise JobNotFound(f"no such job: {job_id}", hint="`orc list` shows the jobs")
        return JobView.of(
            record,
            ledger.attempts(job_id),
            ledger.spec(job_id),
            ledger.tags(job_id),
            ledger.failed_hosts(job_id),
            ledger.seen_at(job_id),
        )

    def jobs(
        self,
        *,
        states: Sequence[str] | None = None,
        name: str | None = None,
        tags: Mapping[str, str] | None = None,
        group: str | None = None,
        limit: int | None = 50,
    ) -> list[JobRow]:
        """Return jobs, newest first.

        Args:
            states: Only those in one of these states.
            name: Only those of this name.
            tags: Only those with all these tags.
            group: Only those of this sweep, array, pipeline or schedule.
            limit: Number of jobs at most; `None` for all.
        """
        rows = self.workspace.ledger.rows(states=states, name=name, tags=tags, group=group, limit=limit)
        return [JobRow(*row) for row in rows]

    def reservations(self, cluster: str | None = None) -> list[Reservation]:
        """Return the hosts that attempts hold (of *cluster*, if given), by cluster and host."""
        return self.workspace.ledger.reservations(cluster)

    def events(self, job_id: str) -> list[EventView]:
        """Return the history of a job, oldest first."""
        return self.workspace.ledger.events(self._checked_id(job_id))

    def resolve(self, ref: str) -> str:
        """Return the job id that *ref* means.

        Args:
            ref: An id, the unambiguous start of one, or ``@last``.

        Raises:
            JobNotFound: No job, or more than one, is meant.
        """
        if ref == "@last":
            newest = self.jobs(limit=1)
            if not newest:
                raise JobNotFound("there is no job yet", hint="submit one: orc submit job.yaml")
            return newest[0].id
        candidates = self.workspace.ledger.matching_ids(ref, limit=6) if ref else []
        if ref in candidates or (ref and self.workspace.ledger.job(ref)):
            return ref
        if len(candidates) == 1:
            return candidates[0]
        if candidates:
            shown = ", ".join(candidates[:5]) + (", ..." if len(candidates) > 5 else "")
            raise JobNotFound(f"{ref!r} is not unique", hint=f"it is the start of {shown}")
        raise JobNotFound(f"no such job: {ref}", hint=self._similar(ref))

    def _similar(self, ref: str) -> str:
        import difflib

        near = difflib.get_close_matches(ref, [row.id for row in self.jobs(limit=200)], n=3)
        return f"did you mean {' or '.join(near)}?" if near else "`orc list` shows the jobs"

    def _checked_id(self, job_id: str) -> str:
        if self.workspace.ledger.job(job_id) is None:
            raise JobNotFound(f"no such job: {job_id}", hint="`orc list` shows the jobs")
        return job_id

    # -- waiting

    def _clone(self) -> Client:
        """Return a client like this one, for another thread."""
        ws = self.workspace
        return Client(
            ws.state_dir,
            self._clusters_file,
            backend_of=self._backend_of,
            clock=ws.clock,
            sleep=ws.sleep,
            reconciler=self._detaches,
        )
