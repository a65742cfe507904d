"""Settings of SageMaker: ``options:`` of a cluster and ``resources.options.sagemaker`` of a job. Pure.

The names are those of the documented configuration file and of the SDK's estimators, with the other names they go by,
and those that cannot be carried. Each key says here what becomes of it; docs/reference/sagemaker-options.md
is held to that by a test.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

from pydantic import ConfigDict, Field, Strict
from pydantic.fields import FieldInfo

from orc.launchers.backends.sagemaker import sections
from orc.launchers.backends.sagemaker.sections import Text, Truth
from orc.launchers.errors import SpecError
from orc.launchers.spec.options import FrozenModel, Reader, Word, matching, several, validate_options, whole
from orc.launchers.spec.source import Document, KeyPath, Placed, document_of

if TYPE_CHECKING:
    from orc.launchers.spec import JobSpec
    from orc.launchers.spec.clusters import Cluster

# Name in a configuration file or of an estimator -> the setting it is.
ALIASES = {
    "ec2_instance_type": "instance_type",
    "num_machines": "instance_count",
    "iam_role_name": "role",
    "framework_version": "pytorch_version",
}

# Argument of an estimator -> what a job file has instead. `Client.submit_estimator` puts it there.
ELSEWHERE = {"entry_point": "`script`", "source_dir": "`workdir: {path: ...}`", "hyperparameters": "`args`"}

_WORKDIR = "the job's whole `workdir` travels"
_CONTRACT = "orc starts the container's program itself"

# Argument of an estimator -> why nothing here can take its place.
REFUSED = {
    "sagemaker_session": "sessions are made from `profile`, `region` and `endpoint_url` of the cluster",
    "git_config": "check the repository out and submit from there; its state is recorded with the job",
    "dependencies": f"{_WORKDIR}; put them into it",
    "code_location": "`bucket` and `prefix` of the cluster say where code is kept",
    "model_uri": "name it as a channel in `inputs`",
    "model_channel_name": "name it as a channel in `inputs`",
    "rules": "SageMaker Debugger is not supported; orc.runtime watches for stalls and spikes of the loss",
    "debugger_hook_config": "SageMaker Debugger is not supported; `false` is accepted",
    "instance_groups": "all instances of a job have one type; use `instance_type` and `instance_count`",
    "container_entry_point": _CONTRACT,
    "container_arguments": f"{_CONTRACT}; arguments go into `args`",
    "container_log_level": "the level of the program's log is `runtime.log_level`",
    "compiler_config": "the SageMaker Training Compiler is discontinued; use `runtime.dynamo_backend`",
    "tensorflow_version": "orc launches PyTorch",
    "training_recipe": f"{_WORKDIR}; write the script that trains, and name it in `script`",
    "recipe_overrides": "there is no training_recipe; arguments go into `args`",
    "algorithm_arn": "algorithms of the marketplace bring a program of their own; orc runs yours",
    "wait": "`orc wait` waits",
    "logs": "`orc logs` shows logs",
    "job_name": "the name follows from the attempt; `base_job_name` is what it begins with",
    "aws_access_key_id": "credentials do not belong into files; use a profile or the environment",
    "aws_secret_access_key": "credentials do not belong into files; use a profile or the environment",
    "aws_session_token": "credentials do not belong into files; use a profile or the environment",
}


MANY = 2**31 - 1
# Key of the cluster that names a table -> the setting in it, and its columns.
TABLES = {
    "sagemaker_inputs_file": ("inputs", ("channel_name", "data_location")),
    "sagemaker_metrics_file": ("metric_definitions", ("metric_name", "metric_regex")),
}
_Model = TypeVar("_Model", bound=FrozenModel)

RunTime = Annotated[int, Reader(sections.whole_seconds)]
Version = Annotated[str, Reader(sections.stock_version)]
Several = Annotated[tuple[str, ...], several]
ApiObject = Annotated[dict[str, Any], Reader(sections.mapping)]  # in the API's own words, which `model` knows


def _key(default: Any, becomes: str, doc: str) -> Any:
    return Field(default, description=doc, json_schema_extra={"becomes": becomes})


class _Member(str):
    """Member of the request, in backticks, that the value of a key is as it is."""


def _member(default: Any, member: str, doc: str) -> Any:
    return _key(default, _Member(f"`{member}`"), doc)


class ClusterSettings(FrozenModel):
    """Account and region of a cluster's jobs, and the location of orc's objects. Only in clusters.yaml."""

    profile: Text | None = _key(None, "the AWS session", "Profile of ~/.aws/config.")
    region: Annotated[str, matching(r"[a-z]{2,5}(?:-[a-z]+)+-[0-9]", "an AWS region like us-east-1")] | None = _key(
        None, "the AWS session, the image's registry", "Region."
    )
    account: Annotated[str, matching(r"[0-9]{12}", "the 12 digits (in quotes) of an AWS account")] | None = _key(
        None, "`RoleArn`, the default bucket", "Account; looked up at submission when not given."
    )
    bucket: Annotated[str, matching(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]", "the name of a bucket")] | None = _key(
        None, "all S3 locations", "Bucket of orc's objects; sagemaker-<region>-<account> when not given."
    )
    prefix: Annotated[str, matching(r"[a-zA-Z0-9!_.*'()/-]+", "a prefix in S3")] = _key(
        "orc", "all S3 locations", "In it."
    )
    s3_kms_key: Text | None = _key(None, "encryption of uploads", "KMS key of what orc uploads.")
    endpoint_url: Annotated[str, matching(r"https?://.+", "a URL")] | None = _key(
        None, "the AWS session", "Another address of AWS's API."
    )
    secrets: Literal["s3", "secretsmanager"] = _key(
        "s3", "an encrypted object in S3, or a secret", "How secrets reach the job: s3 or secretsmanager."
    )
    prices: dict[str, Annotated[float, Strict(), Field(ge=0)]] = _key(
        {}, "cost in `orc status`", "Price of an instance-hour by type."
    )
    sagemaker_inputs_file: Text | None = _key(
        None, "`InputDataConfig`", "Table of channels: channel_name, data_location."
    )
    sagemaker_metrics_file: Text | None = _key(
        None, "`MetricDefinitions`", "Table of metrics: metric_name, metric_regex."
    )


class JobOptions(FrozenModel):
    """Options that clusters and jobs have."""

    instance_type: Word | None = _member(None, "ResourceConfig.InstanceType", "Like ml.p4d.24xlarge.")
    instance_count: Annotated[int, whole(1, MANY)] | None = _key(
        None, "`resources.nodes`", "Number of instances; must agree with the job's nodes."
    )
    role: Text | None = _key(None, "`RoleArn`", "Execution role: its name or its ARN.")
    image_uri: Text | None = _key(None, "`AlgorithmSpecification.TrainingImage`", "Image of your own.")
    pytorch_version: Version | None = _key(None, "the stock image", "PyTorch of the stock image.")
    transformers_version: Version | None = _key(None, "the stock image", "Transformers of the stock image.")
    py_version: Annotated[str, matching(r"py3[0-9]+", "a version like py312")] | None = _key(
        None, "the stock image", "Its Python; checked."
    )
    base_job_name: Text | None = _key(None, "`TrainingJobName`", "What the training job's name begins with.")
    arguments: Literal["hyperparameters", "plain"] = _key(
        "hyperparameters", "`HyperParameters`", "Whether arguments must be named, and are shown as hyperparameters."
    )
    install_requirements: Truth = _key(True, "a line of setup", "Install the requirements.txt beside the script first.")
    distributed_type: Annotated[str, Reader(sections.distributed_type)] | None = _key(
        None, "`launcher`", "NO or DATA_PARALLEL, as in configuration files."
    )
    distribution: sections.Distribution | None = _key(
        None, "`launcher`", "The estimators' distribution: torch_distributed, mpi, smdistributed."
    )
    mixed_precision: Annotated[str, Reader(sections.precision)] | None = _key(
        None, "`runtime.mixed_precision`", "As in configuration files."
    )
    use_cpu: Truth | None = _key(None, "`runtime.use_cpu`", "As in configuration files.")
    volume_size: Annotated[int, whole(1, MANY)] | None = _member(
        30, "ResourceConfig.VolumeSizeInGB", "Disk of each instance, in GB."
    )
    volume_kms_key: Text | None = _member(None, "ResourceConfig.VolumeKmsKeyId", "KMS key of that disk.")
    keep_alive_period_in_seconds: RunTime | None = _member(
        None, "ResourceConfig.KeepAlivePeriodInSeconds", "Keep the instances warm this long."
    )
    training_plan: Text | None = _member(None, "ResourceConfig.TrainingPlanArn", "Reserved capacity to run on.")
    instance_placement_config: ApiObject | None = _member(
        None, "ResourceConfig.InstancePlacementConfig", "Where in an UltraServer; as in the API."
    )
    max_run: RunTime | None = _key(None, "`StoppingCondition.MaxRuntimeInSeconds`", "Longest time of training.")
    max_wait: RunTime | None = _key(
        None,
        "`StoppingCondition.MaxWaitTimeInSeconds`",
        "Longest time of waiting for spot capacity and training together.",
    )
    max_pending: RunTime | None = _member(None, "StoppingCondition.MaxPendingTimeInSeconds", "Longest time of waiting.")
    use_spot_instances: Truth = _member(False, "EnableManagedSpotTraining", "Spare capacity, for less.")
    inputs: Annotated[dict[str, sections.Channel], Reader(sections.named_channels)] = _key(
        {}, "`InputDataConfig`", "Channels of data: S3 locations or file systems, by name."
    )
    input_mode: Text = _member("File", "AlgorithmSpecification.TrainingInputMode", "Of channels.")
    metric_definitions: Annotated[tuple[dict[str, str], ...], Reader(sections.metrics)] = _member(
        (), "AlgorithmSpecification.MetricDefinitions", "Metrics that are read from the logs."
    )
    enable_sagemaker_metrics: Truth | None = _member(
        None, "AlgorithmSpecification.EnableSageMakerMetricsTimeSeries", "Keep those over time."
    )
    output_path: Text | None = _key(
        None, "`OutputDataConfig.S3OutputPath`", "Where the model goes; below orc's prefix by default."
    )
    output_kms_key: Text | None = _member(None, "OutputDataConfig.KmsKeyId", "KMS key of the model.")
    disable_output_compression: Truth = _key(
        False, "`OutputDataConfig.CompressionType`", "Upload the model as it is, not as model.tar.gz."
    )
    checkpoint_s3_uri: Text | None = _key(
        None, "`CheckpointConfig.S3Uri`", "Where checkpoints are kept; below orc's prefix by default."
    )
    checkpoint_local_path: Annotated[str, matching(r"/.+", "an absolute path")] = _key(
        "/opt/ml/checkpoints", "`CheckpointConfig.LocalPath`", "Where they are in the container."
    )
    subnets: Several = _member((), "VpcConfig.Subnets", "Subnets of a VPC.")
    security_group_ids: Several = _member((), "VpcConfig.SecurityGroupIds", "Its security groups.")
    enable_network_isolation: Truth = _member(
        False, "EnableNetworkIsolation", "No network but among the job's own instances."
    )
    encrypt_inter_container_traffic: Truth = _member(
        False, "EnableInterContainerTrafficEncryption", "Encrypt what the instances say to each other."
    )
    environment: Annotated[dict[str, str], Reader(sections.variables)] = _key(
        {}, "`Environment`", "Variables of the container; the job's `env` wins. Never for secrets."
    )
    max_retry_attempts: Annotated[int, whole(1, MANY)] | None = _member(
        None, "RetryStrategy.MaximumRetryAttempts", "SageMaker's own, after internal errors."
    )
    tags: Annotated[dict[str, str], Reader(sections.tags)] = _key({}, "`Tags`", "Tags at AWS, beside the job's own.")
    tensorboard_output_config: ApiObject | None = _member(None, "TensorBoardOutputConfig", "As in the API.")
    profiler_config: ApiObject | None = _member(None, "ProfilerConfig", "As in the API.")
    disable_profiler: Truth | None = _member(None, "ProfilerConfig.DisableProfiler", "No profiler.")
    experiment_config: ApiObject | None = _member(None, "ExperimentConfig", "As in the API.")
    training_repository_access_mode: Text | None = _key(
        None, "`AlgorithmSpecification.TrainingImageConfig`", "Where a private registry is reached."
    )
    training_repository_credentials_provider_arn: Text | None = _key(
        None, "`AlgorithmSpecification.TrainingImageConfig`", "Function that knows its credentials."
    )
    enable_infra_check: Truth | None = _member(None, "InfraCheckConfig.EnableInfraCheck", "Check the instances first.")
    enable_remote_debug: Truth | None = _member(
        None, "RemoteDebugConfig.EnableRemoteDebug", "Allow shells in the container."
    )
    enable_session_tag_chaining: Truth | None = _member(
        None, "SessionChainingConfig.EnableSessionTagChaining", "Pass tags on."
    )


class Settings(JobOptions):
    """Settings of one training job: the job's own values over the cluster's."""

    place: ClusterSettings = ClusterSettings.model_construct()


class ClusterOptions(ClusterSettings, JobOptions):
    """``options:`` of a cluster, for editors; the names of the SDK are taken as well."""

    model_config = ConfigDict(json_schema_extra={"additionalProperties": True})


CLUSTER_KEYS: Mapping[str, FieldInfo] = ClusterSettings.model_fields  # that only a cluster has
JOB_KEYS: Mapping[str, FieldInfo] = JobOptions.model_fields  # that clusters and jobs have


def members(settings: Settings) -> dict[str, Any]:
    """Return the members of the request that are settings as they are."""
    becomes = {name: dict(field.json_schema_extra)["becomes"] for name, field in JOB_KEYS.items()}  # type: ignore[arg-type]
    own = {name: member.strip("`") for name, member in becomes.items() if isinstance(member, _Member)}
    return sections.placed({member: getattr(settings, name) for name, member in own.items()})


def known_names() -> list[str]:
    """Return every name that can be written in a cluster's options."""
    return [*CLUSTER_KEYS, *JOB_KEYS, *ALIASES, "additional_args"]


def read_cluster_settings(cluster: Cluster) -> ClusterSettings:
    """Return the account and region of the cluster's jobs. Raises `SpecError`."""
    return _read(ClusterSettings, _of_cluster(cluster))


def read_settings(cluster: Cluster, job: JobSpec | None = None) -> Settings:
    """Return the settings of *job* on *cluster*. Raises `SpecError` with the key, the place and the nearest key."""
    given = _of_cluster(cluster)
    place = _read(ClusterSettings, given)
    values = {**_from_tables(place, given), **_written(_read(Settings, given))}
    if job is not None:
        own = _written(_read(Settings, _of_job(job)))
        for name in ("environment", "tags"):
            if name in own and name in values:
                own[name] = {**values[name], **own[name]}
        for one, other in (("distribution", "distributed_type"), ("distributed_type", "distribution")):
            if one in own and other not in own:
                values.pop(other, None)
        if {"pytorch_version", "transformers_version"} & own.keys() and "image_uri" not in own:
            values.pop("image_uri", None)
        values |= own
    return Settings.model_construct(place=place, **values)


def option_of(member: str) -> str | None:
    """Return the key that becomes the *member* of the request (``VpcConfig.Subnets``), or a part around it."""
    found = {place: name for name, field in JOB_KEYS.items() for place in re.findall(r"`([\w.]+)`", _becomes(field))}
    inside = [place for place in found if f"{member}.".startswith(f"{place}.")]
    return found[max(inside, key=len)] if inside else None


def place_of_option(name: str, cluster: Cluster, job: JobSpec) -> str:
    """Return the place of the value of the key *name*: in the job's options, else the cluster's."""
    given = _of_job(job)
    given = given if name in given else _of_cluster(cluster)
    return given.document.origin((name,)).where


def _becomes(field: FieldInfo) -> str:
    extra = field.json_schema_extra
    return str(extra["becomes"]) if isinstance(extra, dict) else ""


def _of_cluster(cluster: Cluster) -> Placed:
    return _properly_named(cluster.options, f"cluster {cluster.name}: options")


def _of_job(job: JobSpec) -> Placed:
    given = _properly_named(job.resources.options.get("sagemaker", {}), f"{job.name}: resources.options.sagemaker")
    for name in given:
        if name in CLUSTER_KEYS:
            hint = "Set it under `options:` of the cluster in clusters.yaml."
            if name in TABLES:
                hint += f" A job has `{TABLES[name][0]}` for it."
            where = given.document.origin((name,), key=True).where
            raise SpecError(f"{name!r} describes the cluster, not the job", where=where, hint=hint)
    return given


def _properly_named(options: Mapping[str, Any], where: str) -> Placed:
    """Return the options by their names here, with their places; ``additional_args`` is no level of its own."""
    document = document_of(options, where)

    def at(path: KeyPath) -> str:
        return document.origin(path, key=True).where

    inner = options.get("additional_args") or {}
    if not isinstance(inner, Mapping):
        raise SpecError("additional_args: expected a mapping of estimator arguments", where=at(("additional_args",)))
    entries: list[tuple[KeyPath, Any]] = [((n,), value) for n, value in options.items() if n != "additional_args"]
    entries += [(("additional_args", name), value) for name, value in inner.items()]
    data: dict[str, Any] = {}
    paths: dict[str, KeyPath] = {}
    for path, value in entries:
        name = str(path[-1])
        # `image_uri: null` stands in configuration files.
        if value is None or (proper := _proper(name, value, at(path))) is None:
            continue
        if proper in data:
            also = ".".join(map(str, paths[proper]))
            raise SpecError(f"{name} is given twice, also as {also}", where=at(path))
        data[proper], paths[proper] = value, path
    keys, values = (
        {
            (proper, *place[len(path) :]): origin
            for proper, path in paths.items()
            for place, origin in table.items()
            if place[: len(path)] == path
        }
        for table in (document.keys, document.values)
    )
    return Placed(data, Document(data, document.where, keys, values), ())


def _proper(name: str, value: Any, where: str) -> str | None:
    """Return the name of the key here; `None` for one that changes nothing. Raises `SpecError`."""
    if name == "compute_environment":
        if value != "AMAZON_SAGEMAKER":
            raise SpecError(f"compute_environment: {value!r} is no SageMaker", where=where)
        return None
    if name == "debug":  # `false` stands in every configuration file
        if value is not False:
            hint = "Write `runtime: {debug_mode: true}` into the job file."
            raise SpecError(f"debug: {value!r} is a setting of the job, not of a cluster", where=where, hint=hint)
        return None
    if name in ("debugger_hook_config", "rules", "compiler_config") and value in (False, []):
        return None
    if name in REFUSED:
        raise SpecError(f"{name} cannot be carried: {REFUSED[name]}", where=where)
    if name in ELSEWHERE:
        raise SpecError(f"{name} has another place in a job file", where=where, hint=f"Write {ELSEWHERE[name]}.")
    proper = ALIASES.get(name, name)
    if proper not in CLUSTER_KEYS and proper not in JOB_KEYS:
        from orc.launchers.spec.problems import choose

        raise SpecError(f"unknown key {name!r}{choose(name, known_names())}", where=where)
    return proper


def _read(model: type[_Model], given: Placed) -> _Model:
    """Return the values of *given* that *model* has."""
    own = {name: value for name, value in given.items() if name in model.model_fields}
    return validate_options(model, Placed(own, given.document, ()), given.document.where)


def _written(settings: Settings) -> dict[str, Any]:
    return {name: getattr(settings, name) for name in settings.model_fields_set}


def _from_tables(place: ClusterSettings, given: Placed) -> dict[str, Any]:
    """Return the settings in the tables that a cluster names."""
    found: dict[str, Any] = {}
    for key, (name, columns) in TABLES.items():
        if path := getattr(place, key):
            rows, file = sections.read_table(path, given.document.origin((key,), key=True).where, columns)
            found |= _written(validate_options(Settings, {name: rows}, str(file)))
    return found
