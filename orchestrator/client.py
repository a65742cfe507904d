"""The Python client of a ledger: everything the command line does with jobs without a service."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from orc.launchers.errors import LaunchError, SpecError
from orc.orchestrator.api.call import JobNotFound as JobNotFound
from orc.orchestrator.api.session import LedgerSession
from orc.orchestrator.clients.surface import JobsClient
from orc.orchestrator.engine.steps import silent
from orc.orchestrator.ledger.lifecycle import JobState

if TYPE_CHECKING:
    from orc.launchers.backends.base import Backend, Handle, LogChunk, LogSelector, NodeEntry, Snapshot
    from orc.launchers.spec import JobSpec, LoadedJob
    from orc.launchers.spec.groups import LoadedGroup
    from orc.orchestrator.clients.function_jobs import FunctionJob
    from orc.orchestrator.engine.steps import PassReport, Progress
    from orc.orchestrator.functions.calls import Call
    from orc.orchestrator.insight.metrics import Reader
    from orc.orchestrator.views import GroupView, JobView, ScheduleView
    from orc.orchestrator.workspace import Workspace

R = TypeVar("R")


class Client(JobsClient):
    """Submit jobs, follow them, end them.

    Use it as a context manager or `close` it. *state_dir* defaults to ``$ORC_STATE_DIR`` or the user's state directory,
    *clusters_file* to ``$ORC_CLUSTERS`` or ``clusters.yaml`` in the configuration directory, the ledger to
    ``$ORC_LEDGER_URL`` or a file in *state_dir*. All methods raise `LaunchError` and its children only.

    With *reconciler*, `submit` leaves a process behind that goes on with live jobs
    (`orc.orchestrator.engine.detached`).

    `ServiceClient` has the same methods for the jobs of a service. *backend_of*, *clock* and *sleep* stand in for
    clusters and time in tests.
    """

    log_interval_s = 0.1
    session: LedgerSession

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
        self.session = LedgerSession(
            state_dir, clusters_file, backend_of=backend_of, clock=clock, sleep=sleep, reconciler=reconciler
        )

    @property
    def workspace(self) -> Workspace:
        """The ledger, the store of snapshots and the backends of the clusters."""
        return self.session.workspace

    def close(self) -> None:
        """Close the ledger, and the connections to clusters."""
        self.session.close()

    # -- making jobs

    def submit(self, loaded: LoadedJob, *, on_progress: Progress | None = None) -> JobView:
        """Submit a job, exactly once whatever happens to this process.

        *on_progress* is called with ``("size", {files, bytes, folders, limit})`` before a file is read (what it raises
        then ends the submission), ``("hash", {bytes, done})``, ``("scan", {files})``, ``("snapshot", {bytes, done})``,
        ``("finding", {level, what, ...})``, ``("environment", {files, bytes})`` when one travels with the job,
        ``("stage", {})`` and ``("submit", {})``. Raises `SpecError` where *loaded* describes several jobs.
        """
        from orc.orchestrator.engine.job_source import take

        if loaded.spec.sweep is not None or loaded.spec.array is not None:
            hint = "orc.launchers.spec.groups.load_jobs reads it, submit_group sends it"
            raise SpecError("describes several jobs", where=str(loaded.source_path), hint=hint)
        # The cluster and its backend are looked up before any file is hashed: the cheapest mistakes show first.
        backend = self.workspace.backend(loaded.spec.cluster)
        loaded = loaded._replace(spec=self.session.subscriptions()(loaded.spec))
        snapshot = take(self.workspace.store, loaded, on_progress or silent, backend)
        return self._submit(loaded.spec, snapshot, str(loaded.source_path.absolute()), on_progress)

    def resubmit(self, job_id: str, *, overrides: Sequence[str] = (), on_progress: Progress | None = None) -> JobView:
        """Submit a new job with the specification and the snapshots of *job_id*; its source is ``job:<old id>``.

        Raises `SpecError` for an override that needs other files than the job has.
        """
        from orc.orchestrator.engine.attempt_inputs import changed, digests_left, stored_snapshot
        from orc.orchestrator.functions.calls import key_of

        ws = self.workspace
        old = self.job(job_id)
        spec = changed(old.spec, overrides, where=old.id)
        snapshot = stored_snapshot(ws, digests_left(old.digests, old.spec, spec))
        key = key_of(ws.state_dir, old.digests["code"])
        return self._submit(spec, snapshot, f"job:{old.id}", on_progress, key)

    def submit_estimator(
        self,
        estimator: object,
        *,
        cluster: str,
        inputs: object = None,
        name: str | None = None,
        on_progress: Progress | None = None,
    ) -> JobView:
        """Submit what *estimator* describes to a cluster whose platform has estimators.

        On Amazon SageMaker that is a mapping of the documented configuration keys and arguments of the SDK's
        estimators, or an object that has them as attributes; *inputs* are those of its ``fit``. *name* is the job's,
        *on_progress* as of `submit`. Returns the new job. Raises `SpecError` for arguments that cannot be carried
        (docs/reference/sagemaker-options.md).
        """
        from orc.launchers.backends.base import SupportsEstimators

        backend = self.workspace.backend(cluster)
        if not isinstance(backend, SupportsEstimators):
            raise SpecError(f"{cluster} is of kind {backend.kind}, which has no estimators")
        loaded = backend.load_estimator(estimator, name=name, inputs=inputs)
        return self.submit(loaded, on_progress=on_progress)

    def _submit(
        self,
        spec: JobSpec,
        snapshot: Snapshot,
        source: str,
        on_progress: Progress | None,
        secrets: Mapping[str, str] | None = None,
    ) -> JobView:
        from orc.orchestrator.engine.submission import new_submission, submit

        ws = self.workspace
        new = new_submission(ws, spec, snapshot, source=source, secrets=secrets)
        submit(ws, [new], progress=on_progress or silent)
        view = self.job(new.id)
        if view.state != JobState.QUEUED:
            return view
        self.refresh([new.id])  # the jobs that seem to be in its way may have ended since
        return self.job(new.id)

    def cancel(
        self,
        job_ids: Sequence[str],
        *,
        grace_s: float | None = None,
        on_unreachable: Callable[[Mapping[str, str]], None] | None = None,
    ) -> list[JobView]:
        """Cancel jobs. The request is durable first; those that have ended stay as they are."""
        from orc.orchestrator.clients.ending import cancel

        cancel(self.session, job_ids, grace_s=grace_s, on_unreachable=on_unreachable)
        return [self.job(job_id) for job_id in job_ids]

    def submit_group(self, loaded: LoadedGroup, *, on_progress: Progress | None = None) -> GroupView:
        """Submit all members of a group, or none."""
        from orc.orchestrator.clients import groups

        return groups.submit(self.session, loaded, on_progress=on_progress)

    def retry_group(self, group_id: str) -> GroupView:
        """Submit the members that have ended without success once more, from the same snapshots.

        Raises `LaunchError` where none of them could be submitted, or there are none.
        """
        from orc.orchestrator.clients import groups

        return groups.resubmit(self.session, group_id)

    def create_schedule(
        self,
        loaded: LoadedJob,
        cron: str,
        *,
        name: str = "",
        timezone: str = "UTC",
        missed: str = "skip",
        overlap: str = "skip",
        on_progress: Progress | None = None,
    ) -> ScheduleView:
        """Submit a job again and again, from the snapshot that is taken now."""
        from orc.launchers.ids import new_job_id
        from orc.orchestrator.engine import job_source, schedules
        from orc.orchestrator.engine.submission import new_submission
        from orc.orchestrator.views import ScheduleView

        schedules.check(loaded.spec, cron, timezone)
        ws = self.workspace
        snapshot = job_source.take(ws.store, loaded, on_progress or silent, ws.backend(loaded.spec.cluster))
        name = name or loaded.spec.name
        source = str(loaded.source_path.absolute())
        each = replace(new_submission(ws, loaded.spec, snapshot, source=source), id=new_job_id(name))
        record = schedules.create(ws, each, name=name, cron=cron, timezone=timezone, missed=missed, overlap=overlap)
        return ScheduleView.of(record)

    # -- functions

    def submit_function(
        self,
        fn: Callable[..., R],
        /,
        *args: Any,
        cluster: str = "local",
        resources: Mapping[str, Any] | None = None,
        name: str | None = None,
        max_timeouts: int = 3,
        job: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> FunctionJob[R]:
        """Submit a job that calls ``fn(*args, **kwargs)``, all of it pickled, on a cluster.

        A function that has a ``checkpoint`` method saves before its time limit and when it is preempted; what that
        method returns is called next. Returns the job, whose `FunctionJob.result` is the function's value.

        Args:
            fn: What to call.
            cluster: A name in clusters.yaml.
            resources: The section of that name of a job file.
            name: Name of the job; that of the function by default.
            max_timeouts: Number of time limits after which a function that saves goes on.
            job: Other keys of a job file: ``env``, ``secrets``, ``setup``, ``environment``, ``retry``, ``grace``, ...

        Raises:
            LaunchError: The call cannot be pickled, the job's specification is wrong, or the cluster rejects it.
        """
        (made,) = self.submit_calls(
            [(fn, args, kwargs)], cluster=cluster, resources=resources, name=name, max_timeouts=max_timeouts, job=job
        )
        return made

    def map_functions(
        self,
        fn: Callable[..., R],
        /,
        *iterables: Iterable[Any],
        cluster: str = "local",
        resources: Mapping[str, Any] | None = None,
        name: str | None = None,
        at_once: int | None = None,
        max_timeouts: int = 3,
        job: Mapping[str, Any] | None = None,
    ) -> list[FunctionJob[R]]:
        """Submit a job for each call of ``map(fn, *iterables)``; where the cluster has arrays, as one array.

        The *iterables* are those of `map`, but of the same length. *cluster*, *resources* (of one call), *name*,
        *max_timeouts* and *job* are those of `submit_function`, and so are the errors; *at_once* is the number of calls
        that run at a time, on this machine and on clusters with arrays. Returns the jobs, in the order of the arguments
        of *fn*.
        """
        from orc.orchestrator.functions.calls import arguments

        calls: list[Call] = [(fn, args, {}) for args in arguments(iterables)]
        return self.submit_calls(
            calls, many=True, cluster=cluster, resources=resources, name=name, at_once=at_once,
            max_timeouts=max_timeouts, job=job,
        )  # fmt: skip

    def submit_calls(self, calls: Sequence[Call], **options: Any) -> list[FunctionJob[Any]]:
        """Submit a job for each of *calls*, ``(function, args, kwargs)``; ``many=True`` makes them a map.

        The other *options* are those of `map_functions`. Returns the jobs, in the order of *calls*.
        """
        from orc.orchestrator.clients.function_jobs import FunctionJob
        from orc.orchestrator.functions.calls import submit_calls

        return [FunctionJob(self.session, job_id) for job_id in submit_calls(self.workspace, calls, **options)]

    def function_jobs(self, id: str, *, cluster: str = "") -> list[FunctionJob[Any]]:
        """Return the calls that were submitted earlier, perhaps by another process.

        *id* is that of a job, or of a map (the tag ``map`` of its jobs), or ``<map>.<number>`` for one of its calls.
        *cluster* is not needed: the ledger has that of each job. Raises `LaunchError` where there is no such job.
        """
        from orc.orchestrator.clients.function_jobs import FunctionJob
        from orc.orchestrator.functions.calls import CALL_TAG, MAP_TAG

        group, _, number = id.partition(".")
        rows = self.jobs(tags={MAP_TAG: group}, limit=None)
        calls = sorted((int(row.tags[CALL_TAG]), row.id) for row in rows)
        found = [job for call, job in calls if not number or str(call) == number]
        if not calls:
            found = [self.job(id).id]
        elif not found:
            raise LaunchError(f"{group} has no call {number}", hint=f"it has {len(calls)}, from 0")
        return [FunctionJob(self.session, job) for job in found]

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

        Arguments as of `LedgerSession.refresh`: *cluster*, *patience_s* and *max_age_s* are those of
        `orc.orchestrator.engine.reconciler.reconcile`.
        """
        return self.session.refresh(job_ids, cluster=cluster, patience_s=patience_s, max_age_s=max_age_s)

    def refresh_within(self, job_ids: Sequence[str], seconds: float) -> None:
        """Run one pass over *job_ids*; wait *seconds* for it at most."""
        from orc.orchestrator.engine.passes import BackgroundPasses

        self.session.reopen_ledger()
        if self.workspace.ledger.volatile:
            self.refresh(job_ids)
            return
        with BackgroundPasses(self.session.clone) as passes:
            passes.run(job_ids, seconds)

    def wait(
        self,
        job_ids: Sequence[str],
        *,
        timeout_s: float | None = None,
        on_change: Callable[[JobView], None] | None = None,
    ) -> list[JobView]:
        """Run passes until all jobs have ended."""
        from orc.orchestrator.clients.ending import wait

        return wait(self.session, job_ids, timeout_s=timeout_s, on_change=on_change)

    def tick(self, job_id: str) -> JobView:
        """Run one pass for an attempt of the job *job_id* that has ended, and wait for a retry that is due.

        Returns when the job has ended, or when an attempt is safely at the backend.
        """
        from orc.orchestrator.clients.ending import tick

        return tick(self.session, job_id)

    def read_log(
        self, job_id: str, selector: LogSelector, attempt: int | None = None, offset: int = 0
    ) -> Iterator[LogChunk]:
        """Yield the content of one log as it is now; a call with the end of the last chunk as *offset* follows it."""
        from orc.orchestrator.api.logs import read_log

        return read_log(self.session, job_id, selector, attempt, offset)

    def log_file(self, job_id: str, selector: LogSelector, attempt: int | None = None) -> str | None:
        """Return the path of one log on this machine; `None` where it has to be read with `read_log`."""
        backend, handle = self.at_backend(job_id, attempt)
        return backend.log_file(handle, selector) if handle else None

    def metrics(self, job_id: str) -> Reader:
        """Return a reader of what the training of a job measures; each `read` goes on from where it stopped."""
        from orc.orchestrator.insight.metrics import Reader

        return Reader(self.workspace, self.session.record(job_id).id)

    def entries(self, job_id: str, attempt: int | None = None) -> list[NodeEntry]:
        """Return the ways to the nodes of an attempt (the newest by default).

        Raises:
            LaunchError: It has no nodes yet, or its cluster's nodes cannot be entered.
        """
        from orc.launchers.backends.base import SupportsExec

        backend, handle = self.at_backend(job_id, attempt)
        if handle is None:
            raise LaunchError(f"{job_id} has no nodes yet", hint=f"`orc status {job_id}` says what it waits for")
        if not isinstance(backend, SupportsExec):
            raise LaunchError(f"nodes of clusters of kind {backend.kind} cannot be entered", where=job_id)
        return backend.entries(handle)

    def at_backend(self, job_id: str, number: int | None) -> tuple[Backend, Handle | None]:
        """Return the backend of the job *job_id*, and the handle of its attempt *number* (the newest by default)."""
        from orc.orchestrator.api.logs import at_backend

        return at_backend(self.session, job_id, number)

    def queueing_clusters(self) -> tuple[list[str], dict[str, LaunchError]]:
        """Return the clusters with a queue of their own, and the errors of those that fail to open. Contacts none."""
        from orc.orchestrator.api.clusters import queueing_clusters

        return queueing_clusters(self.session)
