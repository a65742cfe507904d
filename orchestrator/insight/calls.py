"""Methods of `Client` that compare jobs and add up what they cost."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

from orc.launchers.errors import LaunchError

if TYPE_CHECKING:
    from orc.orchestrator.client import Client
    from orc.orchestrator.insight.comparison import Summaries


class InsightCalls:
    """Methods of `Client` for comparisons and costs."""

    @property
    def _client(self) -> Client:
        return cast("Client", self)

    def diff(self, a: str, b: str) -> dict[str, Any]:
        """Return the differences between two jobs, from `orc.orchestrator.insight.comparison.compare`.

        Args:
            a: Id of the first job.
            b: Id of the second one.

        Raises:
            JobNotFound: There is no such job.
        """
        from orc.orchestrator.insight.comparison import compare

        views = [self._client.job(job_id) for job_id in (a, b)]
        return compare(
            self._client.workspace, views[0], views[1], {job_id: self._measured(job_id) for job_id in (a, b)}
        )

    def _measured(self, job_id: str) -> Summaries | str:
        from orc.orchestrator.insight.curves import Curves

        known = self._client.measured
        try:
            return known.of(job_id).update(self._client.workspace, job_id, Curves.summaries, known.seconds)
        except LaunchError as error:
            return error.what

    def costs(
        self,
        *,
        by: str = "job",
        job_ids: Sequence[str] | None = None,
        owner: str | None = None,
        since: float | None = None,
        until: float | None = None,
    ) -> dict[str, Any]:
        """Return hours of nodes and GPUs, and what they cost by the prices of clusters.yaml.

        Args:
            by: One of job, user, project, cluster, day, or ``tag:KEY``.
            job_ids: Only these jobs.
            owner: Only jobs of this user.
            since: Only what ran after this time, in seconds since the epoch.
            until: Only what ran before this time.

        Returns:
            ``{"by", "groups": [{"key", "jobs", "attempts", "node_hours", "gpu_hours", "cost", "unpriced_node_hours",
            "running"}], "total"}``; ``cost`` is by currency, and `None` where no price is known.

        Raises:
            LaunchError: They are not grouped so.
        """
        from orc.launchers.spec.clusters import read_clusters
        from orc.orchestrator.insight.costs import add_up, check_way
        from orc.orchestrator.ledger.usage import read_usage

        check_way(by)
        ws = self._client.workspace
        clusters, _ = read_clusters(self._client.clusters_file if self._client.clusters_file.exists() else None)
        with ws.ledger.database.read() as connection:
            used = read_usage(connection, job_ids=job_ids, owner=owner, since=since, until=until)
            return add_up(used, clusters, by=by, now=ws.clock(), since=since, until=until)
