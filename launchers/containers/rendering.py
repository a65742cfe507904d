"""The ``agent.json`` of containers. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from orc.launchers.attempts.agent_config import agent_config
from orc.launchers.environments.rendering import environment_of
from orc.launchers.errors import RenderError

if TYPE_CHECKING:
    from orc.launchers.agent.config import AgentConfig
    from orc.launchers.containers.layout import ContainerLayout
    from orc.launchers.ids import AttemptId
    from orc.launchers.snapshot.manifest import Snapshot
    from orc.launchers.spec import JobSpec
    from orc.launchers.spec.clusters import Cluster

LINK_PORT = 29411  # containers have a network of their own: nothing else listens there


def container_config(
    job: JobSpec,
    snapshot: Snapshot,
    attempt: AttemptId,
    cluster: Cluster,
    layout: ContainerLayout,
    *,
    hosts: Sequence[str],
    setup: Sequence[str],
    image: str,
    link_port: int = LINK_PORT,
) -> AgentConfig:
    """Return the configuration of the agents of an attempt, whose containers reach each other by the names *hosts*.

    *setup* are all commands before the ranks, *image* says where people name the image instead of in ``environment``.
    Raises `RenderError`.
    """
    refuse_container(job, cluster, image)
    config = agent_config(job, snapshot, attempt, cluster, layout, deadline_s=job.resources.time_s, setup=list(setup))
    config = config.replace(
        work_dir=layout.code,
        logs_dir=f"{layout.root}/logs",
        private_dir=f"{layout.root}/private",
        hosts=[{"name": name, "address": name} for name in hosts],
    )
    if len(hosts) > 1:
        config = config.replace(link=True, min_nodes=len(hosts), hub={"port": link_port, "addresses": [hosts[0]]})
    return config


def refuse_container(job: JobSpec, cluster: Cluster, image: str) -> None:
    """Raise `RenderError` for a job that names a container in ``environment``, and not in *image*."""
    if environment_of(job, cluster).container is not None:
        what = "environment.container: the job runs in a container already"
        raise RenderError(what, where=job.name, hint=f"Name the image in {image}.")
