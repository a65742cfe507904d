"""Login node on another machine: its transport, and its root.

The root may begin with ``~``, which only the login node can resolve. Plans keep it, because rendering contacts no
machine: the batch script leaves it to the shell of the node, ``agent.json`` and the command line of sbatch get it at
submission.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from orc.launchers import paths
from orc.launchers.errors import SpecError
from orc.launchers.remote.ssh.options import DEFAULT_PYTHON as DEFAULT_PYTHON
from orc.launchers.remote.ssh.options import DEFAULT_ROOT

if TYPE_CHECKING:
    from pathlib import Path

    from orc.launchers.backends.slurm.options import SlurmSettings
    from orc.launchers.remote.transport import Transport
    from orc.launchers.spec.clusters import Cluster


def open_transport(cluster: Cluster, settings: SlurmSettings) -> Transport:
    """Return the transport to the login node, or to this machine. It connects when first used."""
    if settings.login is None:
        from orc.launchers.remote.transport import LocalTransport

        return LocalTransport()
    from orc.launchers.remote.ssh.transport import ConnectionPool, SshTransport

    return SshTransport(settings.login.spec(entry_python(cluster, settings)), ConnectionPool(settings.access))


def entry_python(cluster: Cluster, settings: SlurmSettings) -> str:
    """Return the interpreter for orc's own needs where the cluster is entered."""
    own = settings.login.python if settings.login else None
    return own or cluster.python or DEFAULT_PYTHON


def root_of(cluster: Cluster, settings: SlurmSettings, state_dir: Path | None = None) -> str:
    """Return the cluster's root; may begin with ``~/`` where it is behind a login node. Raises `SpecError`.

    By default it is the state directory, or the default of a login node.
    """
    default = DEFAULT_ROOT if settings.login else str(state_dir or paths.state_dir(create=False))
    root = (cluster.root or default).rstrip("/") or "/"
    if settings.login is not None and not root.startswith(("/", "~/")):
        what = f"root: {root!r} is neither absolute nor below the home directory on the login node"
        hint = "Write it like /shared/orc or ~/orc."
        raise SpecError(what, where=f"cluster {cluster.name}", hint=hint)
    return root
