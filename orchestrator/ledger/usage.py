"""Usage: the attempts that have run on nodes, for reports of hours and costs; quotas of it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from orc.orchestrator.ledger.database import Connection, insert, one_of


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


_ROWS = 2000  # of one query: specifications are long


class Usage(NamedTuple):
    """Use of nodes by one attempt. Times are seconds since the epoch."""

    job: str
    attempt: int
    owner: str
    project: str
    cluster: str
    hosts: int
    started_at: float
    ended_at: float | None  # None: it still runs
    spec: Mapping[str, Any]
    tags: Mapping[str, str]

    @property
    def nodes(self) -> int:
        """Number of nodes that it uses."""
        return self.hosts or int(str(self.spec.get("resources", {}).get("nodes", 1)).partition(":")[0])

    @property
    def gpus_per_node(self) -> int:
        """Number of GPUs that it uses of each."""
        return int(self.spec.get("resources", {}).get("gpus_per_node") or 0)


def read_usage(
    connection: Connection,
    *,
    job_ids: Sequence[str] | None = None,
    owner: str | None = None,
    since: float | None = None,
    until: float | None = None,
    tags: bool = False,
) -> Iterator[Usage]:
    """Yield the attempts that ran between *since* and *until*, by job and number, page by page; if asked, with tags."""
    where, fixed = ["a.started_at IS NOT NULL"], dict[str, Any]()
    for condition, name, value in (
        ("(a.ended_at IS NULL OR a.ended_at > :since)", "since", since),
        ("a.started_at < :until", "until", until),
        ("j.owner = :owner", "owner", owner),
    ):
        if value is not None:
            where.append(condition)
            fixed[name] = value
    if job_ids is not None:
        these, chosen = one_of("j.id", job_ids)
        where.append(these)
        fixed |= chosen
    after: tuple[str, int] = ("", 0)
    while True:
        rows = connection.tuples(
            "SELECT j.id, a.number, j.owner, j.project, j.cluster, a.hosts, a.started_at, a.ended_at, j.spec "  # noqa: S608
            f"FROM attempts a JOIN jobs j ON j.id = a.job_id WHERE {' AND '.join(where)} "
            "AND (a.job_id, a.number) > (:job, :number) ORDER BY a.job_id, a.number LIMIT :rows",
            {**fixed, "job": after[0], "number": after[1], "rows": _ROWS},
        )
        if not rows:
            return
        tagged: dict[str, dict[str, str]] = {}
        bounds = {"first": rows[0][0], "last": rows[-1][0]}
        query = "SELECT job_id, key, value FROM job_tags WHERE job_id >= :first AND job_id <= :last"
        for job_id, key, value in connection.tuples(query, bounds) if tags else ():
            tagged.setdefault(job_id, {})[key] = value
        for job, number, who, project, cluster, hosts, started, ended, spec in rows:
            count = len(json.loads(hosts))
            yield Usage(
                job, number, who, project, cluster, count, started, ended, json.loads(spec), tagged.get(job, {})
            )
        after = (rows[-1][0], rows[-1][1])
