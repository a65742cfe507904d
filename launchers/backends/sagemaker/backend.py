"""Backend of kind sagemaker: attempts are training jobs of one account and region. Rendering is pure (`rendering`)."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orc.launchers.agent.records import RECORD_BYTES, parse_object
from orc.launchers.backends.base import (
    Backend,
    Handle,
    LogChunk,
    LogSelector,
    Observation,
    Phase,
    Placement,
    Snapshot,
    raise_unreached,
    require_secrets,
)
from orc.launchers.backends.sagemaker.names import (
    ACCOUNT,
    S3Location,
    default_bucket,
    is_default_bucket,
    training_job_name,
)
from orc.launchers.backends.sagemaker.rendering import REQUEST, render_plan, secret_name
from orc.launchers.backends.sagemaker.settings import ClusterOptions, JobOptions, read_cluster_settings, read_settings
from orc.launchers.containers.layout import AGENT, attempt_uri, job_uri, source_digest
from orc.launchers.errors import AmbiguousSubmit, BackendError, LaunchError, SpecError
from orc.launchers.findings import Finding
from orc.launchers.ids import AttemptId

if TYPE_CHECKING:
    from orc.launchers.attempts.reader import AttemptRecords
    from orc.launchers.backends.sagemaker.aws import AwsService
    from orc.launchers.backends.sagemaker.logs import Logs
    from orc.launchers.backends.sagemaker.verdict import Job
    from orc.launchers.plan import Plan
    from orc.launchers.spec import JobSpec, LoadedJob
    from orc.launchers.spec.clusters import Cluster


_log = logging.getLogger(__name__)
# So many attempts are described one by one; more of them are looked up in lists of a hundred.
FEW = 10
# Of so many running attempts the records are read as well, for what the runtime tells of its progress.
WATCHED = 25
ENTRY_PROGRAM = Path(__file__).with_name("entry.py")
_LISTED_BEFORE_S = 300.0  # clocks differ


@dataclass(frozen=True)
class AttemptInputs:
    """Inputs of an attempt: the request for its training job, and the configuration of its agents."""

    request: Mapping[str, Any]
    config: Mapping[str, Any]

    @property
    def nnodes(self) -> int:
        """Number of instances."""
        return int(self.config.get("nnodes", 1))

    @property
    def nproc(self) -> int:
        """Processes on each."""
        return int(self.config.get("nproc", 1))

    @property
    def job_uri(self) -> str:
        """The job's directory, as SageMaker brings it to S3."""
        return job_uri(str(self.request["CheckpointConfig"]["S3Uri"]), self.config)

    @property
    def records_uri(self) -> str:
        """The attempt's directory there."""
        return attempt_uri(str(self.request["CheckpointConfig"]["S3Uri"]), self.config)


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
            what = f"the cluster {cluster.name} has a root, but orc's files are in S3"
            hint = "Write `bucket` and `prefix` under `options:` instead."
            raise SpecError(what, where=f"cluster {cluster.name}", hint=hint)
        if self.place.region is None:
            from orc.launchers.spec.clusters import options_document

            what = f"the cluster {cluster.name} has no region"
            hint = "Write it under `options:`, as in  region: us-east-1."
            raise SpecError(what, where=options_document(cluster).where, hint=hint)
        self.region = self.place.region
        self._inputs: dict[str, AttemptInputs] = {}

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
    def location(self) -> S3Location:
        """Location of orc's objects in S3."""
        bucket = self.place.bucket or default_bucket(self.region, self.aws.account())
        return S3Location(bucket, self.place.prefix.strip("/"))

    @cached_property
    def _logs(self) -> Logs:
        """Logs of the training jobs; each is read on from where it was left."""
        from orc.launchers.backends.sagemaker.logs import Logs

        return Logs(self.aws)

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
        from orc.launchers.backends.sagemaker.preflight import check

        return check(self.aws, plan, self.cluster.name)

    def stage(self, snapshot: Snapshot, plan: Plan | None = None) -> None:
        """Upload the snapshot's trees as one archive, unless they are there."""
        from orc.launchers.containers.inputs import stage

        bucket = self.location.bucket
        if is_default_bucket(bucket) and not self.aws.has_bucket(bucket):
            self.aws.create_bucket(bucket)
        stage(self.aws, self.location.snapshot(source_digest(snapshot)), snapshot, self.state_dir)

    def load_estimator(self, estimator: object, *, name: str | None = None, inputs: object = None) -> LoadedJob:
        """Return the job that an estimator of SageMaker's SDK (version 2), or a mapping of its arguments, describes."""
        from orc.launchers.backends.sagemaker.estimators import load_estimator

        return load_estimator(estimator, self.cluster, name=name, inputs=inputs)

    # -- the start

    def submit(self, plan: Plan, secrets: Mapping[str, str]) -> Handle:
        """Upload the attempt's inputs, then send the request. A job that is there already is adopted."""
        from orc.launchers.backends.sagemaker.aws import NameTaken

        secrets = require_secrets(plan, secrets)
        try:
            _log.info("Configuring Amazon SageMaker environment in %s", self.region)
            request = self._upload(plan, secrets)
            _log.info("Converting Arguments to Hyperparameters: %d", len(request.get("HyperParameters", {})))
            _log.info("Creating training job %s", request["TrainingJobName"])
            name, at = str(request["TrainingJobName"]), time.time()
            self.aws.create(request)
        except NameTaken:
            found = self._adopt(name, plan.marker)
            if found is None:
                error = BackendError(
                    f"there is a training job named {name} already, and it is not this attempt's",
                    where=f"cluster {self.cluster.name}",
                    hint="Submit again, or under another base_job_name.",
                )
                raise self._forget(plan, error) from None
            return found
        except AmbiguousSubmit:
            raise
        except BackendError as error:
            raise self._forget(plan, error) from None
        return self._handle(plan.marker, name, at)

    def _upload(self, plan: Plan, secrets: Mapping[str, str]) -> dict[str, Any]:
        """Upload all that the attempt reads; return the request as it is to be sent."""
        from orc.launchers.containers.inputs import upload_inputs

        agents, order = plan.files
        request = self._completed(order.content)
        text = json.dumps(request, indent=2, ensure_ascii=False) + "\n"
        self.aws.put(self._with_account(order.path), text.encode())
        own = {name: secrets[name] for name in plan.secrets}
        if own and self.place.secrets == "secretsmanager":
            tags = {"orc:marker": plan.marker}
            self.aws.put_secret(secret_name(plan.attempt), json.dumps(own) + "\n", tags)
            own = {}
        upload_inputs(self.aws, self.location.attempt(plan.attempt), agents.content, own, ENTRY_PROGRAM)
        return request

    def _completed(self, content: str) -> dict[str, Any]:
        """Return the request with what only AWS and the SDK have: role, image, network."""
        from orc.launchers.backends.sagemaker.images import is_pending, pending

        request: dict[str, Any] = json.loads(self._with_account(content))
        algorithm = request["AlgorithmSpecification"]
        if is_pending(algorithm["TrainingImage"]):
            algorithm["TrainingImage"] = self.aws.image(pending(algorithm["TrainingImage"]))
        return request

    def _with_account(self, text: str) -> str:
        return text.replace(ACCOUNT, self.aws.account()) if ACCOUNT in text else text

    def _forget(self, plan: Plan, why: BackendError) -> BackendError:
        """Delete what is private of an attempt that will never run; return *why*, which also tells if that failed."""
        if left := self._remove_private(plan.attempt, json.loads(plan.files[0].content)):
            why.hint = f"{why.hint} The attempt's {left}.".lstrip()
        return why

    def _remove_private(self, attempt: AttemptId, config: Mapping[str, Any]) -> str:
        """Delete the secrets of an attempt and the token of its agents; return what to tell where that failed."""
        from orc.launchers.containers.inputs import remove_private

        try:
            remove_private(self.aws, self.location.attempt(attempt), config)
            if config.get("secrets") and self.place.secrets == "secretsmanager":
                self.aws.delete_secret(secret_name(attempt))
        except LaunchError as error:
            return f"secrets may still be at AWS, and could not be removed: {error.what}"
        return ""

    def find(self, marker: str, hosts: Collection[str] = (), *, complete: bool = True) -> Handle | None:
        """Return the training job that the attempt's request names."""
        inputs = self._inputs_of([marker]).get(marker)  # objects are there before the job is
        name = str(inputs.request["TrainingJobName"]) if inputs else training_job_name(AttemptId.from_marker(marker))
        handle = self._adopt(name, marker)
        if handle is None and not complete:  # what has its inputs and no training job is to have none
            self._forget_attempt(marker)
        return handle

    def _adopt(self, name: str, marker: str) -> Handle | None:
        """The training job *name*, if it is that attempt's."""
        from orc.launchers.backends.sagemaker.request import MARKER_VARIABLE

        data = self.aws.describe(name)
        if data is None:
            return None
        found = (data.get("Environment") or {}).get(MARKER_VARIABLE)
        if found is None:
            found = self.aws.tags(str(data["TrainingJobArn"])).get("orc:marker")
        return self._handle(marker, name, data["CreationTime"].timestamp()) if found == marker else None

    def _handle(self, marker: str, name: str, at: float) -> Handle:
        return Handle(self.cluster.name, self.kind, marker, name, at)

    # -- afterwards

    def poll(self, handles: Sequence[Handle]) -> dict[Handle, Observation]:
        """Return observations: few jobs are described, many listed; the agents' records tell the ends apart."""
        now = time.time()
        rows = self._look(handles)
        jobs = {handle: rows.get(handle.native_id) for handle in handles}
        ended = [handle for handle, job in jobs.items() if job is not None and job.ended]
        running = [handle for handle, job in jobs.items() if job is not None and not job.ended]
        records = self._records([*ended, *(running if len(running) <= WATCHED else ())])
        return {handle: self._judge(handle, job, records.get(handle.marker), now) for handle, job in jobs.items()}

    def _judge(self, handle: Handle, job: Job | None, records: AttemptRecords | None, now: float) -> Observation:
        from orc.launchers.backends.sagemaker.verdict import judge

        inputs = self._inputs.get(handle.marker)
        cost = cost_text(job.billable_s if job else None, inputs.request if inputs else {}, self.place.prices)
        seen = judge(job, records, age_s=now - handle.submitted_at, cost=cost)
        if not seen.phase.ended or seen.phase is Phase.LOST or inputs is None:
            return seen
        left = self._remove_private(AttemptId.from_marker(handle.marker), inputs.config)
        reasons = [seen.reason, f"its {left}" if left else ""]
        return replace(seen, reason="; ".join(filter(None, reasons)))

    def _look(self, handles: Sequence[Handle]) -> dict[str, Job]:
        """The training jobs by name; those that have ended with all about them."""
        from orc.launchers.backends.sagemaker.verdict import Job

        names = [handle.native_id for handle in handles]
        found: dict[str, Job] = {}
        if len(names) > FEW:
            since = min(handle.submitted_at for handle in handles) - _LISTED_BEFORE_S
            missing = set(names)
            for row in self.aws.summaries(since=max(since, 0.0) or None):
                if (name := str(row["TrainingJobName"])) in missing:
                    missing.discard(name)
                    found[name] = Job.of(row)
                if not missing:
                    break
            names = [name for name in names if name not in found or found[name].ended]
        for name in names:
            data = self.aws.describe(name)
            if data is not None:
                found[name] = Job.of(data)
        return found

    def _records(self, handles: Sequence[Handle]) -> dict[str, AttemptRecords]:
        """Return the agents' records by marker, as far as they have reached S3."""
        from orc.launchers.containers.inputs import read_records

        inputs = self._inputs_of([handle.marker for handle in handles])
        read = read_records(self.aws, {each.records_uri: each.config for each in inputs.values()})
        return {marker: read[each.records_uri] for marker, each in inputs.items()}

    def _inputs_of(self, markers: Iterable[str]) -> dict[str, AttemptInputs]:
        """Return the inputs of attempts, from the objects of their submission; missing ones are left out."""
        markers = list(markers)
        unknown = [marker for marker in markers if marker not in self._inputs]
        places = {marker: self.location.attempt(AttemptId.from_marker(marker)) for marker in unknown}
        found = self.aws.get_many(
            [place + name for place in places.values() for name in (AGENT, REQUEST)], RECORD_BYTES
        )
        for marker, place in places.items():
            if place + AGENT in found and place + REQUEST in found:
                request, config = (parse_object(found[place + name]) for name in (REQUEST, AGENT))
                if request is not None and config is not None:  # another program may have overwritten them
                    self._inputs[marker] = AttemptInputs(request, config)
        return {marker: self._inputs[marker] for marker in markers if marker in self._inputs}

    def log_selectors(self, handle: Handle) -> list[LogSelector]:
        """Return the selectors of the hosts that have printed something so far."""
        inputs = self._inputs_of([handle.marker]).get(handle.marker)
        return self._logs.selectors(handle.native_id, inputs.nnodes, inputs.nproc) if inputs else []

    def logs(self, handle: Handle, selector: LogSelector, offset: int = 0) -> Iterator[LogChunk]:
        """From CloudWatch; nothing while it has nothing."""
        inputs = self._inputs_of([handle.marker]).get(handle.marker)
        nproc = inputs.nproc if inputs else 1
        for data in self._logs.read(handle.native_id, selector, offset, nproc=nproc):
            yield LogChunk(selector, offset, data)
            offset += len(data)

    def read_file(self, handle: Handle, name: str, offset: int = 0, limit: int | None = None) -> bytes:
        """From the job's directory, as SageMaker has brought it to S3 last."""
        inputs = self._inputs_of([handle.marker]).get(handle.marker)
        return (self.aws.get(f"{inputs.job_uri}/{name}", offset, limit) or b"") if inputs else b""

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
        self._forget_attempt(handle.marker)

    def _forget_attempt(self, marker: str) -> None:
        """Delete what is private of an attempt that is over without an end, or was never started."""
        if (inputs := self._inputs_of([marker]).get(marker)) is None:
            return
        if left := self._remove_private(AttemptId.from_marker(marker), inputs.config):
            _log.warning("%s: its %s", marker, left)


def cost_text(billable_s: int | None, request: Mapping[str, object], prices: Mapping[str, float]) -> str:
    """``331 billable seconds on 2 × ml.g5.xlarge: 0.26``; empty when nothing was billed (yet).

    *prices* are for one instance and one hour, in whatever currency they are given; without one there is no sum.
    SageMaker counts billable seconds of spot instances with their savings, so no other price goes with them.
    """
    if not billable_s:
        return ""
    resources = request.get("ResourceConfig")
    resources = resources if isinstance(resources, Mapping) else {}
    count, name = int(resources.get("InstanceCount") or 1), str(resources.get("InstanceType") or "")
    text = f"{billable_s} billable seconds on {f'{count} × ' if count > 1 else ''}{name}"
    price = prices.get(name)
    return text if price is None else f"{text}: {billable_s / 3600 * price * count:.2f}"


def training_job(cluster: Cluster | str, name: str) -> Any:
    """Return a training job as an object of the SDK: to wait for it, to register its model, to deploy it.

        job = training_job("aws", "orc-digits-k3f9a2m4xq-a1")
        job.wait()
        job.model_artifacts.s3_model_artifacts

    Args:
        cluster: A cluster of kind sagemaker, or its name in clusters.yaml. Its profile and region are those of the job.
        name: The native id of an attempt, as ``orc status`` shows it.

    Returns:
        The `sagemaker.core.resources.TrainingJob`.

    Raises:
        BackendError: There is no such training job, or AWS refuses to show it.
        BackendUnreachable: AWS does not answer, or the SDK is not installed.
    """
    from orc.launchers.spec.clusters import get_cluster

    backend = SagemakerBackend(get_cluster(cluster) if isinstance(cluster, str) else cluster)
    return backend.aws.training_job(name)
