"""The CreateTrainingJob request of one attempt. Pure: the same job makes the same bytes, with no SDK and no network."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from orc.launchers.backends.sagemaker.images import Image
from orc.launchers.backends.sagemaker.instances import Instance
from orc.launchers.backends.sagemaker.names import (
    ACCOUNT,
    ENTRY,
    Home,
    default_bucket,
    partition_of,
    training_job_name,
)
from orc.launchers.backends.sagemaker.readers import is_tag
from orc.launchers.backends.sagemaker.settings import Settings
from orc.launchers.errors import RenderError

if TYPE_CHECKING:
    from orc.launchers.ids import AttemptId
    from orc.launchers.spec import JobSpec

INPUT = "/opt/ml/input/data"
CHANNEL, ATTEMPT_CHANNEL = "orc", "orc-attempt"
MARKER_VARIABLE = "ORC_ATTEMPT_MARKER"
DEFAULT_RUN_S = 86400
# The agents end an attempt at the job's own time limit; SageMaker's comes after that, if they should hang.
MARGIN_S = 60
MAX_TAGS = 50


def home_of(settings: Settings, region: str) -> Home:
    """Where orc's objects are; the account may have to be filled in."""
    place = settings.place
    bucket = place.bucket or default_bucket(region, place.account or ACCOUNT)
    return Home(bucket, place.prefix.strip("/"))


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
    """What is sent. *snapshot* is the digest of the trees; *job* is adapted already.

    `names.ACCOUNT` and `images.is_pending` stand for what a submission asks AWS and the SDK. Raises `RenderError`.
    """
    home = home_of(settings, region)
    request: dict[str, Any] = {
        "TrainingJobName": training_job_name(attempt, settings.base_job_name),
        "AlgorithmSpecification": _algorithm(job, settings, instance, region, python),
        "RoleArn": _role(job, settings, region),
        "InputDataConfig": [
            _own_channel(CHANNEL, home.snapshot(snapshot)),
            _own_channel(ATTEMPT_CHANNEL, home.attempt(attempt)),
            *(_channel(job, settings, name, entry) for name, entry in settings.inputs.items()),
        ],
        "OutputDataConfig": _given(
            S3OutputPath=settings.output_path or f"{home.job(attempt.job)}/output",
            KmsKeyId=settings.output_kms_key,
            CompressionType="NONE" if settings.disable_output_compression else None,
        ),
        "ResourceConfig": _given(
            InstanceType=instance.name,
            InstanceCount=job.resources.max_nodes,
            VolumeSizeInGB=settings.volume_size,
            VolumeKmsKeyId=settings.volume_kms_key,
            KeepAlivePeriodInSeconds=settings.keep_alive_period_in_seconds,
            TrainingPlanArn=settings.training_plan,
        ),
        "StoppingCondition": _stopping(job, settings),
        "CheckpointConfig": {"S3Uri": checkpoint_uri(settings, home, attempt), "LocalPath": local_path(settings)},
        "EnableNetworkIsolation": settings.enable_network_isolation,
        "EnableInterContainerTrafficEncryption": settings.encrypt_inter_container_traffic,
        "EnableManagedSpotTraining": settings.use_spot_instances,
        "Environment": {**settings.environment, MARKER_VARIABLE: attempt.marker},
        "Tags": _tags(job, attempt, settings),
    }
    if hyperparameters:
        request["HyperParameters"] = dict(hyperparameters)
    return {**request, **_optional(job, settings)}


def checkpoint_uri(settings: Settings, home: Home, attempt: AttemptId) -> str:
    """Where the job's checkpoints, and the records of its attempts, are kept: the same for all of its attempts."""
    return (settings.checkpoint_s3_uri or f"{home.job(attempt.job)}/checkpoints").rstrip("/")


def local_path(settings: Settings) -> str:
    """Where they are in the container."""
    return settings.checkpoint_local_path.rstrip("/")


def request_text(request: Mapping[str, Any]) -> str:
    """The request as a file of the plan."""
    return json.dumps(request, indent=2, ensure_ascii=False) + "\n"


def _algorithm(job: JobSpec, settings: Settings, instance: Instance, region: str, python: str) -> dict[str, Any]:
    credentials = settings.training_repository_credentials_provider_arn
    access = settings.training_repository_access_mode or ("Vpc" if credentials else None)
    repository = None
    if access:
        auth = {"TrainingRepositoryCredentialsProviderArn": credentials} if credentials else None
        repository = _given(TrainingRepositoryAccessMode=access, TrainingRepositoryAuthConfig=auth)
    return _given(
        TrainingImage=settings.image_uri or _stock_image(job, settings, instance, region),
        TrainingInputMode=settings.input_mode,
        ContainerEntrypoint=[python, "-I", "-S", f"{INPUT}/{CHANNEL}/{ENTRY}"],
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
    gpu = instance.gpus > 0 or instance.name == "local_gpu"
    image = Image(
        settings.pytorch_version, settings.transformers_version, settings.py_version, gpu, instance.name, region
    )
    try:
        return image.uri
    except RenderError as error:
        raise RenderError(error.what, where=job.name, hint=error.hint) from None


def _role(job: JobSpec, settings: Settings, region: str) -> str:
    if settings.role is None and settings.local_mode:
        return "arn:aws:iam::000000000000:role/local"
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


def _own_channel(name: str, uri: str) -> dict[str, Any]:
    return {
        "ChannelName": name,
        "DataSource": {
            "S3DataSource": {"S3DataType": "S3Prefix", "S3Uri": uri, "S3DataDistributionType": "FullyReplicated"}
        },
        "InputMode": "File",
    }


def _channel(job: JobSpec, settings: Settings, name: str, entry: Mapping[str, Any]) -> dict[str, Any]:
    if str(entry.get("s3_data", "")).startswith("file://") and not settings.local_mode:
        raise RenderError(
            f"inputs: {name}: SageMaker cannot read {entry['s3_data']}, which is on this machine",
            where=job.name,
            hint="Copy it to S3 (`aws s3 sync`), or try the job with --local-contract.",
        )
    if "file_system_id" in entry:
        source: dict[str, Any] = {
            "FileSystemDataSource": {
                "FileSystemId": entry["file_system_id"],
                "FileSystemAccessMode": entry.get("file_system_access_mode", "ro"),
                "FileSystemType": entry["file_system_type"],
                "DirectoryPath": entry["directory_path"],
            }
        }
    else:
        source = {
            "S3DataSource": _given(
                S3DataType=entry.get("s3_data_type", "S3Prefix"),
                S3Uri=entry["s3_data"],
                S3DataDistributionType=entry.get("distribution", "FullyReplicated"),
                AttributeNames=list(entry["attribute_names"]) if "attribute_names" in entry else None,
            )
        }
    return _given(
        ChannelName=name,
        DataSource=source,
        ContentType=entry.get("content_type"),
        CompressionType=entry.get("compression"),
        RecordWrapperType=entry.get("record_wrapping"),
        InputMode=entry.get("input_mode"),
        ShuffleConfig={"Seed": entry["shuffle_seed"]} if "shuffle_seed" in entry else None,
    )


def _stopping(job: JobSpec, settings: Settings) -> dict[str, int]:
    own = job.resources.time_s
    if own is not None and settings.max_run is not None and settings.max_run < own:
        raise RenderError(
            f"resources.time = {own} seconds, but max_run = {settings.max_run}",
            where=job.name,
            hint="Leave one of them out.",
        )
    margin = None if own is None else own + MARGIN_S + int(job.grace)
    run = settings.max_run or margin or DEFAULT_RUN_S
    if not settings.use_spot_instances:
        if settings.max_wait is not None:
            raise RenderError(
                "max_wait is for spot instances alone",
                where=job.name,
                hint="Write use_spot_instances: true as well, or leave max_wait out.",
            )
        return _given(MaxRuntimeInSeconds=run, MaxPendingTimeInSeconds=settings.max_pending)
    wait = settings.max_wait if settings.max_wait is not None else run
    if wait < run:
        raise RenderError(
            f"max_wait = {wait} seconds is less than the {run} seconds that the job may train",
            where=job.name,
            hint="max_wait is the time for waiting and training together; set max_run (or resources.time) as well.",
        )
    return _given(MaxRuntimeInSeconds=run, MaxWaitTimeInSeconds=wait, MaxPendingTimeInSeconds=settings.max_pending)


def _tags(job: JobSpec, attempt: AttemptId, settings: Settings) -> list[dict[str, str]]:
    """orc's own, the settings', and those of the job that AWS takes."""
    own = {"orc:marker": attempt.marker, "orc:job": attempt.job}
    if is_tag("orc:name", job.name):
        own["orc:name"] = job.name
    taken = {key: value for key, value in job.tags.items() if is_tag(key, value) and not key.startswith("aws:")}
    found = {**taken, **settings.tags, **own}
    if len(found) > MAX_TAGS:
        raise RenderError(f"{len(found)} tags; SageMaker takes {MAX_TAGS}, {len(own)} of them orc's", where=job.name)
    return [{"Key": key, "Value": value} for key, value in sorted(found.items())]


def _optional(job: JobSpec, settings: Settings) -> dict[str, Any]:
    """Sections that are there only when they are asked for."""
    if bool(settings.subnets) != bool(settings.security_group_ids):
        raise RenderError(
            "subnets and security_group_ids are given together, or not at all",
            where=job.name,
            hint="A VPC needs both.",
        )
    vpc = {"SecurityGroupIds": list(settings.security_group_ids), "Subnets": list(settings.subnets)}
    profiler = dict(settings.profiler_config) if settings.profiler_config else None
    if settings.disable_profiler is not None:
        profiler = {**(profiler or {}), "DisableProfiler": settings.disable_profiler}
    retries = settings.max_retry_attempts
    return _given(
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
    return dict(value) if value else None


def _switch(name: str, value: bool | None) -> dict[str, bool] | None:
    return None if value is None else {name: value}


def _given(**values: Any) -> dict[str, Any]:
    return {key: value for key, value in values.items() if value is not None}
