"""Calls about clusters and their queues, and about what users may have there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated

from orc.launchers.backends.reports import QueueReport
from orc.launchers.errors import LaunchError
from orc.orchestrator.api.call import Bounds, Kind, Name, call
from orc.orchestrator.api.session import LedgerSession
from orc.orchestrator.views import View


@dataclass(frozen=True)
class ClusterView(View):
    """Cluster, and how it answers. Times are seconds since the epoch."""

    name: str
    kind: str
    has_queue: bool
    polled_at: float | None = None
    answered_at: float | None = None
    interval_s: float | None = None
    error: str | None = None
    slots: int | None = None  # of its hosts, where the configuration says how many; a host without slots counts one
    slots_taken: int | None = None  # by our jobs


@dataclass(frozen=True)
class Clusters(View):
    """Clusters of clusters.yaml."""

    clusters: list[ClusterView]


@dataclass(frozen=True)
class QuotaView(View):
    """Limit of one resource for a user or a project."""

    scope: str
    name: str
    resource: str
    amount: float
    used: float = 0.0  # in flight now, or spent in 30 days


@dataclass(frozen=True)
class Quotas(View):
    """All quotas."""

    quotas: list[QuotaView]


def queueing_clusters(session: LedgerSession) -> tuple[list[str], dict[str, LaunchError]]:
    """Return the clusters with a queue of their own, and the errors of those that fail to open. Contacts none."""
    from orc.launchers.backends.base import SupportsQueue

    return session.workspace.clusters_with(SupportsQueue)


@call("GET", "/clusters", shows=Kind.SERVICE, parts=(Kind.ACCOUNTS,))
def list_clusters(session: LedgerSession) -> Clusters:
    """Return the clusters with the times of their last polls and answers. Contacts none.

    What went wrong with the accounts of others is told to admins.
    """
    from orc.orchestrator.ledger.polls import by_cluster

    queueing, _ = queueing_clusters(session)
    only = None if session.caller.may_see(Kind.ACCOUNTS) else session.caller.user
    totals = _capacities(session)
    taken = Counter[str]()
    for held in session.workspace.ledger.reservations():
        if held.cluster in totals:  # a host without slots is taken as a whole
            taken[held.cluster] += held.slots if totals[held.cluster].get(held.host) else 1
    with session.workspace.ledger.database.read() as connection:
        polls = {poll.cluster: poll for poll in by_cluster(connection, only)}
    views = []
    for name, cluster in session.clusters().items():
        keys = ("polled_at", "answered_at", "interval_s", "error")
        poll = {key: getattr(polls.get(name), key, None) for key in keys}
        if name in totals:
            poll |= {"slots": sum(slots or 1 for slots in totals[name].values()), "slots_taken": taken[name]}
        views.append(ClusterView(name, cluster.kind, name in queueing, **poll))
    return Clusters(views)


def _capacities(session: LedgerSession) -> dict[str, Mapping[str, int]]:
    """Return the slots of each host of the clusters whose configuration has them."""
    from orc.launchers.backends.base import SupportsCapacity

    ws = session.workspace
    found = {}
    for name in ws.clusters_with(SupportsCapacity)[0]:
        backend = ws.backend(name)
        assert isinstance(backend, SupportsCapacity)
        found[name] = backend.capacity()
    return found


@call("GET", "/clusters/{name}/queue", shows=Kind.SERVICE, asks_clusters=True)
def read_queue(session: LedgerSession, name: Name) -> QueueReport:
    """Return the queue of a cluster, and our jobs in it.

    Where users have accounts of their own there: with that of who asks, about its jobs.
    """
    from orc.launchers.backends.base import Handle, SupportsQueue

    ws = session.workspace
    plain = ws.backend(name)
    if not isinstance(plain, SupportsQueue):
        raise LaunchError(f"clusters of kind {plain.kind} have no queue of their own", where=name)
    backend = ws.backend_of_user(name, session.caller.user)
    assert isinstance(backend, SupportsQueue)  # of the same kind
    ours = []
    for job in ws.ledger.active():
        if job.cluster == name and job.attempt is not None and job.attempt.handle:
            with suppress(LaunchError):  # its owner has no account there any more
                if ws.backend_of_attempt(name, job.owner, job.attempt) is backend:
                    ours.append(Handle.from_dict(job.attempt.handle))
    return backend.queue(ours)


@call("GET", "/quotas", shows=Kind.SERVICE)
def list_quotas(session: LedgerSession) -> Quotas:
    """Return what users and projects may use at a time, and what they use now."""
    from orc.orchestrator.engine.queueing import use_of_quotas

    return Quotas([QuotaView(*quota, used) for quota, used in use_of_quotas(session.workspace)])


@call("PUT", "/quotas", shows=Kind.SERVICE, role="admin")
def set_quota(
    session: LedgerSession,
    scope: Annotated[str, Bounds(choices=("user", "project"))],
    name: Annotated[str, Bounds(min_length=1, max_length=255, pattern=r"^[\w.@+-]+$")],
    resource: Annotated[str, Bounds(choices=("gpus", "jobs", "cost"))],
    amount: Annotated[float | None, Bounds("Without one it is removed", ge=0, le=1e12)] = None,
) -> Quotas:
    """Set or remove a quota; return all."""
    from orc.orchestrator.engine import queueing

    with session.workspace.ledger.transaction() as tx:
        if amount is None:
            queueing.remove_quota(tx.connection, scope, name, resource)
        else:
            queueing.put_quota(tx.connection, queueing.Quota(scope, name, resource, amount))
    session.caller.note(f"{scope} {name}", resource=resource, amount=amount)
    return list_quotas(session)
