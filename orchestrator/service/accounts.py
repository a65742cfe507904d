"""Accounts that jobs of a service run as: `run_as` of a cluster, and its refusals."""

from __future__ import annotations

from typing import TYPE_CHECKING

from orc.orchestrator.workspace import login_name, no_account

if TYPE_CHECKING:
    from orc.orchestrator.workspace import Workspace


def refuse_without_account(ws: Workspace, cluster: str, user: str) -> None:
    """Raise `LaunchError` where jobs of *user* have no account on *cluster*.

    With ``run_as: service`` everybody's jobs run as the account of the service, with a mapping each as the account of
    its owner. Without either only the user who has the service's account may use the cluster: a job can do whatever its
    account can, so lending it has to be said.
    """
    run_as = ws.backend(cluster).cluster.run_as
    if isinstance(run_as, dict):
        ws.backend_of_user(cluster, user)  # opened, so that an account that cannot be used is known now
    elif run_as != "service" and user != login_name():
        raise no_account(cluster, user)
