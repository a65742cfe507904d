"""A job as its settings of SageMaker make it, and the CreateTrainingJob request of one attempt.

Pure: the same job makes the same bytes, with no SDK and no network. The settings say which of them is which member of
the request (`settings.members`); what is made of several is here.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from orc.launchers.backends.base import refuse_range
from orc.launchers.backends.sagemaker.images import Image
from orc.launchers.backends.sagemaker.instances import Instance, instances
from orc.launchers.backends.sagemaker.names import ACCOUNT, S3Location, default_bucket, partition_of, training_job_name
from orc.launchers.backends.sagemaker.sections import Channel, is_tag
from orc.launchers.backends.sagemaker.settings import Settings, members
from orc.launchers.containers.layout import ENTRY
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
MAX_RUN_S = 28 * 24 * 3600
# What SageMaker gives a container between SIGTERM and SIGKILL, less what the agents need to write down how it ended.
MAX_GRACE_S = 115.0
# Words of the SDK for a container on this machine.
LOCAL_TYPES = ("local", "local_gpu")
# Instances with the network that SageMaker's data-parallel library is made for.
DATA_PARALLEL = ("ml.p3.16xlarge", "ml.p3dn.24xlarge", "ml.p4d.24xlarge", "ml.p4de.24xlarge", "ml.p5.48xlarge")
_LAUNCHERS = {"torchrun": "torchrun", "mpi": "mpirun", "data_parallel": "torchrun"}  # of a form of distribution


def s3_location_of(settings: Settings, region: str) -> S3Location:
    """Return the location of orc's objects; the account may have to be filled in."""
    place = settings.place
    bucket = place.bucket or default_bucket(region, place.account or ACCOUNT)
    return S3Location(bucket, place.prefix.strip("/"))


def instance_of(job: JobSpec, settings: Settings) -> Instance:
    """Return the instance type of the job. Raises `RenderError` for an unknown one, with the nearest type."""
    name = settings.instance_type
    if name in instances():
        return instances()[name]
    if name is None:
        what = "no instance type is given"
        hint = "Set resources.options.sagemaker.instance_type, like ml.g5.2xlarge, or the cluster's."
    elif name in LOCAL_TYPES:
        what = f"instance_type: {name} is the local mode of SageMaker's SDK, which is no cluster"
        hint = "The same job runs on this machine, in the same image by docker, with  "
        hint += f"--cluster local --set environment.container={settings.image_uri or 'IMAGE'}"
    else:
        from orc.launchers.spec.problems import nearest

        what = f"unknown instance type {name!r}{nearest(name, instances())}"
        hint = "The types that train are those of the SageMaker API, like ml.g5.2xlarge."
    raise RenderError(what, where=job.name, hint=hint)


def adapt_job(job: JobSpec, settings: Settings) -> JobSpec:
    """*job* with the nodes, processes, launcher and runtime settings that SageMaker's own settings mean.

    Raises `RenderError` where the two contradict each other, and for what the instances do not have.
    """
    instance = instance_of(job, settings)
    refuse_range(job, "a training job has a fixed number of instances")
    form = settings.distribution.kind if settings.distribution else "none"
    if settings.distribution is None and settings.distributed_type == "DATA_PARALLEL":
        form = "data_parallel"
    for what, hint in _disagreements(job, settings, form):
        raise RenderError(what, where=job.name, hint=hint)
    resources = {**job.resources.model_dump(), **_resources(job, settings, instance)}
    job = job.model_copy(update={"resources": resources, **_launcher(job, settings, form)})
    runtime = {name: getattr(settings, name) for name in ("mixed_precision", "use_cpu")}
    runtime = {name: value for name, value in runtime.items() if value is not None}
    # SageMaker's data-parallel library takes the place of NCCL where the runtime opens the process group.
    env = {"ORC_COLLECTIVES": "smddp"} if form == "data_parallel" else {}
    job = job.model_copy(update={"runtime": {**runtime, **job.runtime}, "env": {**env, **job.env}})
    for what in _lacking(job, instance):
        raise RenderError(what, where=job.name, hint="Choose another instance_type, or ask for less.")
    return job


def _disagreements(job: JobSpec, settings: Settings, form: str) -> Iterator[tuple[str, str]]:
    """Yield what the job and the settings, which distribute it in the *form*, do not agree on, and what to do."""
    asked, count, per_host = job.resources, settings.instance_count, _per_host(settings)
    if job.grace > MAX_GRACE_S:
        what = f"grace = {job.grace:g}: SageMaker kills what still runs 120 seconds after it was told to end"
        yield what, f"Write grace: {MAX_GRACE_S:g} or less."
    if count is not None and asked.max_nodes not in (1, count):
        hint = "Leave instance_count out; the number of nodes is that of the instances."
        yield f"resources.nodes = {asked.max_nodes}, but instance_count = {count}", hint
    if per_host is not None and asked.procs_per_node not in (None, per_host):
        what = f"resources.procs_per_node = {asked.procs_per_node}, but processes_per_host = {per_host}"
        yield what, "Give one of them."
    if form == "data_parallel" and settings.instance_type not in DATA_PARALLEL:
        what = f"SageMaker's data parallelism does not run on {settings.instance_type}"
        where = ", ".join(DATA_PARALLEL)
        yield what, f"It runs on {where}; elsewhere torchrun with NCCL does the same: leave it out."
    if form != "none" and job.launcher.kind not in ("torchrun", _LAUNCHERS[form]):
        what = f"launcher: {job.launcher.kind}, but the distribution {form} is started by {_LAUNCHERS[form]}"
        yield what, "Give one of them."


def _per_host(settings: Settings) -> int | None:
    return settings.distribution.processes_per_host if settings.distribution else None


def _resources(job: JobSpec, settings: Settings, instance: Instance) -> dict[str, Any]:
    found: dict[str, Any] = {} if settings.instance_count is None else {"nodes": settings.instance_count}
    if (per_host := _per_host(settings)) is not None:
        found["procs_per_node"] = per_host
    elif instance.gpus and job.resources.procs_per_node is None and not job.resources.gpus_per_node:
        # One process per GPU is what the instances are for, unless it was said that there is nothing to distribute.
        off = settings.distribution is not None and settings.distribution.kind == "none"
        single = off or settings.distributed_type == "NO" or settings.use_cpu
        found |= {"procs_per_node": 1} if single else {"gpus_per_node": instance.gpus}
    return found


def _launcher(job: JobSpec, settings: Settings, form: str) -> dict[str, Any]:
    if form == "none":
        return {}
    wanted = _LAUNCHERS[form]
    words = settings.distribution.arguments if settings.distribution else []
    options: Mapping[str, Any] = job.launcher.options if job.launcher.kind == wanted else {}
    if words:
        options = {**options, "arguments": [*options.get("arguments", ()), *words]}
    return {"launcher": {"kind": wanted, "options": options}}


def _lacking(job: JobSpec, instance: Instance) -> Iterator[str]:
    """Yield what the job asks for and the instances do not have."""
    asked = job.resources
    for what, number, there in (
        ("GPUs", asked.gpus_per_node, instance.gpus),
        ("CPU cores", (asked.cpus_per_proc or 0) * asked.nproc, instance.vcpus),
        ("GiB of memory", (asked.memory_bytes or 0) / (1 << 30), instance.memory_gib),
    ):
        if number > there:
            yield f"the job asks for {number:g} {what} per node, and {instance.name} has {there}"


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
    for what, hint in _contradictions(job, settings, instance):
        raise RenderError(what, where=job.name, hint=hint)
    inputs = {
        CHANNEL: Channel(s3_data=location.snapshot(snapshot), input_mode="File"),
        ATTEMPT_CHANNEL: Channel(s3_data=location.attempt(attempt), input_mode="File"),
        **settings.inputs,
    }
    image = settings.image_uri or _stock_image(job, settings, instance, region)
    made: dict[str, Any] = {
        "TrainingJobName": training_job_name(attempt, settings.base_job_name),
        "AlgorithmSpecification": {
            "TrainingImage": image,
            "ContainerEntrypoint": [python, "-I", "-S", f"{INPUT}/{ATTEMPT_CHANNEL}/{ENTRY}"],
            **_registry(settings),
        },
        "RoleArn": _role(settings, region),
        "InputDataConfig": [_channel(name, channel, settings.input_mode) for name, channel in inputs.items()],
        "OutputDataConfig": {
            "S3OutputPath": settings.output_path or f"{location.job(attempt.job)}/output",
            **({"CompressionType": "NONE"} if settings.disable_output_compression else {}),
        },
        "ResourceConfig": {"InstanceCount": job.resources.max_nodes},
        "StoppingCondition": _stopping(job, settings),
        "CheckpointConfig": {"S3Uri": checkpoint_uri(settings, location, attempt), "LocalPath": local_path(settings)},
        "Environment": {**settings.environment, MARKER_VARIABLE: attempt.marker},
        "Tags": _tags(job, attempt, settings),
        **({"HyperParameters": dict(hyperparameters)} if hyperparameters else {}),
    }
    request = members(settings)
    for key, value in made.items():
        request[key] = {**request.get(key, {}), **value} if isinstance(value, dict) else value
    return request


def checkpoint_uri(settings: Settings, location: S3Location, attempt: AttemptId) -> str:
    """Return the URI of the job's checkpoints and of the records of its attempts: the same for all attempts."""
    return (settings.checkpoint_s3_uri or f"{location.job(attempt.job)}/checkpoints").rstrip("/")


def local_path(settings: Settings) -> str:
    """Return the directory of the checkpoints in the container."""
    return settings.checkpoint_local_path.rstrip("/")


def request_text(request: Mapping[str, Any]) -> str:
    """The request as a file of the plan."""
    return json.dumps(request, indent=2, ensure_ascii=False) + "\n"


def _contradictions(job: JobSpec, settings: Settings, instance: Instance) -> Iterator[tuple[str, str]]:
    """Yield settings that AWS would refuse, or that contradict each other, and what to do about each."""
    if settings.role is None:
        hint = "Set `role` in the cluster's options: the name or the ARN of an IAM role that SageMaker may assume."
        yield "no execution role is given", hint
    if instance.neuron and not settings.image_uri:
        what = f"{instance.name} has AWS's own accelerators, which the stock PyTorch images cannot use"
        yield what, "Give an image_uri with the Neuron SDK."
    if settings.use_spot_instances and settings.keep_alive_period_in_seconds is not None:
        what = "use_spot_instances and keep_alive_period_in_seconds exclude each other: spot instances do not stay"
        yield what, "Remove one of them."
    if settings.volume_kms_key and instance.local_disk:
        what = f"volume_kms_key: the disks of {instance.name} are its own, encrypted with a key of their own"
        yield what, "Leave volume_kms_key out."
    if bool(settings.subnets) != bool(settings.security_group_ids):
        yield "subnets and security_group_ids are given together, or not at all", "A VPC needs both."
    if _registry(settings) and settings.training_repository_access_mode != "Platform" and not settings.subnets:
        what = "training_repository_access_mode Vpc: a private registry is reached from a VPC alone"
        yield what, "Set subnets and security_group_ids to those that see it."
    if job.secrets and settings.place.secrets == "secretsmanager" and settings.enable_network_isolation:
        what = "enable_network_isolation: without a network the job cannot ask Secrets Manager for its secrets"
        yield what, "Set `secrets: s3` in the cluster's options."
    own, most = job.resources.time_s, settings.max_run
    if own is not None and most is not None and most < own:
        yield f"resources.time = {own} seconds, but max_run = {most}", "Leave one of them out."
    name, longest = max(("resources.time", own or 0), ("max_run", most or 0), key=lambda limit: limit[1])
    if longest > MAX_RUN_S:
        what = f"{name} = {longest} seconds: SageMaker trains {MAX_RUN_S} seconds (28 days) at most"
        yield what, "Write 28d or less, and `timeout` in retry.on for more than that."
    if settings.max_wait is not None and not settings.use_spot_instances:
        hint = "Write use_spot_instances: true as well, or leave max_wait out."
        yield "max_wait is for spot instances alone", hint
    if settings.max_wait is not None and settings.max_wait < (run := _run_s(job, settings)):
        what = f"max_wait = {settings.max_wait} seconds is less than the {run} seconds that the job may train"
        hint = "max_wait is the time for waiting and training together; set max_run (or resources.time) as well."
        yield what, hint
    for channel_name, channel in settings.inputs.items():
        for what, hint in _wrong(settings, channel):
            yield f"inputs: {channel_name}: {what}", hint


def _registry(settings: Settings) -> dict[str, Any]:
    """Return how a private registry of images is reached."""
    credentials = settings.training_repository_credentials_provider_arn
    access = settings.training_repository_access_mode or ("Vpc" if credentials else None)
    auth = {"TrainingRepositoryAuthConfig": {"TrainingRepositoryCredentialsProviderArn": credentials}}
    found = {"TrainingRepositoryAccessMode": access, **(auth if credentials else {})}
    return {"TrainingImageConfig": found} if access else {}


def _stock_image(job: JobSpec, settings: Settings, instance: Instance, region: str) -> str:
    versions = (settings.pytorch_version, settings.transformers_version, settings.py_version)
    try:
        return Image(*versions, instance.gpus > 0, instance.name, region).uri
    except RenderError as error:
        raise RenderError(error.what, where=job.name, hint=error.hint) from None


def _role(settings: Settings, region: str) -> str:
    role = str(settings.role)
    account = settings.place.account or ACCOUNT
    return role if role.startswith("arn:") else f"arn:{partition_of(region)}:iam::{account}:role/{role}"


def _run_s(job: JobSpec, settings: Settings) -> int:
    """Return how long the training job may train."""
    own = job.resources.time_s
    margin = None if own is None else min(own + MARGIN_S + int(job.grace), MAX_RUN_S)
    return settings.max_run or margin or DEFAULT_RUN_S


def _stopping(job: JobSpec, settings: Settings) -> dict[str, int]:
    run = _run_s(job, settings)
    wait = {"MaxWaitTimeInSeconds": settings.max_wait or run} if settings.use_spot_instances else {}
    return {"MaxRuntimeInSeconds": run, **wait}


def _tags(job: JobSpec, attempt: AttemptId, settings: Settings) -> list[dict[str, str]]:
    """orc's own, the settings', and those of the job that AWS takes."""
    own = {"orc:marker": attempt.marker, "orc:job": attempt.job}
    if is_tag("orc:name", job.name):
        own["orc:name"] = job.name
    taken = {key: value for key, value in job.tags.items() if is_tag(key, value) and not key.startswith("aws:")}
    found = {**taken, **settings.tags, **own}
    return [{"Key": key, "Value": value} for key, value in sorted(found.items())]


def _channel(name: str, channel: Channel, input_mode: str) -> dict[str, Any]:
    """Return an input channel of the request."""
    made = {"ChannelName": name, **channel.members()}
    if channel.file_system_id and input_mode != "File":
        made["InputMode"] = "File"  # it is mounted, whatever way the other channels come
    return made


def _wrong(settings: Settings, channel: Channel) -> Iterator[tuple[str, str]]:
    mode = channel.input_mode or settings.input_mode
    if (channel.s3_data or "").startswith("file://"):
        what = f"SageMaker cannot read {channel.s3_data}, which is on this machine"
        yield what, "Copy it to S3 (`aws s3 sync`), or run the job here (`--cluster local`)."
    if channel.file_system_id and not settings.subnets:
        yield "a file system is reached from a VPC alone", "Set subnets and security_group_ids to those that see it."
    if channel.s3_data_type == "AugmentedManifestFile" and mode != "Pipe":
        yield f"an AugmentedManifestFile is read with input_mode Pipe, not {mode}", "Set input_mode: Pipe for it."
    if channel.compression == "Gzip" and mode != "Pipe":
        yield f"SageMaker decompresses with input_mode Pipe, not {mode}", "Leave compression out; the job decompresses."
