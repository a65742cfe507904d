"""Plan of one attempt on SSH hosts: ``agent.json`` for them, and one command on each. Pure.

Paths may begin with ``~``: the home directory is known on the host alone, and agents and transports fill it in there.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from orc.launchers.agent.config import AgentConfig
from orc.launchers.attempts.agent_config import agent_config, agent_file
from orc.launchers.backends.ssh.placement import capacity
from orc.launchers.backends.ssh.settings import DEFAULT_PYTHON, Settings
from orc.launchers.paths import Layout
from orc.launchers.plan import Plan, PlanCommand, PlanFile

if TYPE_CHECKING:
    from orc.launchers.backends.base import Placement, Snapshot
    from orc.launchers.ids import AttemptId
    from orc.launchers.spec import JobSpec
    from orc.launchers.spec.clusters import Cluster

OWNER = "ssh"


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
    return Plan(
        attempt=attempt,
        cluster=cluster.name,
        backend="ssh",
        files=_placed(files, placement.hosts),
        commands=tuple(commands),
        env=configs[0].env,
        trees=snapshot.digests,
        secrets=tuple(job.secrets),
    )


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
            "total": {host.name: capacity(host, placement.slots) for host in hosts},
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
