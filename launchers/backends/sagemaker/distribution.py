"""A job on SageMaker: nodes, processes and launcher from its settings there. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from orc.launchers.backends.base import refuse_range
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
_LAUNCHERS = {"torchrun": "torchrun", "mpi": "mpirun", "data_parallel": "torchrun"}  # of a form of distribution


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
    for what, hint in _contradictions(job, settings, form):
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


def _contradictions(job: JobSpec, settings: Settings, form: str) -> Iterator[tuple[str, str]]:
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
