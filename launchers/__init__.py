"""The launch layer: how a job reaches machines.

Two independent axes, never mixed: a *command* (`orc.launchers.commands`) says how processes start on a given set of
nodes, a *backend* (`orc.launchers.backends`) says where nodes come from and how a plan gets run there.
Nothing here imports torch, and nothing here is imported by the training process except `orc.runtime.core.config`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import fabric

__all__ = ["connections"]


def connections(cluster: str, hosts: Iterable[str] | None = None) -> fabric.ThreadingGroup:
    """Return fabric connections to the hosts of a cluster; its login node for Slurm, the workers of a named TPU.

    They use the cluster's users, ports, keys, jump hosts and host-key policy, and connect when first used. Hosts behind
    one jump host share the connection to it. Close the group when done; a ``with`` statement does.

    Args:
        cluster: Its name in ``clusters.yaml``.
        hosts: Names of some of its hosts; all of them by default.

    Returns:
        A `fabric.ThreadingGroup`; the ``original_host`` of each connection is the host's name in the cluster.

    Raises:
        SpecError: The cluster, or one of *hosts*, does not exist, or it has no hosts that are reached over SSH.

    Example::

        with connections("lab") as group:
            for host, result in group.run("nvidia-smi -L", hide=True).items():
                print(host.original_host, result.stdout)
    """
    from orc.launchers.backends import open_backend
    from orc.launchers.errors import SpecError
    from orc.launchers.remote.ssh.transport import SshTransport
    from orc.launchers.spec.clusters import get_cluster

    roots = open_backend(get_cluster(cluster)).stores().roots
    found = {name: host.connection for name, (host, _) in roots.items() if isinstance(host, SshTransport)}
    wanted = list(found) if hosts is None else list(hosts)
    if not found:
        raise SpecError(f"the cluster {cluster} has no hosts that are reached over SSH")
    if missing := [name for name in wanted if name not in found]:
        raise SpecError(f"{missing[0]} is no host of the cluster {cluster}", hint=f"It has {', '.join(found)}.")
    import fabric  # which is there: the connections are its own

    return fabric.ThreadingGroup.from_connections([found[name] for name in wanted])
