"""Settings of SageMaker: ``options:`` of a cluster and ``resources.options.sagemaker`` of a job. Pure.

The names are those of the documented configuration file and of the SDK's estimators; `arguments` has the other names
they go by, and those that cannot be carried. Each key says here what becomes of it; docs/reference/sagemaker-options.md
is held to that by a test.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from orc.launchers.backends.sagemaker import readers as read
from orc.launchers.backends.sagemaker.arguments import ALIASES, ELSEWHERE, REFUSED
from orc.launchers.errors import SpecError
from orc.launchers.spec.options import Reader, matching, one_of, text, whole, word

if TYPE_CHECKING:
    from orc.launchers.spec import JobSpec
    from orc.launchers.spec.clusters import Cluster
    from orc.launchers.spec.source import KeyPath

LOCAL_TYPES = ("local", "local_gpu")
MAX_RUN_S = 28 * 24 * 3600
Where = Callable[["KeyPath"], str]
_NAME = matching(r"[a-zA-Z0-9](?:-*[a-zA-Z0-9])*", "a name at SageMaker: letters, digits and dashes")
_VERSION = matching(r"[0-9]+(?:\.[0-9]+)+", "a version like 2.5.1 (in quotes, or YAML drops zeros)")
_KMS = matching(r"[a-zA-Z0-9:/_-]+", "a KMS key")
_ID = matching(r"[-0-9a-zA-Z]{1,32}", "the id of a subnet or security group")
_IMAGE = matching(r".{1,255}", "the name of an image: 255 characters at most")
_PLAN = matching(
    r"arn:aws[a-z-]*:sagemaker:[a-z0-9-]*:[0-9]{12}:training-plan/.+",
    "the ARN of a training plan, like arn:aws:sagemaker:us-east-1:123456789012:training-plan/mine",
)
_FUNCTION = matching(
    r"arn:[A-Za-z0-9-]+:lambda:[A-Za-z0-9-]+:[0-9]{12}:function:.+",
    "the ARN of a Lambda function, like arn:aws:lambda:us-east-1:123456789012:function:mine",
)
_PATH = matching(r"/opt/ml/.+|/[a-z]+/.+", "an absolute path")
_ROLE = matching(
    r"arn:aws[a-z-]*:iam::[0-9]{12}:role/.+|(?!arn:)[a-zA-Z0-9+=,.@_/-]{1,512}", "an IAM role: its name or its ARN"
)


def _key(reader: Reader, default: Any, becomes: str, doc: str) -> Any:
    metadata = {"read": reader, "becomes": becomes, "doc": doc}
    if default == {}:
        return field(default_factory=dict, metadata=metadata)
    return field(default=default, metadata=metadata)


@Reader
def _stock_version(value: Any) -> str:
    """A version of what stock images hold. YAML takes 2.10 for the number 2.1, which is another one."""
    version = str(_VERSION(value))
    if isinstance(value, float):
        from orc.launchers.backends.sagemaker.images import HUGGINGFACE, PYTORCH

        known = [*PYTORCH, *(each for each, _ in HUGGINGFACE)]
        if any(each.startswith(f"{version}0") for each in known):
            raise ValueError(
                f"{version} may have been written as {version}0, which is the same number; put it in quotes"
            )
    return version


@Reader
def _precision(value: Any) -> Any:
    """As the runtime has it."""
    from orc.runtime.core.config import KEYS

    return KEYS["mixed_precision"].parse(value)


_EXPERIMENT = matching(r"[a-zA-Z0-9](?:-*[a-zA-Z0-9]){0,119}", "a name: letters, digits and dashes, 120 at most")
_EXPERIMENTS = read.section(
    dict.fromkeys(("ExperimentName", "TrialName", "TrialComponentDisplayName", "RunName"), _EXPERIMENT)
)
_BOARD = read.section({"S3OutputPath": read.s3_uri, "LocalPath": _PATH}, "S3OutputPath")
_PROFILER = read.section(
    {
        "S3OutputPath": read.s3_uri,
        "ProfilingIntervalInMilliseconds": one_of(100, 200, 500, 1000, 5000, 60000),
        "ProfilingParameters": read.parameters,
        "DisableProfiler": read.truth,
    }
)
_PLACEMENT = read.section(
    {
        "EnableMultipleJobs": read.truth,
        "PlacementSpecifications": read.several(
            read.section({"UltraServerId": text, "InstanceCount": whole(0, 1000)}, "InstanceCount"), 10
        ),
    }
)


@dataclass(frozen=True)
class ClusterSettings:
    """Account and region of a cluster's jobs, and the location of orc's objects. Only in clusters.yaml."""

    profile: str | None = _key(text, None, "the AWS session", "Profile of ~/.aws/config.")
    region: str | None = _key(
        matching(r"[a-z]{2,5}(?:-[a-z]+)+-[0-9]", "an AWS region like us-east-1"),
        None,
        "the AWS session, the image's registry",
        "Region.",
    )
    account: str | None = _key(
        matching(r"[0-9]{12}", "the 12 digits (in quotes) of an AWS account"),
        None,
        "`RoleArn`, the default bucket",
        "Account; looked up at submission when not given.",
    )
    bucket: str | None = _key(
        matching(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]", "the name of a bucket"),
        None,
        "all S3 locations",
        "Bucket of orc's objects; sagemaker-<region>-<account> when not given.",
    )
    prefix: str = _key(matching(r"[a-zA-Z0-9!_.*'()/-]+", "a prefix in S3"), "orc", "all S3 locations", "In it.")
    s3_kms_key: str | None = _key(_KMS, None, "encryption of uploads", "KMS key of what orc uploads.")
    endpoint_url: str | None = _key(
        matching(r"https?://.+", "a URL"), None, "the AWS session", "Another address of AWS's API."
    )
    secrets: str = _key(
        one_of("s3", "secretsmanager"),
        "s3",
        "an encrypted object in S3, or a secret",
        "How secrets reach the job: s3 or secretsmanager.",
    )
    prices: Mapping[str, float] = _key(read.prices, {}, "cost in `orc status`", "Price of an instance-hour by type.")
    sagemaker_inputs_file: str | None = _key(
        text, None, "`InputDataConfig`", "Table of channels: channel_name, data_location."
    )
    sagemaker_metrics_file: str | None = _key(
        text, None, "`MetricDefinitions`", "Table of metrics: metric_name, metric_regex."
    )


@dataclass(frozen=True)
class Settings:
    """Settings of one training job: the job's own values over the cluster's."""

    place: ClusterSettings = field(default_factory=ClusterSettings)
    instance_type: str | None = _key(
        word, None, "`ResourceConfig.InstanceType`", "Like ml.p4d.24xlarge; `local` for the local mode."
    )
    instance_count: int | None = _key(
        whole(1, 1000), None, "`resources.nodes`", "Number of instances; must agree with the job's nodes."
    )
    role: str | None = _key(_ROLE, None, "`RoleArn`", "Execution role: its name or its ARN.")
    image_uri: str | None = _key(_IMAGE, None, "`AlgorithmSpecification.TrainingImage`", "Image of your own.")
    pytorch_version: str | None = _key(_stock_version, None, "the stock image", "PyTorch of the stock image.")
    transformers_version: str | None = _key(_stock_version, None, "the stock image", "Transformers of the stock image.")
    py_version: str | None = _key(
        matching(r"py3[0-9]+", "a version like py312"), None, "the stock image", "Its Python; checked."
    )
    base_job_name: str | None = _key(_NAME, None, "`TrainingJobName`", "What the training job's name begins with.")
    arguments: str = _key(
        one_of("hyperparameters", "plain"),
        "hyperparameters",
        "`HyperParameters`",
        "Whether arguments must be named, and are shown as hyperparameters.",
    )
    install_requirements: bool = _key(
        read.truth, True, "a line of setup", "Install the requirements.txt beside the script first."
    )
    distributed_type: str | None = _key(
        read.distributed_type, None, "`launcher`", "NO or DATA_PARALLEL, as in configuration files."
    )
    distribution: Mapping[str, Any] | None = _key(
        read.distribution, None, "`launcher`", "The estimators' distribution: torch_distributed, mpi, smdistributed."
    )
    mixed_precision: str | None = _key(_precision, None, "`runtime.mixed_precision`", "As in configuration files.")
    use_cpu: bool | None = _key(read.truth, None, "`runtime.use_cpu`", "As in configuration files.")
    volume_size: int | None = _key(
        whole(1, 65536), 30, "`ResourceConfig.VolumeSizeInGB`", "Disk of each instance, in GB."
    )
    volume_kms_key: str | None = _key(_KMS, None, "`ResourceConfig.VolumeKmsKeyId`", "KMS key of that disk.")
    keep_alive_period_in_seconds: int | None = _key(
        read.whole_seconds(1, 21600),
        None,
        "`ResourceConfig.KeepAlivePeriodInSeconds`",
        "Keep the instances warm this long.",
    )
    training_plan: str | None = _key(_PLAN, None, "`ResourceConfig.TrainingPlanArn`", "Reserved capacity to run on.")
    instance_placement_config: Mapping[str, Any] | None = _key(
        _PLACEMENT, None, "`ResourceConfig.InstancePlacementConfig`", "Where in an UltraServer; as in the API."
    )
    max_run: int | None = _key(
        read.whole_seconds(1, MAX_RUN_S), None, "`StoppingCondition.MaxRuntimeInSeconds`", "Longest time of training."
    )
    max_wait: int | None = _key(
        read.whole_seconds(1, MAX_RUN_S),
        None,
        "`StoppingCondition.MaxWaitTimeInSeconds`",
        "Longest time of waiting for spot capacity and training together.",
    )
    max_pending: int | None = _key(
        read.whole_seconds(1800, 2419200),
        None,
        "`StoppingCondition.MaxPendingTimeInSeconds`",
        "Longest time of waiting.",
    )
    use_spot_instances: bool = _key(read.truth, False, "`EnableManagedSpotTraining`", "Spare capacity, for less.")
    inputs: Mapping[str, Mapping[str, Any]] = _key(
        read.inputs, {}, "`InputDataConfig`", "Channels of data: S3 locations or file systems, by name."
    )
    input_mode: str = _key(
        one_of("File", "Pipe", "FastFile"), "File", "`AlgorithmSpecification.TrainingInputMode`", "Of channels."
    )
    metric_definitions: tuple[Mapping[str, str], ...] = _key(
        read.metrics, (), "`AlgorithmSpecification.MetricDefinitions`", "Metrics that are read from the logs."
    )
    enable_sagemaker_metrics: bool | None = _key(
        read.truth, None, "`AlgorithmSpecification.EnableSageMakerMetricsTimeSeries`", "Keep those over time."
    )
    output_path: str | None = _key(
        read.s3_uri, None, "`OutputDataConfig.S3OutputPath`", "Where the model goes; below orc's prefix by default."
    )
    output_kms_key: str | None = _key(_KMS, None, "`OutputDataConfig.KmsKeyId`", "KMS key of the model.")
    disable_output_compression: bool = _key(
        read.truth, False, "`OutputDataConfig.CompressionType`", "Upload the model as it is, not as model.tar.gz."
    )
    checkpoint_s3_uri: str | None = _key(
        read.s3_uri, None, "`CheckpointConfig.S3Uri`", "Where checkpoints are kept; below orc's prefix by default."
    )
    checkpoint_local_path: str = _key(
        _PATH, "/opt/ml/checkpoints", "`CheckpointConfig.LocalPath`", "Where they are in the container."
    )
    subnets: tuple[str, ...] = _key(read.several(_ID, 16), (), "`VpcConfig.Subnets`", "Subnets of a VPC.")
    security_group_ids: tuple[str, ...] = _key(
        read.several(_ID, 5), (), "`VpcConfig.SecurityGroupIds`", "Its security groups."
    )
    enable_network_isolation: bool = _key(
        read.truth, False, "`EnableNetworkIsolation`", "No network but among the job's own instances."
    )
    encrypt_inter_container_traffic: bool = _key(
        read.truth, False, "`EnableInterContainerTrafficEncryption`", "Encrypt what the instances say to each other."
    )
    environment: Mapping[str, str] = _key(
        read.variables, {}, "`Environment`", "Variables of the container; the job's `env` wins. Never for secrets."
    )
    max_retry_attempts: int | None = _key(
        whole(1, 30), None, "`RetryStrategy.MaximumRetryAttempts`", "SageMaker's own, after internal errors."
    )
    tags: Mapping[str, str] = _key(read.tags, {}, "`Tags`", "Tags at AWS, beside the job's own.")
    tensorboard_output_config: Mapping[str, Any] | None = _key(
        _BOARD, None, "`TensorBoardOutputConfig`", "As in the API."
    )
    profiler_config: Mapping[str, Any] | None = _key(_PROFILER, None, "`ProfilerConfig`", "As in the API.")
    disable_profiler: bool | None = _key(read.truth, None, "`ProfilerConfig.DisableProfiler`", "No profiler.")
    experiment_config: Mapping[str, Any] | None = _key(_EXPERIMENTS, None, "`ExperimentConfig`", "As in the API.")
    training_repository_access_mode: str | None = _key(
        one_of("Platform", "Vpc"),
        None,
        "`AlgorithmSpecification.TrainingImageConfig`",
        "Where a private registry is reached.",
    )
    training_repository_credentials_provider_arn: str | None = _key(
        _FUNCTION, None, "`AlgorithmSpecification.TrainingImageConfig`", "Function that knows its credentials."
    )
    enable_infra_check: bool | None = _key(read.truth, None, "`InfraCheckConfig`", "Check the instances first.")
    enable_remote_debug: bool | None = _key(read.truth, None, "`RemoteDebugConfig`", "Allow shells in the container.")
    enable_session_tag_chaining: bool | None = _key(read.truth, None, "`SessionChainingConfig`", "Pass tags on.")
    local: str | None = _key(
        one_of("contract"), None, "where the job runs", "contract: on this machine, as SageMaker would."
    )

    @property
    def local_mode(self) -> str:
        """Local mode of the job: ``docker`` or ``contract``; empty when it runs at AWS."""
        if self.instance_type in LOCAL_TYPES:
            return self.local or "docker"
        return self.local or ""


def cluster_fields() -> dict[str, dataclasses.Field[Any]]:
    """The keys that only a cluster has."""
    return {found.name: found for found in dataclasses.fields(ClusterSettings)}


def job_fields() -> dict[str, dataclasses.Field[Any]]:
    """The keys that clusters and jobs have."""
    return {found.name: found for found in dataclasses.fields(Settings) if found.name != "place"}


def known_names() -> list[str]:
    """Every name that can be written in a cluster's options."""
    return [*cluster_fields(), *job_fields(), *ALIASES, "additional_args"]


def read_cluster_settings(cluster: Cluster) -> ClusterSettings:
    """Return the account and region of the cluster's jobs. Raises `SpecError`."""
    return ClusterSettings(
        **_of(cluster_fields(), _given(cluster.options, _cluster_where(cluster)), _cluster_where(cluster))
    )


def read_settings(cluster: Cluster, job: JobSpec | None = None) -> Settings:
    """The settings of *job* on *cluster*. Raises `SpecError` that names the key, the place and the nearest key."""
    where = _cluster_where(cluster)
    given = _given(cluster.options, where)
    place = ClusterSettings(**_of(cluster_fields(), given, where))
    values = _of(job_fields(), given, where)
    values = {**_from_files(place, cluster), **values}
    if job is not None:
        own = _read_job(job)
        for name in ("environment", "tags"):
            if name in own and name in values:
                own[name] = {**values[name], **own[name]}
        for one, other in (("distribution", "distributed_type"), ("distributed_type", "distribution")):
            if one in own and other not in own:
                values.pop(other, None)
        if {"pytorch_version", "transformers_version"} & own.keys() and "image_uri" not in own:
            values.pop("image_uri", None)
        values = {**values, **own}
    return Settings(place=place, **values)


def _read_job(job: JobSpec) -> dict[str, Any]:
    from orc.launchers.spec.source import document_of

    document = document_of(job.resources.options.get("sagemaker", {}), f"{job.name}: resources.options.sagemaker")

    def where(path: KeyPath) -> str:
        return document.origin(path, key=True).where

    given = _given(document.data, where)
    for name, (_, path) in given.items():
        if name in cluster_fields():
            hint = "Set it under `options:` of the cluster in clusters.yaml."
            if name.endswith("_file"):
                hint += f" A job has `{'inputs' if 'inputs' in name else 'metric_definitions'}` for it."
            raise SpecError(f"{name!r} describes the cluster, not the job", where=where(path), hint=hint)
    return _of(job_fields(), given, where)


def _cluster_where(cluster: Cluster) -> Where:
    from orc.launchers.spec.clusters import option_place

    return lambda path: option_place(cluster, path, key=True)


Given = dict[str, tuple[Any, "KeyPath"]]


def _given(options: Mapping[str, Any], where: Where) -> Given:
    """The values by their proper names, with their places; ``additional_args`` is no level of its own."""
    found: Given = {}
    entries: list[tuple[str, Any, KeyPath]] = []
    for name, value in options.items():
        if name != "additional_args":
            entries.append((str(name), value, (name,)))
        elif not isinstance(value, Mapping):
            raise SpecError("additional_args: expected a mapping of estimator arguments", where=where((name,)))
        else:
            entries += [(str(inner), each, (name, inner)) for inner, each in value.items()]
    for name, value, path in entries:
        if value is None:
            continue  # `image_uri: null` in configuration files
        proper = _proper(name, value, where(path))
        if proper is None:
            continue
        if proper in found:
            other = found[proper][1]
            raise SpecError(f"{name} is given twice, also as {'.'.join(map(str, other))}", where=where(path))
        found[proper] = (value, path)
    return found


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
    if proper not in cluster_fields() and proper not in job_fields():
        from orc.launchers.spec.problems import choose

        raise SpecError(f"unknown key {name!r}{choose(name, known_names())}", where=where)
    return proper


def _of(known: Mapping[str, dataclasses.Field[Any]], given: Given, where: Where) -> dict[str, Any]:
    found = {}
    for name, (value, path) in given.items():
        if name not in known:
            continue
        try:
            found[name] = known[name].metadata["read"](value)
        except ValueError as error:
            raise SpecError(f"{'.'.join(map(str, path))}: {error}", where=where(path)) from None
    return found


def _from_files(place: ClusterSettings, cluster: Cluster) -> dict[str, Any]:
    """Return the settings in the tables that a cluster names."""
    from orc.launchers.backends.sagemaker.tables import read_inputs, read_metrics

    found: dict[str, Any] = {}
    where = _cluster_where(cluster)
    if place.sagemaker_inputs_file:
        found["inputs"] = read_inputs(place.sagemaker_inputs_file, where(("sagemaker_inputs_file",)))
    if place.sagemaker_metrics_file:
        found["metric_definitions"] = read_metrics(place.sagemaker_metrics_file, where(("sagemaker_metrics_file",)))
    return found
