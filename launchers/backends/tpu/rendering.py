"""Plan of one attempt on a TPU: the requests that create it, and the commands on its workers. Pure.

The workers' addresses are known only then; until then they go by their names.
"""

from __future__ import annotations

import json
import posixpath
from dataclasses import replace
from typing import TYPE_CHECKING

from orc.launchers.backends.base import Placement, refuse_range
from orc.launchers.backends.ssh.rendering import render_plan as render_on_hosts
from orc.launchers.backends.ssh.settings import read_settings as read_ssh_settings
from orc.launchers.backends.tpu import accelerators, request
from orc.launchers.backends.tpu.settings import for_job
from orc.launchers.backends.tpu.workers import ssh_cluster, worker_name
from orc.launchers.errors import RenderError
from orc.launchers.paths import Layout
from orc.launchers.plan import Plan, PlanFile

if TYPE_CHECKING:
    from orc.launchers.backends.base import Snapshot
    from orc.launchers.backends.tpu.settings import Options, Settings
    from orc.launchers.ids import AttemptId
    from orc.launchers.spec import JobSpec
    from orc.launchers.spec.clusters import Cluster


def render_plan(job: JobSpec, snapshot: Snapshot, attempt: AttemptId, cluster: Cluster, settings: Settings) -> Plan:
    """Return the plan. Raises `RenderError` for a job that no TPU of the cluster can carry."""
    options = for_job(job, settings)
    shape = slice_of(job, options)
    names = tuple(worker_name(number) for number in range(shape.hosts))
    resources = job.resources.model_copy(update={"nodes": shape.hosts, "procs_per_node": _processes(job, shape)})
    if resources != job.resources:
        job = job.model_copy(update={"resources": resources})
    inner = read_ssh_settings(ssh_cluster(cluster, settings, names))
    plan = render_on_hosts(job, snapshot, attempt, cluster, inner, Placement(names, job.resources.nproc))
    asked = request.render(options, shape.accelerator_type, attempt.marker, settings.public_key)
    content = json.dumps(asked, indent=2, ensure_ascii=False) + "\n"
    path = posixpath.join(str(Layout.at(settings.root).attempt(attempt)), request.FILE)
    return replace(plan, backend="tpu", files=(PlanFile(path, content, 0o600, request.API), *plan.files))


def slice_of(job: JobSpec, options: Options) -> accelerators.Slice:
    """Return the slice that *job* runs on. Raises `RenderError`."""
    refuse_range(job, "a TPU has a fixed number of worker machines")
    most = job.resources.max_nodes
    if job.resources.gpus_per_node:
        raise RenderError("resources.gpus_per_node: TPUs have no GPUs", where=job.name, hint="Remove it.")
    try:
        # One node is what a job asks for that says nothing: all the workers there are.
        shape = accelerators.for_hosts(options.accelerator_type, most if most > 1 else None)
    except ValueError as error:
        hint = "Leave `nodes` out to use all workers, or set accelerator_type to a generation such as v4."
        raise RenderError(f"resources.nodes: {error}", where=job.name, hint=hint) from None
    if shape.hosts > 1 and (written := [disk.source for disk in options.data_disks if disk.mode == "read_write"]):
        what = f"data_disks: {written[0]} is read_write, and {shape.accelerator_type} has {shape.hosts} machines: "
        what += "only one can write to a disk"
        raise RenderError(what, where=job.name, hint="Write mode: read_only, or take a type with one machine.")
    return shape


def _processes(job: JobSpec, shape: accelerators.Slice) -> int | None:
    """Return the processes of each machine: one for each chip where `launcher: xla` is to start those, else the job's.

    Raises `RenderError` for a number that torch_xla cannot work with on these chips.
    """
    asked, options = job.resources.procs_per_node, job.launcher.options
    wanted = (job.launcher.kind, options.get("processes", "chip"), options.get("device", "TPU"))
    if wanted != ("xla", "chip", "TPU"):
        return asked
    kind, chips = shape.accelerator_type, shape.chips_per_host
    if shape.cores_per_chip > 1:
        what = f"a chip of {kind} is two devices, which one process per chip cannot train on"
        raise RenderError(what, where=job.name, hint="Write `launcher: {kind: xla, options: {processes: host}}`.")
    if asked is None or asked == chips or (asked == 1 and shape.hosts == 1):
        return asked or chips
    what = f"resources.procs_per_node = {asked}: a machine of {kind} has {chips} chip{'s' if chips > 1 else ''}, and "
    what += "torch_xla uses all of them, or one of a single machine"
    raise RenderError(what, where=job.name, hint="Leave `procs_per_node` out: it is one process for each chip.")
