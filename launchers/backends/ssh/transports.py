"""Connections to the hosts of a cluster."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from orc.launchers.remote.transport import Transport
    from orc.launchers.spec.clusters import Cluster


def open_transports(cluster: Cluster) -> dict[str, Transport]:
    """Return the transports of the cluster's hosts by name. They connect when they are first used.

    They share jump hosts; close each when done. Raises `SpecError` when the cluster's options are wrong.
    """
    from orc.launchers.backends.ssh.settings import read_settings
    from orc.launchers.remote.ssh.pool import ConnectionPool
    from orc.launchers.remote.ssh.transport import SshTransport

    settings = read_settings(cluster)
    pool = ConnectionPool(settings.options.access)
    return {name: SshTransport(settings.spec(name), pool) for name in settings.names}
