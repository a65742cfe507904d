"""Slurm's heterogeneous jobs: components with nodes of different kinds. Pure.

Each component asks for nodes of its own; all start together, and the nodes are numbered through, component after
component, so that the ranks of the job are too. Every node runs the same number of processes: ranks are counted so.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from orc.launchers.backends.slurm.options import MEMORY, SlurmOptions
from orc.launchers.errors import RenderError

if TYPE_CHECKING:
    from orc.launchers.spec import JobSpec

# Options of sbatch that the first component sets for the whole job.
ONCE = frozenset(
    (
        *("job-name", "comment", "chdir", "output", "open-mode", "export", "dependency", "kill-on-invalid-dep"),
        *("begin", "nice", "wckey", "mail-user", "mail-type"),
    )
)


def components(job: JobSpec, options: SlurmOptions) -> list[tuple[JobSpec, SlurmOptions]]:
    """Return the job as each of its components, in the order of their nodes; the job itself if it has none.

    Raises `RenderError` for components that do not make up the job.
    """
    if not options.heterogeneous:
        return [(job, options)]
    from pydantic import ValidationError

    counts = [one.nodes for one in options.heterogeneous]
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
        forms = MEMORY & one.options.keys()
        base = {**whole, "procs_per_node": job.resources.nproc, **({"memory": None} if forms else {})}
        cleared = dict.fromkeys(MEMORY) if forms or one.memory else {}
        if one.gpus_per_node == 0:
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
