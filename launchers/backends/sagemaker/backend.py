"""The backend of kind sagemaker: rendering is pure (`rendering`), what runs where is a `TrainingJobs`."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from datetime import timedelta
from functools import cached_property
from typing import TYPE_CHECKING, Any

from orc.launchers.backends.base import (
    Backend,
    Handle,
    LogChunk,
    LogSelector,
    Observation,
    Placement,
    Snapshot,
    raise_unreached,
)
from orc.launchers.backends.sagemaker.rendering import render_plan
from orc.launchers.backends.sagemaker.settings import ClusterOptions, JobOptions, read_cluster_settings, read_settings
from orc.launchers.errors import LaunchError, SpecError
from orc.launchers.findings import Finding

if TYPE_CHECKING:
    from pathlib import Path

    from orc.launchers.backends.sagemaker.aws import AwsService
    from orc.launchers.backends.sagemaker.training_jobs import TrainingJobs
    from orc.launchers.ids import AttemptId
    from orc.launchers.plan import Plan
    from orc.launchers.spec import JobSpec, LoadedJob
    from orc.launchers.spec.clusters import Cluster


class SagemakerBackend(Backend):
    """Attempts as training jobs of one account and region."""

    kind = "sagemaker"
    options_model, job_options_model = ClusterOptions, JobOptions
    visibility_s = 30.0
    lost_after_s = 60.0
    keeps_work = False  # it ends with the containers

    def __init__(self, cluster: Cluster, *, state_dir: Path | None = None) -> None:
        super().__init__(cluster, state_dir=state_dir)
        self.place = read_cluster_settings(cluster)
        if cluster.root is not None:
            raise SpecError(
                f"the cluster {cluster.name} has a root, but orc's files are in S3",
                where=f"cluster {cluster.name}",
                hint="Write `bucket` and `prefix` under `options:` instead.",
            )
        if self.place.region is None:
            from orc.launchers.spec.clusters import options_document

            raise SpecError(
                f"the cluster {cluster.name} has no region",
                where=options_document(cluster).where,
                hint="Write it under `options:`, as in  region: us-east-1.",
            )
        self.region = self.place.region

    @property
    def root(self) -> str:
        """The prefix in S3."""
        from orc.launchers.backends.sagemaker.request import s3_location_of
        from orc.launchers.backends.sagemaker.settings import Settings

        return s3_location_of(Settings(place=self.place), self.region).uri

    def checkpoint_dir(self, spec: Mapping[str, Any], job: str) -> str:
        """Return the place in S3."""
        from orc.launchers.backends.sagemaker.rendering import checkpoints_of
        from orc.launchers.spec import JobSpec

        given = spec["checkpoint"]["dir"]
        if given and "://" in given:
            return str(given)
        return checkpoints_of(JobSpec.model_validate(dict(spec)), job, self.cluster)

    @cached_property
    def aws(self) -> AwsService:
        """AWS itself, with the cluster's profile, region and endpoint."""
        from orc.launchers.backends.sagemaker.aws import AwsService

        return AwsService(self.place, self.region, f"cluster {self.cluster.name}")

    @cached_property
    def _jobs(self) -> TrainingJobs:
        from orc.launchers.backends.sagemaker.training_jobs import TrainingJobs

        return TrainingJobs(self.aws, self.place, self.region, self.cluster.name)

    def close(self) -> None:
        """Close all connections; they are made anew when they are needed again."""
        if "aws" in self.__dict__:
            self.aws.close()

    # -- before the start

    def check_installed(self) -> None:
        """Raise `BackendUnreachable` where boto3 is missing."""
        from orc.launchers.backends.sagemaker.aws import sdk_module

        sdk_module("boto3")

    def render(self, job: JobSpec, snapshot: Snapshot, attempt: AttemptId, placement: Placement | None = None) -> Plan:
        """``agent.json``, and the CreateTrainingJob request that is sent."""
        return render_plan(job, snapshot, attempt, self.cluster, read_settings(self.cluster, job), self.region)

    def preflight(self, plan: Plan) -> list[Finding]:
        """Do the credentials work, is the bucket there, can the role be used, does the image suit?"""
        return self._jobs.preflight(plan)

    def stage(self, snapshot: Snapshot, plan: Plan | None = None) -> None:
        """Upload the snapshot's trees as one archive, unless they are there."""
        self._jobs.stage(snapshot, self.state_dir)

    def load_estimator(self, estimator: object, *, name: str | None = None, inputs: object = None) -> LoadedJob:
        """Return the job that an estimator of SageMaker's SDK (version 2), or a mapping of its arguments, describes."""
        from orc.launchers.backends.sagemaker.estimators import load_estimator

        return load_estimator(estimator, self.cluster, name=name, inputs=inputs)

    # -- the start

    def submit(self, plan: Plan, secrets: Mapping[str, str]) -> Handle:
        """Upload the attempt's inputs, then send the request. A job that is there already is adopted."""
        return self._jobs.submit(plan, secrets)

    def find(self, marker: str, hosts: Collection[str] = (), *, complete: bool = True) -> Handle | None:
        """Return the training job that the attempt's request names."""
        handle = self._jobs.find(marker)
        if handle is None and not complete:  # what has its inputs and no training job is to have none
            self._jobs.forget(marker)
        return handle

    # -- afterwards

    def poll(self, handles: Sequence[Handle]) -> dict[Handle, Observation]:
        """Return observations: few jobs are described, many listed; the agents' records tell the ends apart."""
        return self._jobs.poll(handles)

    def log_selectors(self, handle: Handle) -> list[LogSelector]:
        """Return the selectors of the hosts that have printed something so far."""
        return self._jobs.log_selectors(handle)

    def logs(self, handle: Handle, selector: LogSelector, offset: int = 0) -> Iterator[LogChunk]:
        """From CloudWatch; nothing while it has nothing."""
        return self._jobs.read_log(handle, selector, offset)

    def read_file(self, handle: Handle, name: str, offset: int = 0, limit: int | None = None) -> bytes:
        """From the job's directory, as SageMaker has brought it to S3 last."""
        return self._jobs.read_file(handle, name, offset, limit)

    def cancel(self, handles: Sequence[Handle], grace: timedelta) -> None:
        """StopTrainingJob: SIGTERM, and SIGKILL after 120 seconds; the agents keep to the job's own grace in between.

        Raises `PartlyUnreachable` for those that were not told: AWS is out of reach, or refuses; the others are.
        """
        unreached: dict[str, LaunchError] = {}
        for handle in handles:
            try:
                self.aws.stop(handle.native_id)
            except LaunchError as error:
                unreached[handle.marker] = error
        raise_unreached(unreached)

    def reap(self, handle: Handle) -> None:
        """Delete what is private of an attempt whose end SageMaker did not tell; instances end by themselves."""
        self._jobs.forget(handle.marker)
