"""The client of one command: of the service that is configured (`orc login`), else of the ledger."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from orc.launchers.findings import Finding
from orc.orchestrator.cli.ui import reporting
from orc.orchestrator.cli.ui.display import waiting

if TYPE_CHECKING:
    from orc.launchers.spec import LoadedJob
    from orc.launchers.spec.groups import LoadedGroup
    from orc.orchestrator.client import Client
    from orc.orchestrator.clients.logins import Login
    from orc.orchestrator.clients.service import ServiceClient
    from orc.orchestrator.clients.surface import JobsClient


def open_client(*, reconciler: bool = True) -> JobsClient:
    """Return a client that is closed when the command ends. Raises `LaunchError`.

    It is that of a service where one is configured. Else, where jobs are live, a reconciler is left behind that goes on
    with them, unless *reconciler* is false.
    """
    from orc.orchestrator.clients import logins

    if login := logins.configured():
        service = open_service(login)
        click.get_current_context().call_on_close(service.close)
        return service
    return _of_ledger(reconciler)


def open_service(login: Login) -> ServiceClient:
    """Return the client of a service, which says when an answer takes long. Raises `LaunchError`."""
    from orc.orchestrator.clients.connecting import service_client

    service = service_client(login)
    service.session.around = lambda: waiting(f"waiting for {login.url}")
    return service


def open_ledger(*, reconciler: bool = True) -> Client:
    """Return the client of the ledger, as `open_client`, for commands that go through no service.

    Raises `NeedsLedger` where a service is configured: the ledger here is not the one that is meant then.
    """
    from orc.orchestrator.clients import logins

    if login := logins.configured():
        raise _needs_ledger(login.url)
    return _of_ledger(reconciler)


def refresh(client: JobsClient, job_ids: Sequence[str], note: str = "shown is what was last known of its jobs") -> None:
    """Ask the clusters of jobs what has become of them, and warn about those that do not answer; *note* is added."""
    with waiting(f"asking the clusters about {len(job_ids)} job{'s' if len(job_ids) != 1 else ''}"):
        report = client.refresh(job_ids)
    reporting.warn_unreachable(report.unreachable, note)


def check_job(path: str, overrides: Sequence[str], cluster: str | None) -> LoadedJob:
    """Return the job in the file *path*, checked as far as this machine can.

    The clusters are the service's where one is configured, and it checks the rest. Raises `LaunchError`.
    """
    from orc.orchestrator.clients import logins

    if logins.configured():
        from orc.launchers.spec import load_job

        return load_job(path, overrides, cluster=cluster)
    from orc.orchestrator.engine.job_source import load_checked

    return load_checked(path, overrides, cluster=cluster)


def check_jobs(
    path: str, overrides: Sequence[str], cluster: str | None, *, needs_clusters: bool = False
) -> LoadedJob | LoadedGroup:
    """Return the job or the group of jobs in the file *path*; as `check_job`.

    A command that *needs_clusters* cannot do without those of this machine. Raises `LaunchError`.
    """
    from orc.orchestrator.clients import logins

    if login := logins.configured():
        if needs_clusters:
            raise _needs_ledger(login.url)
        from orc.launchers.spec.groups import load_jobs

        return load_jobs(path, overrides, cluster=cluster)
    from orc.orchestrator.engine.job_source import load_jobs_checked

    return load_jobs_checked(path, overrides, cluster=cluster)


def _needs_ledger(url: str) -> Exception:
    from orc.orchestrator.clients.errors import NeedsLedger

    name = click.get_current_context().command_path
    return NeedsLedger(
        f"`{name}` works on the ledger and the clusters of the machine it runs on, and commands here go to a service",
        where=url,
        hint="run it on the service's machine, or with ORC_SERVICE_URL=local for the ledger of this one",
    )


def _of_ledger(reconciler: bool) -> Client:
    from orc.orchestrator.client import Client

    client = Client(reconciler=reconciler)
    click.get_current_context().call_on_close(client.close)
    if why := client.workspace.ledger.volatile:
        where = client.workspace.ledger.database.url.removeprefix("sqlite:///")
        do = "free some space: jobs go on, what becomes of them is recorded later, retries wait"
        reporting.warn(Finding("warning", f"the ledger can only be read: {why}", where, do))
    client.session.leave_reconciler()
    return client
