"""Slurm's heterogeneous jobs: components with nodes of different kinds. Pure.

Each component asks for nodes of its own; all start together, and the nodes are numbered through, component after
component, so that the ranks of the job are too. Every node runs the same number of processes: ranks are counted so.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from orc.launchers.errors import RenderError

if TYPE_CHECKING:
    from orc.launchers.backends.slurm.options import SlurmOptions
    from orc.launchers.spec import JobSpec

# What a component may have for itself: of the job's resources, and of its Slurm options.
RESOURCES = ("nodes", "gpus_per_node", "cpus_per_proc", "memory")
OPTIONS = (
    *("partition", "account", "qos", "reservation", "constraint", "nodelist", "exclude", "exclusive", "licenses"),
    *("gpu_type", "gpus_as", "gres", "mem", "mem_per_cpu", "mem_per_gpu"),
)
_MEMORY = frozenset(("mem", "mem_per_cpu", "mem_per_gpu"))
# Options of sbatch that the first component sets for the whole job.
ONCE = frozenset(
    (
        *("job-name", "comment", "chdir", "output", "open-mode", "export", "dependency", "kill-on-invalid-dep"),
        *("begin", "nice", "wckey", "mail-user", "mail-type"),
    )
)


@dataclass(frozen=True)
class Component:
    """Resources and options that a component has for itself."""

    resources: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)


def read_components(value: Any, checked: Callable[[Mapping[str, Any], int], dict[str, Any]]) -> tuple[Component, ...]:
    """Return the components, whose options *checked* reads with their number. Raises `ValueError`."""
    from orc.launchers.spec.problems import nearest

    if not isinstance(value, (list, tuple)) or not all(isinstance(one, Mapping) for one in value) or len(value) < 2:
        raise ValueError("expected a list of two components or more, like [{nodes: 1}, {nodes: 2, partition: gpu}]")
    components = []
    for number, given in enumerate(value):
        own: dict[str, dict[str, Any]] = {"resources": {}, "options": {}}
        for name, one in given.items():
            key = str(name).replace("-", "_")
            if key == "procs_per_node":
                raise ValueError("procs_per_node is the same on all nodes: set resources.procs_per_node")
            if key in RESOURCES:
                own["resources"][key] = one
            elif key in OPTIONS:
                own["options"][key] = one
            else:
                known = nearest(key, [*RESOURCES, *OPTIONS]) or f"; the keys are {', '.join((*RESOURCES, *OPTIONS))}"
                raise ValueError(f"component {number}: unknown key {name!r}{known}")
        nodes = own["resources"].get("nodes", 1)
        if isinstance(nodes, bool) or not isinstance(nodes, int) or nodes < 1:
            raise ValueError(f"component {number}: nodes: expected a whole number from 1, not {nodes!r}")
        own["resources"]["nodes"] = nodes
        components.append(Component(own["resources"], checked(own["options"], number)))
    return tuple(components)


def components(job: JobSpec, options: SlurmOptions) -> list[tuple[JobSpec, SlurmOptions]]:
    """Return the job as each of its components, in the order of their nodes; the job itself if it has none.

    Raises `RenderError` for components that do not make up the job.
    """
    if not options.heterogeneous:
        return [(job, options)]
    from pydantic import ValidationError

    counts = [int(one.resources["nodes"]) for one in options.heterogeneous]
    if job.resources.nodes != sum(counts):
        raise RenderError(
            f"resources.nodes = {job.resources.nodes}, and the components of `heterogeneous` have "
            f"{' + '.join(map(str, counts))} = {sum(counts)} nodes",
            where=job.name,
            hint=f"Set resources.nodes to {sum(counts)}.",
        )
    whole = dict(job.resources)
    found = []
    for number, one in enumerate(options.heterogeneous):
        # A form of memory of its own replaces the job's, in whichever form that is.
        forms = _MEMORY & one.options.keys()
        base = {**whole, "procs_per_node": job.resources.nproc, **({"memory": None} if forms else {})}
        cleared = dict.fromkeys(_MEMORY) if forms or one.resources.get("memory") else {}
        if one.resources.get("gpus_per_node") == 0:
            cleared = {**cleared, "gpu_type": None, "mem_per_gpu": None}
        try:
            own = job.model_copy(update={"resources": {**base, **one.resources}})
        except ValidationError as error:
            first = error.errors()[0]
            place = ".".join(str(part) for part in first["loc"][1:])
            raise RenderError(f"heterogeneous: component {number}: {place}: {first['msg']}", where=job.name) from None
        # Both have been checked, each by itself.
        found.append((own, options.model_construct(**{**dict(options), "heterogeneous": (), **cleared, **one.options})))
    return found
