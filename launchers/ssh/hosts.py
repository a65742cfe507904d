"""Which machine, and how it is reached; and the transports of a cluster's machines."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from orc.launchers.clusters import Cluster
    from orc.launchers.transport import Transport


@dataclass(frozen=True)
class HostSpec:
    """One machine. What is `None` is looked up in the SSH configuration under `name`."""

    name: str  # what it is called in the cluster, and the name to look up in ~/.ssh/config
    address: str | None = None
    user: str | None = None
    port: int | None = None
    via: str | None = None  # jump hosts: [user@]host[:port], several separated by commas, the first one first
    python: str | None = None  # interpreter (3.9 or newer) for orc's own needs there; python3 if there is no such


@dataclass(frozen=True)
class Access:
    """How the machines of one cluster are reached."""

    host_keys: str = "strict"  # or accept-new: remember the key of a host that was never seen. Changed keys: never
    ssh_config: str | None = None  # instead of the user's and the system's
    connect_timeout_s: float = 10.0  # for each step of connecting; also the silence after which a connection is dead

    def config_files(self) -> tuple[str, ...]:
        """The SSH configuration files to read, in order; the first value found counts."""
        given = self.ssh_config or os.environ.get("ORC_SSH_CONFIG")
        return (given,) if given else ("~/.ssh/config", "/etc/ssh/ssh_config")


def open_transports(cluster: Cluster, names: Iterable[str] | None = None) -> dict[str, Transport]:
    """The transports of the cluster's hosts (or of those called *names*), by name. They connect when first used.

    They share jump hosts; close each when done. Raises `SpecError` when the cluster's options are wrong.
    """
    from orc.launchers.backends.ssh.settings import read_settings
    from orc.launchers.ssh.pool import Links
    from orc.launchers.ssh.transport import SshTransport

    settings = read_settings(cluster)
    links = Links(settings.options.access)
    return {name: SshTransport(settings.spec(name), links) for name in (settings.names if names is None else names)}
