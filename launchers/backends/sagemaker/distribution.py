"""A job on SageMaker: nodes, processes and launcher from its settings there. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from orc.launchers.backends.sagemaker.instances import Instance, instances
from orc.launchers.backends.sagemaker.settings import Settings
from orc.launchers.errors import RenderError

if TYPE_CHECKING:
    from orc.launchers.spec import JobSpec

# What SageMaker gives a container between SIGTERM and SIGKILL, less what the agents need to write down how it ended.
MAX_GRACE_S = 115.0
# Words of the SDK for a container on this machine.
LOCAL_TYPES = ("local", "local_gpu")
# Instances with the network that SageMaker's data-parallel library is made for.
DATA_PARALLEL = ("ml.p3.16xlarge", "ml.p3dn.24xlarge", "ml.p4d.24xlarge", "ml.p4de.24xlarge", "ml.p5.48xlarge")


def instance_of(job: JobSpec, settings: Settings) -> Instance:
    """Return the instance type of the job. Raises `RenderError` for an unknown one, with the nearest type."""
    name = settings.instance_type
    if name is None:
        raise RenderError(
            "no instance type is given",
            where=job.name,
            hint="Set resources.options.sagemaker.instance_type, like ml.g5.2xlarge, or the cluster's.",
        )
    if name in LOCAL_TYPES:
        image = settings.image_uri or "IMAGE"
        raise RenderError(
            f"instance_type: {name} is the local mode of SageMaker's SDK, which is no cluster",
            where=job.name,
            hint="The same job runs on this machine, in the same image by docker, with  "
            f"--cluster local --set environment.container={image}",
        )
    found = instances().get(name)
    if found is None:
        from orc.launchers.spec.problems import nearest

        raise RenderError(
            f"unknown instance type {name!r}{nearest(name, instances())}",
            where=job.name,
            hint="The types that train are those of the SageMaker API, like ml.g5.2xlarge.",
        )
    return found


def adapt_job(job: JobSpec, settings: Settings) -> JobSpec:
    """*job* with the nodes, processes, launcher and runtime settings that SageMaker's own settings mean.

    Raises `RenderError` where the two contradict each other, and for what the instances do not have.
    """
    instance = instance_of(job, settings)
    _refuse(job)
    resources = _resources(job, settings, instance)
    job = job.model_copy(update={"resources": {**job.resources.model_dump(), **resources}, **_launcher(job, settings)})
    runtime = {name: getattr(settings, name) for name in ("mixed_precision", "use_cpu")}
    runtime = {name: value for name, value in runtime.items() if value is not None and name not in job.runtime}
    job = job.model_copy(update={"runtime": {**job.runtime, **runtime}, "env": _environment(job, settings)})
    _check_size(job, instance)
    return job


def _refuse(job: JobSpec) -> None:
    if job.resources.min_nodes != job.resources.max_nodes:
        raise RenderError(
            f"resources.nodes = {job.resources.nodes}: a training job has a fixed number of instances",
            where=job.name,
            hint=f"Write nodes: {job.resources.max_nodes}.",
        )
    if job.grace > MAX_GRACE_S:
        raise RenderError(
            f"grace = {job.grace:g}: SageMaker kills what still runs 120 seconds after it was told to end",
            where=job.name,
            hint=f"Write grace: {MAX_GRACE_S:g} or less.",
        )


def _resources(job: JobSpec, settings: Settings, instance: Instance) -> dict[str, Any]:
    found: dict[str, Any] = {}
    nodes, count = job.resources.max_nodes, settings.instance_count
    if count is not None and nodes not in (1, count):
        raise RenderError(
            f"resources.nodes = {nodes}, but instance_count = {count}",
            where=job.name,
            hint="Leave instance_count out; the number of nodes is that of the instances.",
        )
    if count is not None:
        found["nodes"] = count
    distribution = settings.distribution
    per_host = distribution.processes_per_host if distribution else None
    if per_host is not None and job.resources.procs_per_node not in (None, per_host):
        raise RenderError(
            f"resources.procs_per_node = {job.resources.procs_per_node}, but processes_per_host = {per_host}",
            where=job.name,
        )
    if per_host is not None:
        found["procs_per_node"] = per_host
    elif job.resources.procs_per_node is None and not job.resources.gpus_per_node:
        # One process per GPU is what the instances are for, unless it was said that there is nothing to distribute.
        off = distribution is not None and distribution.kind == "none"
        single = off or settings.distributed_type == "NO" or settings.use_cpu
        if instance.gpus and single:
            found["procs_per_node"] = 1
        elif instance.gpus:
            found["gpus_per_node"] = instance.gpus
    return found


def _launcher(job: JobSpec, settings: Settings) -> dict[str, Any]:
    kind = _distribution(job, settings)
    if kind is None or kind == "none":
        return {}
    wanted = "mpirun" if kind == "mpi" else "torchrun"
    if job.launcher.kind not in ("torchrun", wanted):
        raise RenderError(
            f"launcher: {job.launcher.kind}, but the distribution {kind} is started by {wanted}",
            where=job.name,
            hint="Give one of them.",
        )
    words = settings.distribution.arguments if settings.distribution else []
    options: Mapping[str, Any] = job.launcher.options if job.launcher.kind == wanted else {}
    if words:
        options = {**options, "arguments": [*options.get("arguments", ()), *words]}
    return {"launcher": {"kind": wanted, "options": options}}


def _distribution(job: JobSpec, settings: Settings) -> str | None:
    default = "data_parallel" if settings.distributed_type == "DATA_PARALLEL" else None
    kind = settings.distribution.kind if settings.distribution else default
    if kind == "data_parallel" and settings.instance_type not in DATA_PARALLEL:
        raise RenderError(
            f"SageMaker's data parallelism does not run on {settings.instance_type}",
            where=job.name,
            hint=f"It runs on {', '.join(DATA_PARALLEL)}; elsewhere torchrun with NCCL does the same: leave it out.",
        )
    return kind


def _environment(job: JobSpec, settings: Settings) -> dict[str, str]:
    """SageMaker's data-parallel library takes the place of NCCL where the runtime opens the process group."""
    on = _distribution(job, settings) == "data_parallel"
    return {**({"ORC_COLLECTIVES": "smddp"} if on else {}), **job.env}


def _check_size(job: JobSpec, instance: Instance) -> None:
    """Refuse what the instances do not have."""
    asked = job.resources
    cores = (asked.cpus_per_proc or 0) * asked.nproc
    memory = (asked.memory_bytes or 0) / (1 << 30)
    for what, number, there in (
        ("GPUs", asked.gpus_per_node, instance.gpus),
        ("CPU cores", cores, instance.vcpus),
        ("GiB of memory", memory, instance.memory_gib),
    ):
        if number > there:
            raise RenderError(
                f"the job asks for {number:g} {what} per node, and {instance.name} has {there}",
                where=job.name,
                hint="Choose another instance_type, or ask for less.",
            )
