"""Executor of submitit whose jobs are jobs of orc. Imported by programs that use submitit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from submitit.core.core import Executor, Job
from submitit.core.utils import DelayedSubmission

from orc.launchers.backends.base import SupportsArrays
from orc.launchers.backends.slurm.submitit_parameters import read_parameters
from orc.orchestrator.client import Client


class OrcExecutor(Executor):
    """``submitit.AutoExecutor`` for the clusters of clusters.yaml.

    ``submit``, ``map_array``, ``submit_array`` and ``batch`` return `FunctionJob` objects, which have the methods of
    submitit's jobs.

    Args:
        folder: Taken for the sake of programs that pass it; logs and results are in the jobs' own directories.
        cluster: A name in clusters.yaml.
        client: Client to submit with; one of its own by default.
        max_num_timeout: Number of time limits after which a checkpointable callable goes on.
    """

    def __init__(
        self,
        folder: str | Path = ".",
        cluster: str = "local",
        *,
        client: Client | None = None,
        max_num_timeout: int = 3,
    ) -> None:
        super().__init__(folder)
        self.cluster = cluster
        self.client = client or Client()
        self.max_num_timeout = max_num_timeout

    def _internal_update_parameters(self, **kwargs: Any) -> None:
        read_parameters({**self.parameters, **kwargs})  # what cannot be carried is rejected now
        self.parameters.update(kwargs)

    def _internal_process_submissions(self, delayed_submissions: list[DelayedSubmission]) -> list[Job[Any]]:
        asked = read_parameters(self.parameters)
        many = len(delayed_submissions) > 1
        jobs: list[Any] = self.client.submit_calls(
            [(delayed.function, delayed.args, delayed.kwargs) for delayed in delayed_submissions],
            many=many,
            cluster=self.cluster,
            resources=asked.resources,
            name=asked.name,
            at_once=asked.at_once
            if many and isinstance(self.client.workspace.backend(self.cluster), SupportsArrays)
            else None,
            max_timeouts=self.max_num_timeout,
            job={"setup": list(asked.setup)} if asked.setup else None,
        )
        return jobs
