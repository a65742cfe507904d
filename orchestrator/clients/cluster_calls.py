"""Methods of `Client` that contact clusters: logs, metrics and nodes of jobs, and queues."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, cast

from orc.launchers.errors import LaunchError
from orc.orchestrator.clients.errors import JobNotFound

if TYPE_CHECKING:
    from orc.launchers.backends.base import Backend, Handle, LogChunk, LogSelector, NodeEntry, QueueReport
    from orc.orchestrator.client import Client
    from orc.orchestrator.insight.metrics import Reader


class ClusterCalls:
    """Methods of `Client` that contact clusters."""

    @property
    def _client(self) -> Client:
        return cast("Client", self)

    def log_selectors(self, job_id: str, attempt: int | None = None) -> list[LogSelector]:
        """Return the logs of an attempt (the newest by default) that exist so far: ranks, then nodes."""
        backend, handle = self.at_backend(job_id, attempt)
        return backend.log_selectors(handle) if handle else []

    def read_log(
        self, job_id: str, selector: LogSelector, attempt: int | None = None, offset: int = 0
    ) -> Iterator[LogChunk]:
        """Yield the content of one log as it is now.

        Args:
            job_id: Id of the job.
            selector: One of `log_selectors`.
            attempt: Number of the attempt; the newest by default.
            offset: First byte; a later call with the end of the last chunk follows the log.
        """
        backend, handle = self.at_backend(job_id, attempt)
        return backend.logs(handle, selector, offset) if handle else iter(())

    def follow_log(
        self, job_id: str, selector: LogSelector, attempt: int | None = None, offset: int = 0
    ) -> Iterator[LogChunk]:
        """Yield the content of one log as it grows, until its attempt has ended.

        Args:
            job_id: Id of the job.
            selector: The log; it need not exist yet.
            attempt: Number of the attempt; by default the newest when this begins, or the first.
            offset: First byte.
        """
        from orc.orchestrator.clients.following import follow_log

        return follow_log(self._client, self._client.workspace.sleep, job_id, selector, attempt, offset)

    def metrics(self, job_id: str) -> Reader:
        """Return a reader of what the training of a job measures; each `read` goes on from where it stopped.

        Raises:
            JobNotFound: There is no such job.
        """
        from orc.orchestrator.insight.metrics import Reader

        return Reader(self._client.workspace, self._client._checked_id(job_id))

    def log_file(self, job_id: str, selector: LogSelector, attempt: int | None = None) -> str | None:
        """Return the path of one log on this machine; `None` where it has to be read with `read_log`."""
        backend, handle = self.at_backend(job_id, attempt)
        return backend.log_file(handle, selector) if handle else None

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

    def queueing_clusters(self) -> tuple[list[str], dict[str, LaunchError]]:
        """Return the clusters with a queue of their own, and the errors of those that fail to open. Contacts none."""
        from orc.launchers.backends.base import SupportsQueue

        return self._client.workspace.clusters_with(SupportsQueue)

    def queue(self, cluster: str, user: str | None = None) -> QueueReport:
        """Return the cluster's own queue, and our jobs in it.

        Where users have accounts of their own there, it is asked with that of *user*, about the jobs of that account.

        Args:
            cluster: Its name.
            user: Who asks; whoever runs this process by default.

        Raises:
            LaunchError: It has none, does not answer, or *user* has no account there.
        """
        from orc.launchers.backends.base import Handle, SupportsQueue

        ws = self._client.workspace
        plain = ws.backend(cluster)
        if not isinstance(plain, SupportsQueue):
            raise LaunchError(f"clusters of kind {plain.kind} have no queue of their own", where=cluster)
        backend = ws.backend_of_user(cluster, ws.user if user is None else user)
        assert isinstance(backend, SupportsQueue)  # of the same kind
        ours = []
        for job in ws.ledger.active():
            if job.cluster == cluster and job.attempt is not None and job.attempt.handle:
                with suppress(LaunchError):  # its owner has no account there any more
                    if ws.backend_of_attempt(cluster, job.owner, job.attempt) is backend:
                        ours.append(Handle.from_dict(job.attempt.handle))
        return backend.queue(ours)

    def at_backend(self, job_id: str, number: int | None) -> tuple[Backend, Handle | None]:
        """Return the backend of a job, and the handle of one of its attempts there (the newest by default)."""
        from orc.launchers.backends.base import Handle

        ledger = self._client.workspace.ledger
        job = ledger.job(self._client._checked_id(job_id))
        assert job is not None
        attempts = {attempt.number: attempt for attempt in ledger.attempts(job_id)}
        if number is not None and number not in attempts:
            raise JobNotFound(f"{job_id} has no attempt {number}", hint=f"it has {len(attempts)}")
        chosen = attempts.get(number or job.number)
        ws = self._client.workspace
        if chosen is None or not chosen.handle:
            return ws.backend_of_user(job.cluster, job.owner), None
        return ws.backend_of_attempt(job.cluster, job.owner, chosen), Handle.from_dict(chosen.handle)
