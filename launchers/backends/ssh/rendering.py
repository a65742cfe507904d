"""Choice of the hosts of a job, and the plan of an attempt on them: ``agent.json``, and one command on each. Pure.

The same job and the same free slots always give the same hosts. Paths may begin with ``~``: the home directory is known
on the host alone, and agents and transports fill it in there.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from orc.launchers.agent.config import AgentConfig
from orc.launchers.attempts.agent_config import agent_config, agent_file
from orc.launchers.backends.base import Placement
from orc.launchers.backends.ssh.settings import DEFAULT_PYTHON, Host, JobOptions, Settings, read_job_options
from orc.launchers.errors import NoRoom, RenderError
from orc.launchers.paths import Layout
from orc.launchers.plan import Plan, PlanCommand, PlanFile

if TYPE_CHECKING:
    from orc.launchers.backends.base import Snapshot
    from orc.launchers.ids import AttemptId
    from orc.launchers.spec import JobSpec
    from orc.launchers.spec.clusters import Cluster

OWNER = "ssh"


def slots_of(job: JobSpec, options: JobOptions) -> int:
    """Return the slots that *job* takes on each of its hosts: one for each GPU, or for each process without GPUs."""
    return options.slots or job.resources.gpus_per_node or job.resources.nproc


def candidates(job: JobSpec, settings: Settings) -> tuple[str, ...]:
    """Return every host that *job* could run on, were nothing else there, in order of preference."""
    options = read_job_options(job, settings)
    return tuple(host.name for host in _fitting(options, slots_of(job, options), settings))


def place(job: JobSpec, settings: Settings, taken: Mapping[str, int], avoid: Collection[str] = ()) -> Placement:
    """Choose hosts for *job* beside the slots that others hold: as many as are free, up to its maximum.

    Hosts are filled in the order of the cluster's list. Raises `NoRoom` when too few are free now, `RenderError`
    when there are too few at all.
    """
    options = read_job_options(job, settings)
    slots = slots_of(job, options)
    fewest, most = job.resources.min_nodes, job.resources.max_nodes
    fitting = _fitting(options, slots, settings)
    if len(fitting) < fewest:
        raise _never(job, options, slots, fitting, settings)
    good = [host for host in fitting if host.name not in avoid]
    usable = good if len(good) >= fewest else [*good, *(host for host in fitting if host.name in avoid)]
    free = [host for host in usable if _free(host, taken) >= slots]
    if len(free) < fewest:
        busy = [host.name for host in usable if host not in free]
        wanted = f"{fewest} host{'s' if fewest > 1 else ''}" + (f" with {slots} free slots each" if slots > 1 else "")
        raise NoRoom(f"waiting for {wanted}; {len(free)} free, taken: {', '.join(busy)}", where=job.name)
    return Placement(tuple(host.name for host in free[:most]), slots)


def _free(host: Host, taken: Mapping[str, int]) -> float:
    held = taken.get(host.name, 0)
    if not host.slots:  # one job at a time, however large
        return 0 if held else float("inf")
    return host.slots - held


def _fitting(options: JobOptions, slots: int, settings: Settings) -> list[Host]:
    hosts: Sequence[Host] = [settings.host(name) for name in dict.fromkeys(options.hosts)] or settings.hosts
    return [
        host
        for host in hosts
        if host.name not in options.exclude
        and set(options.labels) <= set(host.labels)
        and (not host.slots or host.slots >= slots)
    ]


def _never(job: JobSpec, options: JobOptions, slots: int, fitting: Sequence[Host], settings: Settings) -> RenderError:
    nodes, total, left = job.resources.min_nodes, len(settings.hosts), len(fitting)
    asked = [f"the label {label}" for label in options.labels]
    if any(host.slots and host.slots < slots for host in settings.hosts):
        asked.append(f"{slots} slots")
    wanted = f"{nodes} host{'s' if nodes > 1 else ''}" + (f" with {' and '.join(asked)}" if asked else "")
    if asked or options.hosts or options.exclude:
        what = ("are left" if left > 1 else "is left") if not asked else "are such" if left > 1 else "is one"
        has = f"{left or 'none'} of the cluster's {total} hosts {what}"
    else:
        has = f"the cluster has {total}"
    return RenderError(
        f"the job needs {wanted}, and {has}",
        where=job.name,
        hint="Lower resources.nodes or resources.procs_per_node, or add hosts (or slots) to the cluster.",
    )


def render_plan(
    job: JobSpec, snapshot: Snapshot, attempt: AttemptId, cluster: Cluster, settings: Settings, placement: Placement
) -> Plan:
    """Return the plan: one file per host that differs, and the start of one agent per host, node 0 first.

    Raises `RenderError` for a job that its command cannot carry.
    """
    configs = [_config(job, snapshot, attempt, cluster, settings, placement, name) for name in placement.hosts]
    files = [agent_file(config) for config in configs]
    commands = [
        start_command(settings, name, node, config.runtime_tree, file.path, attempt.marker)
        for node, (name, config, file) in enumerate(zip(placement.hosts, configs, files, strict=True))
    ]
    placed, secrets = _placed(files, placement.hosts), tuple(job.secrets)
    return Plan(attempt, cluster.name, "ssh", placed, tuple(commands), configs[0].env, snapshot.digests, secrets)


def start_command(settings: Settings, name: str, node: int, tree: str, file: str, marker: str) -> PlanCommand:
    """Return the command that starts the agent of one node from the snapshot *tree*, configured by *file*."""
    # -I -S: nothing of the user's Python environment can get into the agent.
    interpreter = (settings.python_of(name) or DEFAULT_PYTHON, "-I", "-S", tree)
    argv = (*interpreter, "start", file, "--node-rank", str(node), "--owner", f"{OWNER}:{marker}")
    return PlanCommand(argv, purpose=f"start the agent of node {node}", host=name)


def _config(
    job: JobSpec,
    snapshot: Snapshot,
    attempt: AttemptId,
    cluster: Cluster,
    settings: Settings,
    placement: Placement,
    name: str,
) -> AgentConfig:
    hosts = [settings.host(other) for other in placement.hosts]
    config = agent_config(
        job,
        snapshot,
        attempt,
        cluster,
        Layout.at(settings.root_of(name)),
        nnodes=len(hosts),
        deadline_s=job.resources.time_s,
    )
    return config.replace(
        python=settings.python_of(name),
        min_nodes=job.resources.min_nodes if config.command.get("elastic") else len(hosts),
        peer_timeout_s=settings.options.peer_timeout,
        link=settings.options.shared is not True,  # where the hosts share no files
        hosts=[{"name": host.name, "address": host.where} for host in hosts],
        slots={
            "total": {host.name: host.slots or placement.slots for host in hosts},
            "take": placement.slots,
            "gpus": job.resources.gpus_per_node > 0,
            **({"gpus_per_node": job.resources.gpus_per_node} if job.resources.gpus_per_node else {}),
        },
    )


def _placed(files: list[PlanFile], hosts: tuple[str, ...]) -> tuple[PlanFile, ...]:
    """Return one file for all hosts when it is the same everywhere, else one for each."""
    if len(set(files)) == 1:
        return (files[0],)
    return tuple(PlanFile(f.path, f.content, f.mode, host) for f, host in zip(files, hosts, strict=True))


def file_for(plan: Plan, host: str) -> PlanFile:
    """Return the ``agent.json`` that *plan* has for one of its hosts."""
    return next(file for file in plan.files if file.host in (None, host))


def hosts_of(plan: Plan) -> tuple[str, ...]:
    """Return the hosts that *plan* uses, in node order."""
    return tuple(str(command.host) for command in plan.commands)


def config_of(plan: Plan, host: str) -> dict[str, Any]:
    """Return the configuration of the agent on *host*."""
    config: dict[str, Any] = json.loads(file_for(plan, host).content)
    return config
