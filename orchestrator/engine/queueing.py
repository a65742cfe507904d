"""Queueing: the order in which jobs get their turns, and the limits and quotas of what may be in flight at one time.

On each cluster the oldest job comes first, younger ones where no older one waits.

The age of a job counts from its submission, earlier by `PRIORITY_S` for each point of its priority. So a job of a
higher priority overtakes those that were submitted at most so many hours before it, and nobody waits for ever: after
200 hours even the lowest priority comes before everything that is submitted then.

Fair share, where orc places jobs: users with little usage go before users with much. With all users of a cluster
entitled to the same,

- use of a user: the slot-seconds of the user's attempts (a slot is a GPU, or a process of a job without GPUs), of which
  those of a week ago count half, those of two weeks ago a quarter, and so on (`HALF_LIFE_S`);
- factor: ``2 ** -(n * use / use of all)`` for *n* users; 1 for one who has used nothing, 0.5 for the average one;
- head start: the factor times `HEAD_START_S`. A job counts as submitted earlier by so much.

So use never outweighs more than half a day of waiting, and with one user nothing changes.

Limits: `Book`, which is pure, goes through the jobs that wait, in the order of the queue, and says for which of them
there is no place. A job that waits for a limit closes it to those behind it, so that a large one is not overtaken for
ever by small ones; one that would fit, and that nobody sends, stops nobody. Quotas of cost count what an hour of a
job's nodes costs.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from orc.orchestrator.ledger.database import insert
from orc.orchestrator.ledger.records import JobSize

if TYPE_CHECKING:
    from orc.launchers.spec.clusters import Limits
    from orc.orchestrator.ledger.database import Connection
    from orc.orchestrator.ledger.records import JobRecord
    from orc.orchestrator.ledger.transaction import Transaction
    from orc.orchestrator.workspace import Workspace

PRIORITY_S = 3600.0


def queue_key(created_at: float, priority: int, job: str, *, head_start_s: float = 0.0) -> tuple[float, float, str]:
    """Return the key by which jobs are sorted: the smallest goes first.

    *head_start_s* is what fair share gives the job's owner.
    """
    return (created_at - priority * PRIORITY_S - head_start_s, created_at, job)


# -- fair share

HALF_LIFE_S = 7 * 86400.0
HEAD_START_S = 12 * 3600.0
_LOOK_BACK_S = 4 * HALF_LIFE_S  # what is older counts less than a sixteenth
_KEPT_S = 30.0  # for which a reading of head starts is good enough


class Use(NamedTuple):
    """Time for which one attempt held its slots."""

    user: str
    slots: int
    began_at: float
    ended_at: float


def decayed(use: Use, now: float) -> float:
    """Return the slot-seconds of *use* that count at *now*."""
    rate = math.log(2) / HALF_LIFE_S
    ended, began = min(use.ended_at, now), min(use.began_at, now)
    return use.slots * (math.exp(-rate * (now - ended)) - math.exp(-rate * (now - began))) / rate


def head_starts(uses: Iterable[Use], users: Collection[str], now: float) -> dict[str, float]:
    """Return the seconds by which jobs of each of *users* have their turns earlier; empty for one user alone."""
    used: Counter[str] = Counter()
    for use in uses:
        used[use.user] += decayed(use, now)  # type: ignore[assignment]
    everybody = {*users, *used}
    total = sum(used.values())
    if len(everybody) < 2 or total <= 0:
        return {}
    return {user: HEAD_START_S * 2.0 ** -(len(everybody) * used[user] / total) for user in everybody}


def read_head_starts(ws: Workspace, tx: Transaction, cluster: str) -> Mapping[str, float]:
    """Return the head starts of the users of *cluster*, at most `_KEPT_S` old."""
    at, known = ws.head_starts.get(cluster, (-math.inf, {}))
    if 0 <= tx.now - at < _KEPT_S:
        return known
    waiting = {
        owner
        for (owner,) in tx.connection.tuples(
            "SELECT DISTINCT owner FROM jobs WHERE cluster = :c AND state IN ('QUEUED', 'PREPARED')", {"c": cluster}
        )
    }
    found: Mapping[str, float] = {}
    if len(waiting) > 1:  # one alone overtakes nobody
        rows = tx.connection.tuples(
            "SELECT j.id, j.owner, a.started_at, a.ended_at FROM attempts a JOIN jobs j ON j.id = a.job_id "
            "WHERE j.cluster = :c AND a.started_at IS NOT NULL AND (a.ended_at IS NULL OR a.ended_at > :since)",
            {"c": cluster, "since": tx.now - _LOOK_BACK_S},
        )
        sizes = {job: ws.size_of(tx.connection, job) for job, *_ in rows}
        slots = {job: size.gpus or size.ranks for job, size in sizes.items()}
        uses = [Use(owner, slots[job], began, ended or tx.now) for job, owner, began, ended in rows]
        found = head_starts(uses, waiting, tx.now)
    ws.head_starts[cluster] = (tx.now, found)
    return found


# -- limits and quotas


class Quota(NamedTuple):
    """Limit of one resource."""

    scope: str  # user, project
    name: str
    resource: str  # gpus, jobs, cost
    amount: float


def all_quotas(connection: Connection) -> list[Quota]:
    """Return all quotas."""
    rows = connection.tuples("SELECT scope, name, resource, amount FROM quotas ORDER BY scope, name, resource")
    return [Quota(*row) for row in rows]


def put_quota(connection: Connection, quota: Quota) -> None:
    """Store a quota, in place of the one that there may be."""
    conflict = "ON CONFLICT (scope, name, resource) DO UPDATE SET amount = excluded.amount"
    insert(connection, "quotas", quota._asdict(), conflict=conflict)


def remove_quota(connection: Connection, scope: str, name: str, resource: str) -> bool:
    """Forget a quota; False where there is none."""
    gone = "DELETE FROM quotas WHERE scope = :scope AND name = :name AND resource = :resource"
    return connection.execute(gone, {"scope": scope, "name": name, "resource": resource}) == 1


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
    spent: Mapping[tuple[str, str], float] = field(default_factory=dict)
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
        from orc.orchestrator.engine.usage import read_spent

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
    from orc.orchestrator.engine.usage import read_spent

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
