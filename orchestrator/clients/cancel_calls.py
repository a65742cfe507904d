"""Methods of `Client` that cancel jobs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, cast

from orc.orchestrator.ledger.errors import Conflict, LedgerError
from orc.orchestrator.ledger.lifecycle import Event, Kind

if TYPE_CHECKING:
    from orc.orchestrator.client import Client
    from orc.orchestrator.engine.pass_report import PassReport
    from orc.orchestrator.views import JobView


class CancelCalls:
    """Methods of `Client` that cancel jobs."""

    @property
    def _client(self) -> Client:
        return cast("Client", self)

    def cancel(
        self,
        job_ids: Sequence[str],
        *,
        grace_s: float | None = None,
        on_unreachable: Callable[[Mapping[str, str]], None] | None = None,
    ) -> list[JobView]:
        """Cancel jobs. The request is durable first; those that have ended stay as they are.

        Args:
            job_ids: Ids of the jobs.
            grace_s: Seconds between SIGTERM and SIGKILL; the job's own grace by default.
            on_unreachable: Called with clusters that could not be reached, and the reasons; the next pass tries again.

        Returns:
            The jobs as they are now.

        Raises:
            JobNotFound: There is no such job.
            LedgerError: The request could be neither stored nor sent.
        """
        ids = [self._client._checked_id(job_id) for job_id in job_ids]
        self._client._reopen_ledger()
        for job_id in ids:
            grace = float(self._client.workspace.ledger.spec(job_id)["grace"]) if grace_s is None else grace_s
            self._request_cancel(job_id, grace)
        report = self._client.refresh(ids)
        views = [self._client.job(job_id) for job_id in ids]
        if self._client.workspace.ledger.volatile:
            self._check_cancelled(ids, report)
        if report.unreachable and on_unreachable:
            on_unreachable(report.unreachable)
        return views

    def _check_cancelled(self, ids: Sequence[str], report: PassReport) -> None:
        """Raise `LedgerError` for a cancellation that is neither stored nor sent to the cluster."""
        waiting = [
            job.id
            for job in self._client.workspace.ledger.active(ids)
            if job.attempt is None or job.attempt.cancel_sent_at is None
        ]
        if waiting:
            why = "; ".join(f"{cluster}: {text}" for cluster, text in report.unreachable.items())
            raise LedgerError(
                f"{', '.join(waiting)} cannot be cancelled now: {why or 'not at its cluster yet'}, "
                f"and the wish cannot be kept: {self._client.workspace.ledger.volatile}",
                where=self._client.workspace.ledger.database.url.removeprefix("sqlite:///"),
                hint="free some space and try again",
            )

    def _request_cancel(self, job_id: str, grace_s: float) -> None:
        from orc.orchestrator.engine import job_files

        while True:
            try:
                with self._client.workspace.ledger.transaction(durable=False) as tx:
                    job = tx.find(job_id)
                    if job is None or job.state.terminal:
                        return
                    tx.record(
                        job,
                        Event(Kind.CANCEL_REQUESTED, None, {"grace_s": grace_s}),
                        job_set={"cancel_requested_at": tx.now, "cancel_grace_s": grace_s},
                        # A second request may come with another grace: it is passed on as well.
                        attempt_set={"cancel_sent_at": None},
                    )
                job_files.note_cancelled(self._client.workspace.state_dir, job_id)
                return
            except Conflict:
                continue
