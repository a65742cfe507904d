"""Connections to the hosts of a cluster."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from orc.launchers.remote.transport import Transport
    from orc.launchers.spec.clusters import Cluster


def open_transports(cluster: Cluster, names: Iterable[str] | None = None) -> dict[str, Transport]:
    """Return the transports of the cluster's hosts (or of those called *names*), by name. They connect when first used.

    They share jump hosts; close each when done. Raises `SpecError` when the cluster's options are wrong.
    """
    from orc.launchers.backends.ssh.settings import read_settings
    from orc.launchers.remote.ssh.pool import ConnectionPool
    from orc.launchers.remote.ssh.transport import SshTransport

    settings = read_settings(cluster)
    pool = ConnectionPool(settings.options.access)
    return {name: SshTransport(settings.spec(name), pool) for name in (settings.names if names is None else names)}
