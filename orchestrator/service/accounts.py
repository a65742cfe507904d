"""Accounts that jobs of a service run as: what `run_as` of a cluster says, and who is refused."""

from __future__ import annotations

from typing import TYPE_CHECKING

from orc.launchers.errors import RenderError
from orc.orchestrator.workspace import login_name

if TYPE_CHECKING:
    from orc.launchers.spec.clusters import Cluster


def refuse_without_account(cluster: Cluster, user: str) -> None:
    """Raise `RenderError` where jobs of *user* have no account on *cluster*.

    With ``run_as: service`` everybody's jobs run as the account of the service. Without it only the user who has that
    account may use the cluster: a job can do whatever its account can, so lending it has to be said.
    """
    if cluster.run_as == "service" or user == login_name():
        return
    raise RenderError(
        f"jobs of {user} have no account on the cluster {cluster.name}",
        where=f"cluster {cluster.name}: run_as",
        hint="an administrator writes `run_as: service` into clusters.yaml where everybody's jobs may run as the "
        f"service's own account ({login_name()})",
    )
