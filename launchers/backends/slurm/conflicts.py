"""Conflicts between a job and its Slurm options. Pure."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from orc.launchers.backends.slurm.queue_rows import expand_nodes
from orc.launchers.errors import RenderError

if TYPE_CHECKING:
    from orc.launchers.backends.slurm.options import SlurmOptions
    from orc.launchers.spec import JobSpec
    from orc.launchers.spec.environment import Environment

_GPU = re.compile(r"\b(?:gres[:/])?gpu(?=[:=,]|$)")
_TRES = ("tres-per-node", "tres-per-task")


def check_conflicts(job: JobSpec, options: SlurmOptions) -> None:
    """Check that the options agree with the job. Raises `RenderError` that names both sides."""
    for what, hint in (*_memory(job, options), *_gpus(job, options), *_nodes(job, options), *_container(job, options)):
        raise RenderError(what, where=job.name, hint=hint)


def _memory(job: JobSpec, options: SlurmOptions) -> list[tuple[str, str]]:
    names = [name for name in ("mem_per_cpu", "mem_per_gpu", "mem") if getattr(options, name)]
    given = (["resources.memory (per node)"] if job.resources.memory else []) + [f"the Slurm option {n}" for n in names]
    if len(given) > 1:
        return [(f"{given[0]} and {given[1]} exclude each other", "Remove one of them.")]
    if options.mem_per_gpu and not job.resources.gpus_per_node:
        return [(f"mem_per_gpu = {options.mem_per_gpu}, but the job asks for no GPUs", "Set resources.gpus_per_node.")]
    return []


def _gpus(job: JobSpec, options: SlurmOptions) -> list[tuple[str, str]]:
    if options.gpu_type and not job.resources.gpus_per_node:
        return [(f"gpu_type = {options.gpu_type}, but the job asks for no GPUs", "Set resources.gpus_per_node.")]
    by = ["gres"] if any(_GPU.match(name) for name in options.gres) else []
    by += [f"--{name} (under extra)" for name, value in options.extra if name in _TRES and _GPU.search(value or "")]
    if by and job.resources.gpus_per_node:
        return [
            (
                f"GPUs are asked for twice, by resources.gpus_per_node and by {by[0]}",
                "Keep resources.gpus_per_node, and gpu_type for their type.",
            )
        ]
    return []


def _nodes(job: JobSpec, options: SlurmOptions) -> list[tuple[str, str]]:
    if options.gpus_as == "gpus-per-task" and job.resources.min_nodes < job.resources.max_nodes:
        what = f"gpus_as: gpus-per-task needs a fixed number of nodes, and resources.nodes is {job.resources.nodes}"
        return [(what, "Use gpus_as: gpus-per-node.")]
    wanted, unwanted = expand_nodes(options.nodelist or ""), expand_nodes(options.exclude or "")
    if both := [name for name in wanted if name in unwanted]:
        return [(f"{both[0]} is in nodelist and in exclude", "Remove it from one of them.")]
    if len(wanted) > job.resources.max_nodes:
        what = f"nodelist names {len(wanted)} nodes, all of which must be part of the job, and resources.nodes is "
        return [(f"{what}{job.resources.nodes}", "Name fewer, or use `exclude` to keep away from the others.")]
    names = {name for name, _ in options.extra}
    if options.exclusive and (shared := names & {"oversubscribe", "share"}):
        return [(f"exclusive and --{shared.pop()} (under extra) exclude each other", "Remove one of them.")]
    return []


def _container(job: JobSpec, options: SlurmOptions) -> list[tuple[str, str]]:
    others = ("mounts", "name", "mount_home", "remap_root", "writable", "entrypoint")
    given = [f"container_{name}" for name in others if getattr(options, f"container_{name}") not in (None, ())]
    if options.container_image is None:
        return [(f"{given[0]} is given, but no container_image", "Set container_image.")] if given else []
    return []


def check_nesting(job: JobSpec, options: SlurmOptions, environment: Environment, root: str) -> None:
    """Check that no container is put into another, and that the root can be mounted. Raises `RenderError`."""
    if options.container_image is None:
        return
    if environment.container is not None:
        raise RenderError(
            "container_image and `environment: container` would put a container into a container",
            where=job.name,
            hint="Keep one of them: container_image where Slurm has pyxis.",
        )
    if root.startswith("~"):
        raise RenderError(
            f"container_image needs a root that is an absolute path, not {root}",
            where=job.name,
            hint="Write `root:` of the cluster as the full path over there.",
        )
