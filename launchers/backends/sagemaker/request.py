"""The CreateTrainingJob request of one attempt. Pure: the same job makes the same bytes, with no SDK and no network."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from orc.launchers.backends.sagemaker.images import Image
from orc.launchers.backends.sagemaker.instances import Instance
from orc.launchers.backends.sagemaker.names import (
    ACCOUNT,
    S3Location,
    default_bucket,
    partition_of,
    training_job_name,
)
from orc.launchers.backends.sagemaker.readers import is_tag
from orc.launchers.backends.sagemaker.settings import Settings
from orc.launchers.containers.layout import ENTRY
from orc.launchers.errors import RenderError

if TYPE_CHECKING:
    from orc.launchers.backends.sagemaker.sections import Channel
    from orc.launchers.ids import AttemptId
    from orc.launchers.spec import JobSpec


INPUT = "/opt/ml/input/data"
CHANNEL, ATTEMPT_CHANNEL = "orc", "orc-attempt"
MARKER_VARIABLE = "ORC_ATTEMPT_MARKER"
DEFAULT_RUN_S = 86400
# The agents end an attempt at the job's own time limit; SageMaker's comes after that, if they should hang.
MARGIN_S = 60
MAX_RUN_S = 28 * 24 * 3600


def s3_location_of(settings: Settings, region: str) -> S3Location:
    """Return the location of orc's objects; the account may have to be filled in."""
    place = settings.place
    bucket = place.bucket or default_bucket(region, place.account or ACCOUNT)
    return S3Location(bucket, place.prefix.strip("/"))


def training_request(
    job: JobSpec,
    attempt: AttemptId,
    settings: Settings,
    instance: Instance,
    *,
    region: str,
    snapshot: str,
    python: str,
    hyperparameters: Mapping[str, str],
) -> dict[str, Any]:
    """Return the CreateTrainingJob request. *snapshot* is the digest of the trees; *job* is adapted already.

    `names.ACCOUNT` and `images.is_pending` stand for what a submission asks AWS and the SDK. Raises `RenderError`.
    """
    location = s3_location_of(settings, region)
    _refuse(job, settings, instance)
    request: dict[str, Any] = {
        "TrainingJobName": training_job_name(attempt, settings.base_job_name),
        "AlgorithmSpecification": _algorithm(job, settings, instance, region, python),
        "RoleArn": _role(job, settings, region),
        "InputDataConfig": [
            own_channel(CHANNEL, location.snapshot(snapshot)),
            own_channel(ATTEMPT_CHANNEL, location.attempt(attempt)),
            *channels(job, settings),
        ],
        "OutputDataConfig": given(
            S3OutputPath=settings.output_path or f"{location.job(attempt.job)}/output",
            KmsKeyId=settings.output_kms_key,
            CompressionType="NONE" if settings.disable_output_compression else None,
        ),
        "ResourceConfig": given(
            InstanceType=instance.name,
            InstanceCount=job.resources.max_nodes,
            VolumeSizeInGB=settings.volume_size,
            VolumeKmsKeyId=settings.volume_kms_key,
            KeepAlivePeriodInSeconds=settings.keep_alive_period_in_seconds,
            TrainingPlanArn=settings.training_plan,
            InstancePlacementConfig=_section(settings.instance_placement_config),
        ),
        "StoppingCondition": _stopping(job, settings),
        "CheckpointConfig": {"S3Uri": checkpoint_uri(settings, location, attempt), "LocalPath": local_path(settings)},
        "EnableNetworkIsolation": settings.enable_network_isolation,
        "EnableInterContainerTrafficEncryption": settings.encrypt_inter_container_traffic,
        "EnableManagedSpotTraining": settings.use_spot_instances,
        "Environment": {**settings.environment, MARKER_VARIABLE: attempt.marker},
        "Tags": _tags(job, attempt, settings),
    }
    if hyperparameters:
        request["HyperParameters"] = dict(hyperparameters)
    return {**request, **_optional(job, settings)}


def checkpoint_uri(settings: Settings, location: S3Location, attempt: AttemptId) -> str:
    """Return the URI of the job's checkpoints and of the records of its attempts: the same for all attempts."""
    return (settings.checkpoint_s3_uri or f"{location.job(attempt.job)}/checkpoints").rstrip("/")


def local_path(settings: Settings) -> str:
    """Return the directory of the checkpoints in the container."""
    return settings.checkpoint_local_path.rstrip("/")


def request_text(request: Mapping[str, Any]) -> str:
    """The request as a file of the plan."""
    return json.dumps(request, indent=2, ensure_ascii=False) + "\n"


def _refuse(job: JobSpec, settings: Settings, instance: Instance) -> None:
    """Raise `RenderError` for settings that AWS would refuse, or that contradict each other."""
    wrong: list[tuple[str, str]] = []
    if settings.use_spot_instances and settings.keep_alive_period_in_seconds is not None:
        what = "use_spot_instances and keep_alive_period_in_seconds exclude each other: spot instances do not stay"
        wrong.append((what, "Remove one of them."))
    if settings.volume_kms_key and instance.local_disk:
        what = f"volume_kms_key: the disks of {instance.name} are its own, encrypted with a key of their own"
        wrong.append((what, "Leave volume_kms_key out."))
    access = settings.training_repository_access_mode or settings.training_repository_credentials_provider_arn
    if access not in (None, "Platform") and not settings.subnets:
        what = "training_repository_access_mode Vpc: a private registry is reached from a VPC alone"
        wrong.append((what, "Set subnets and security_group_ids to those that see it."))
    secrets = job.secrets and settings.place.secrets == "secretsmanager"
    if secrets and settings.enable_network_isolation:
        what = "enable_network_isolation: without a network the job cannot ask Secrets Manager for its secrets"
        wrong.append((what, "Set `secrets: s3` in the cluster's options."))
    for what, hint in wrong:
        raise RenderError(what, where=job.name, hint=hint)


def _algorithm(job: JobSpec, settings: Settings, instance: Instance, region: str, python: str) -> dict[str, Any]:
    credentials = settings.training_repository_credentials_provider_arn
    access = settings.training_repository_access_mode or ("Vpc" if credentials else None)
    repository = None
    if access:
        auth = {"TrainingRepositoryCredentialsProviderArn": credentials} if credentials else None
        repository = given(TrainingRepositoryAccessMode=access, TrainingRepositoryAuthConfig=auth)
    return given(
        TrainingImage=settings.image_uri or _stock_image(job, settings, instance, region),
        TrainingInputMode=settings.input_mode,
        ContainerEntrypoint=[python, "-I", "-S", f"{INPUT}/{ATTEMPT_CHANNEL}/{ENTRY}"],
        MetricDefinitions=[dict(each) for each in settings.metric_definitions] or None,
        EnableSageMakerMetricsTimeSeries=settings.enable_sagemaker_metrics,
        TrainingImageConfig=repository,
    )


def _stock_image(job: JobSpec, settings: Settings, instance: Instance, region: str) -> str:
    if instance.neuron:
        raise RenderError(
            f"{instance.name} has AWS's own accelerators, which the stock PyTorch images cannot use",
            where=job.name,
            hint="Give an image_uri with the Neuron SDK.",
        )
    image = Image(
        settings.pytorch_version,
        settings.transformers_version,
        settings.py_version,
        instance.gpus > 0,
        instance.name,
        region,
    )
    try:
        return image.uri
    except RenderError as error:
        raise RenderError(error.what, where=job.name, hint=error.hint) from None


def _role(job: JobSpec, settings: Settings, region: str) -> str:
    if settings.role is None:
        raise RenderError(
            "no execution role is given",
            where=job.name,
            hint="Set `role` in the cluster's options: the name or the ARN of an IAM role that SageMaker may assume.",
        )
    if settings.role.startswith("arn:"):
        return settings.role
    account = settings.place.account or ACCOUNT
    return f"arn:{partition_of(region)}:iam::{account}:role/{settings.role}"


def _stopping(job: JobSpec, settings: Settings) -> dict[str, int]:
    own = job.resources.time_s
    if own is not None and settings.max_run is not None and settings.max_run < own:
        raise RenderError(
            f"resources.time = {own} seconds, but max_run = {settings.max_run}",
            where=job.name,
            hint="Leave one of them out.",
        )
    name, longest = ("resources.time", own) if own is not None else ("max_run", settings.max_run or 0)
    if longest > MAX_RUN_S:
        raise RenderError(
            f"{name} = {longest} seconds: SageMaker trains {MAX_RUN_S} seconds (28 days) at most",
            where=job.name,
            hint="Write 28d or less, and `timeout` in retry.on for more than that.",
        )
    margin = None if own is None else min(own + MARGIN_S + int(job.grace), MAX_RUN_S)
    run = settings.max_run or margin or DEFAULT_RUN_S
    if not settings.use_spot_instances:
        if settings.max_wait is not None:
            raise RenderError(
                "max_wait is for spot instances alone",
                where=job.name,
                hint="Write use_spot_instances: true as well, or leave max_wait out.",
            )
        return given(MaxRuntimeInSeconds=run, MaxPendingTimeInSeconds=settings.max_pending)
    wait = settings.max_wait if settings.max_wait is not None else run
    if wait < run:
        raise RenderError(
            f"max_wait = {wait} seconds is less than the {run} seconds that the job may train",
            where=job.name,
            hint="max_wait is the time for waiting and training together; set max_run (or resources.time) as well.",
        )
    return given(MaxRuntimeInSeconds=run, MaxWaitTimeInSeconds=wait, MaxPendingTimeInSeconds=settings.max_pending)


def _tags(job: JobSpec, attempt: AttemptId, settings: Settings) -> list[dict[str, str]]:
    """orc's own, the settings', and those of the job that AWS takes."""
    own = {"orc:marker": attempt.marker, "orc:job": attempt.job}
    if is_tag("orc:name", job.name):
        own["orc:name"] = job.name
    taken = {key: value for key, value in job.tags.items() if is_tag(key, value) and not key.startswith("aws:")}
    found = {**taken, **settings.tags, **own}
    return [{"Key": key, "Value": value} for key, value in sorted(found.items())]


def _optional(job: JobSpec, settings: Settings) -> dict[str, Any]:
    """Sections that are there only when they are requested."""
    if bool(settings.subnets) != bool(settings.security_group_ids):
        raise RenderError(
            "subnets and security_group_ids are given together, or not at all",
            where=job.name,
            hint="A VPC needs both.",
        )
    vpc = {"SecurityGroupIds": list(settings.security_group_ids), "Subnets": list(settings.subnets)}
    profiler = _section(settings.profiler_config)
    if settings.disable_profiler is not None:
        profiler = {**(profiler or {}), "DisableProfiler": settings.disable_profiler}
    retries = settings.max_retry_attempts
    return given(
        VpcConfig=vpc if settings.subnets else None,
        RetryStrategy={"MaximumRetryAttempts": retries} if retries else None,
        TensorBoardOutputConfig=_section(settings.tensorboard_output_config),
        ProfilerConfig=profiler,
        ExperimentConfig=_section(settings.experiment_config),
        InfraCheckConfig=_switch("EnableInfraCheck", settings.enable_infra_check),
        RemoteDebugConfig=_switch("EnableRemoteDebug", settings.enable_remote_debug),
        SessionChainingConfig=_switch("EnableSessionTagChaining", settings.enable_session_tag_chaining),
    )


def _section(value: Mapping[str, Any] | None) -> dict[str, Any] | None:
    return None if value is None else dict(value)


def _switch(name: str, value: bool | None) -> dict[str, bool] | None:
    return None if value is None else {name: value}


def own_channel(name: str, uri: str) -> dict[str, Any]:
    """Return an input channel of orc's own."""
    return {
        "ChannelName": name,
        "DataSource": {
            "S3DataSource": {"S3DataType": "S3Prefix", "S3Uri": uri, "S3DataDistributionType": "FullyReplicated"}
        },
        "InputMode": "File",
    }


def channels(job: JobSpec, settings: Settings) -> Iterator[dict[str, Any]]:
    """Return the input channels of the job. Raises `RenderError` for those that SageMaker would refuse."""
    for name, entry in settings.inputs.items():
        for what, hint in _wrong(settings, entry):
            raise RenderError(f"inputs: {name}: {what}", where=job.name, hint=hint)
        yield _file_system(name, entry, settings) if entry.file_system_id else _objects(name, entry)


def given(**values: Any) -> dict[str, Any]:
    """Return a part of the request without the keys that have no value."""
    return {key: value for key, value in values.items() if value is not None}


def _wrong(settings: Settings, entry: Channel) -> Iterator[tuple[str, str]]:
    mode = entry.input_mode or settings.input_mode
    if (entry.s3_data or "").startswith("file://"):
        yield (
            f"SageMaker cannot read {entry.s3_data}, which is on this machine",
            "Copy it to S3 (`aws s3 sync`), or run the job here (`--cluster local`).",
        )
    if entry.file_system_id and not settings.subnets:
        yield "a file system is reached from a VPC alone", "Set subnets and security_group_ids to those that see it."
    if entry.s3_data_type == "AugmentedManifestFile" and mode != "Pipe":
        yield f"an AugmentedManifestFile is read with input_mode Pipe, not {mode}", "Set input_mode: Pipe for it."
    if entry.compression == "Gzip" and mode != "Pipe":
        yield f"SageMaker decompresses with input_mode Pipe, not {mode}", "Leave compression out; the job decompresses."


def _file_system(name: str, entry: Channel, settings: Settings) -> dict[str, Any]:
    return given(
        ChannelName=name,
        DataSource={
            "FileSystemDataSource": {
                "FileSystemId": entry.file_system_id,
                "FileSystemAccessMode": entry.file_system_access_mode,
                "FileSystemType": entry.file_system_type,
                "DirectoryPath": entry.directory_path,
            }
        },
        ContentType=entry.content_type,
        # It is mounted, whatever way the other channels come.
        InputMode="File" if settings.input_mode != "File" else entry.input_mode,
    )


def _objects(name: str, entry: Channel) -> dict[str, Any]:
    source = given(
        S3DataType=entry.s3_data_type,
        S3Uri=entry.s3_data,
        S3DataDistributionType=entry.distribution,
        AttributeNames=list(entry.attribute_names) if entry.attribute_names else None,
    )
    return given(
        ChannelName=name,
        DataSource={"S3DataSource": source},
        ContentType=entry.content_type,
        CompressionType=entry.compression,
        RecordWrapperType=entry.record_wrapping,
        InputMode=entry.input_mode,
        ShuffleConfig=None if entry.shuffle_seed is None else {"Seed": entry.shuffle_seed},
    )
