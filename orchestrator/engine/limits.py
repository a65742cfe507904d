"""Limits of clusters and quotas of users and projects: what may be in flight at one time.

`Book` is pure: it goes through the jobs that wait, in the order of the queue, and says for which of them there is no
place. A job that waits for a limit closes it to those behind it, so that a large one is not overtaken for ever by small
ones; one that would fit, and that nobody sends, stops nobody. Quotas of cost count what an hour of a job's nodes costs.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from orc.launchers.errors import LaunchError
from orc.orchestrator.engine.queueing import queue_key
from orc.orchestrator.ledger.records import JobSize
from orc.orchestrator.ledger.usage import Quota, Use, all_quotas, machine_of, read_use

if TYPE_CHECKING:
    from orc.launchers.spec.clusters import Cluster, Limits, Prices
    from orc.orchestrator.ledger.database import Connection
    from orc.orchestrator.ledger.records import JobRecord
    from orc.orchestrator.workspace import Workspace

_IN_FLIGHT = "('PREPARED', 'SUBMITTING', 'PENDING', 'RUNNING')"


class Demand(NamedTuple):
    """Demand of one job: its share of limits and quotas."""

    job: str
    cluster: str
    owner: str
    project: str
    gpus: int
    queue_key: tuple[float, float, str] = (0.0, 0.0, "")


Key = tuple[str, ...]


class Bound(NamedTuple):
    """Limit that a job comes under, and how much of it the job takes."""

    key: Key
    need: float
    amount: float
    text: str  # for people: "limit of 4 jobs on lab"


def bounds(demand: Demand, limits: Limits | None, quotas: Iterable[Quota]) -> list[Bound]:
    """Return the bounds of *demand*: the limits of its cluster, the quotas of its user and project."""
    found = []
    if limits is not None:
        cluster, user = demand.cluster, demand.owner
        for amount, need, unit, whose in (
            (limits.max_jobs, 1, "jobs", ""),
            (limits.max_gpus, demand.gpus, "GPUs", ""),
            (limits.max_jobs_per_user, 1, "jobs", user),
            (limits.max_gpus_per_user, demand.gpus, "GPUs", user),
        ):
            if amount is not None:
                per = f" of {whose}" if whose else ""
                found.append(
                    Bound(("cluster", cluster, unit, whose), need, amount, f"{amount} {unit}{per} on {cluster}")
                )
    names = {"user": demand.owner, "project": demand.project}
    for quota in quotas:
        if quota.resource != "cost" and names.get(quota.scope) == quota.name:
            need, unit = (1, "jobs") if quota.resource == "jobs" else (demand.gpus, "GPUs")
            text = f"{quota.amount:g} {unit} of the {quota.scope} {quota.name}"
            found.append(Bound((quota.scope, quota.name, unit), need, quota.amount, text))
    return found


def shares(demand: Demand) -> dict[Key, int]:
    """Return what *demand*, once in flight, takes of every limit and quota that there could be."""
    found: dict[Key, int] = {}
    for unit, amount in (("jobs", 1), ("GPUs", demand.gpus)):
        for key in (
            ("cluster", demand.cluster, unit, ""),
            ("cluster", demand.cluster, unit, demand.owner),
            ("user", demand.owner, unit),
            ("project", demand.project, unit),
        ):
            found[key] = amount
    return found


@dataclass
class Book:
    """Book of what is in flight, and of the jobs that wait, in the order of the queue."""

    limits: Mapping[str, Limits]  # by cluster
    quotas: Sequence[Quota]
    used: Counter[Key] = field(default_factory=Counter)
    waiting: Sequence[Demand] = ()
    spent: Spent = field(default_factory=dict)
    _next: int = 0  # of *waiting*: those before it have been looked at
    _closed: dict[Key, str] = field(default_factory=dict)  # by whom

    def take(self, demand: Demand) -> None:
        """Note that the job is in flight now."""
        self.used.update(shares(demand))

    def hold(self, demand: Demand) -> str:
        """Return what the job waits for; empty when it may be sent. Called in the order of the queue."""
        while self._next < len(self.waiting) and self.waiting[self._next].queue_key < demand.queue_key:
            older = self.waiting[self._next]
            self._next += 1
            if older.job != demand.job:
                self._reason(older)
        return self._reason(demand)

    def _reason(self, demand: Demand) -> str:
        reason = self._spent(demand)
        for bound in bounds(demand, self.limits.get(demand.cluster), self.quotas):
            if not bound.need:
                continue
            if self.used[bound.key] + bound.need > bound.amount:
                reason = reason or f"waiting for its turn: {self.used[bound.key]:g} of the {bound.text} are taken"
                if bound.need > bound.amount:
                    return f"waiting for ever: it needs {bound.need:g} of the {bound.text}"
                self._closed.setdefault(bound.key, demand.job)
            elif self._closed.get(bound.key, demand.job) != demand.job:
                reason = (
                    reason or f"waiting for its turn: {self._closed[bound.key]} is before it among the {bound.text}"
                )
        return reason

    def _spent(self, demand: Demand) -> str:
        names = {"user": demand.owner, "project": demand.project}
        for quota in self.quotas:
            used = self.spent.get((quota.scope, quota.name), 0.0)
            if quota.resource == "cost" and names.get(quota.scope) == quota.name and used >= quota.amount:
                whose = f"the {quota.scope} {quota.name}"
                return f"waiting for its turn: {whose} has spent {used:.2f} of {quota.amount:g} in 30 days"
        return ""


# -- the book of a look at the ledger


def read_book(
    ws: Workspace, connection: Connection, now: float, clusters: Collection[str], besides: Collection[str]
) -> Book | None:
    """Return the book of everything that is in flight or waits, but *besides*; `None` where nothing is limited.

    Of the jobs of other clusters than *clusters* only the quotas matter, and opening their backends takes time.
    """
    quotas = all_quotas(connection)
    limits = {name: found for name in clusters if (found := ws.limits(name)) is not None}
    if not quotas and not limits:
        return None
    columns = "id, cluster, owner, project, created_at, priority"
    flying = connection.tuples(f"SELECT {columns} FROM jobs WHERE state IN {_IN_FLIGHT}")  # noqa: S608
    queued = connection.tuples(
        f"SELECT {columns} FROM jobs WHERE state = 'QUEUED' AND cancel_requested_at IS NULL "  # noqa: S608
        "AND (next_attempt_at IS NULL OR next_attempt_at <= :now) AND (not_before IS NULL OR not_before <= :now)",
        {"now": now},
    )
    book = Book(limits, quotas)
    if any(quota.resource == "cost" for quota in quotas):
        book.spent = read_spent(ws, connection, now)
    for row in flying:
        book.take(_demand(ws, connection, row))
    waiting = [_demand(ws, connection, row) for row in queued if row[0] not in besides]
    book.waiting = sorted(waiting, key=lambda demand: demand.queue_key)
    return book


def is_limited(ws: Workspace, cluster: str) -> bool:
    """Return True where jobs of *cluster* come under limits or quotas: then each of them is sent by itself."""
    with ws.ledger.database.read() as connection:
        return ws.limits(cluster) is not None or bool(all_quotas(connection))


def demand_of(ws: Workspace, connection: Connection, job: JobRecord) -> Demand:
    """Return the demand of *job*."""
    return _demand(ws, connection, (job.id, job.cluster, job.owner, job.project, job.created_at, job.priority))


def _demand(ws: Workspace, connection: Connection, row: Sequence[object]) -> Demand:
    job, cluster, owner, project, created_at, priority = row
    gpus = ws.size_of(connection, str(job)).gpus
    place = queue_key(float(created_at), int(priority), str(job))  # type: ignore[arg-type, call-overload]
    return Demand(str(job), str(cluster), str(owner), str(project), gpus, place)


def use_of_quotas(ws: Workspace) -> list[tuple[Quota, float]]:
    """Return the quotas, each with what is in flight of it now, or was spent in 30 days."""
    used: Counter[Key] = Counter()
    with ws.ledger.database.read() as connection:
        found = all_quotas(connection)
        spent = read_spent(ws, connection, ws.clock()) if any(q.resource == "cost" for q in found) else {}
        if found:
            query = f"SELECT id, cluster, owner, project, spec FROM jobs WHERE state IN {_IN_FLIGHT}"  # noqa: S608
            for job, cluster, owner, project, spec in connection.tuples(query):
                used.update(shares(Demand(job, cluster, owner, project, JobSize.of(json.loads(spec)).gpus)))
    units = {"jobs": "jobs", "gpus": "GPUs"}

    def use(quota: Quota) -> float:
        if quota.resource == "cost":
            return spent.get((quota.scope, quota.name), 0.0)
        return used[quota.scope, quota.name, units[quota.resource]]

    return [(quota, use(quota)) for quota in found]


PERIOD_S = 30 * 86400.0
_KEPT_S = 60.0  # for which a reading is good enough

Spent = Mapping[tuple[str, str], float]  # by scope and name


def price_of(use: Use, cluster: Cluster | None) -> float | None:
    """Return the price of one node of *use* for one hour on *cluster*, as it is described now; `None` without one."""
    if cluster is None:
        return None
    return price_of_node_hour(cluster.prices, use.gpus_per_node, use.machine or machine_of(cluster.options))


def price_of_node_hour(prices: Prices | None, gpus_per_node: int, instance: str) -> float | None:
    """Return the price of one node for one hour; `None` where *prices* lack it.

    The price of the machine's type counts if there is one; else the node's and that of its GPUs together.
    """
    if prices is None:
        return None
    if instance in prices.instance_hour:
        return float(prices.instance_hour[instance])
    if prices.node_hour is None and (prices.gpu_hour is None or not gpus_per_node):
        return None
    return float(prices.node_hour or 0.0) + gpus_per_node * float(prices.gpu_hour or 0.0)


def read_spent(ws: Workspace, connection: Connection, now: float) -> Spent:
    """Return what users and projects have spent in the `PERIOD_S` before *now*, at most `_KEPT_S` old.

    What has no price costs nothing.
    """
    if ws.spent is not None and 0 <= now - ws.spent[0] < _KEPT_S:
        return ws.spent[1]
    spent: Counter[tuple[str, str]] = Counter()
    for scope in ("user", "project"):
        for use in read_use(connection, scope, now, since=now - PERIOD_S):
            try:
                cluster = ws.backend(use.cluster).cluster
            except LaunchError:
                continue  # not configured any more: its hours have no price
            spent[scope, use.key] += use.node_s / 3600 * (price_of(use, cluster) or 0.0)  # type: ignore[assignment]
    ws.spent = (now, spent)
    return spent
