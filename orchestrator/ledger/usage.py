"""Usage: the attempts that have run on nodes, for reports of hours and costs; quotas of it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
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


class Use(NamedTuple):
    """Use of nodes by attempts of one key, on one cluster and of one size. Times are seconds since the epoch."""

    key: str
    cluster: str
    gpus_per_node: int
    machine: str  # type that they requested; empty: that of the cluster
    jobs: int
    attempts: int
    node_s: float  # seconds times nodes
    running: bool  # one of them still runs
    began_at: float  # the first of them
    ended_at: float  # the last of them


_MACHINE_KEYS = ("instance_type", "accelerator_type", "type")


def machine_of(options: Mapping[str, Any]) -> str:
    """Return the type of machine that *options* of a job or a cluster name; empty where they name none."""
    named = (options.get(key) for key in _MACHINE_KEYS)
    return next((value[:255] for value in named if isinstance(value, str)), "")


def columns_of_attempt(job: Mapping[str, str], hosts: int) -> dict[str, Any]:
    """Return the columns by which the use of an attempt of *job* on *hosts* is added up: they are beside its times, so
    that no job and no specification is read for a sum. *job* is its row: cluster, backend, owner, project and spec.
    """
    resources = json.loads(job["spec"]).get("resources") or {}
    least = int(str(resources.get("nodes", 1)).partition(":")[0])
    return {
        **{name: job[name] for name in ("cluster", "owner", "project")},
        "nodes": hosts or least,
        "gpus_per_node": int(resources.get("gpus_per_node") or 0),
        "machine": machine_of(resources.get("options", {}).get(job["backend"], {})),
    }


_KEYS = {"job": "a.job_id", "user": "a.owner", "project": "a.project", "cluster": "a.cluster"}
_SIZE = "a.cluster, a.gpus_per_node, a.machine"


def read_use(
    connection: Connection,
    by: str,
    now: float,
    *,
    job_ids: Sequence[str] | None = None,
    owner: str | None = None,
    since: float | None = None,
    until: float | None = None,
) -> list[Use]:
    """Return what attempts have used between *since* and *until*, by job, user, project, cluster, ``tag:KEY`` or
    ``attempt``: then each is by itself, with its job as the key. Those that still run count until *now*.
    """
    fixed: dict[str, Any] = {"now": now}
    begin, end = "a.started_at", "COALESCE(a.ended_at, :now)"
    if since is not None:
        begin, fixed["since"] = f"CASE WHEN {begin} < :since THEN :since ELSE {begin} END", since
    if until is not None:
        end, fixed["until"] = f"CASE WHEN {end} > :until THEN :until ELSE {end} END", until
    ran = f"a.started_at IS NOT NULL AND {end} >= {begin}"
    ran += " AND a.started_at < :until" if until is not None else ""
    ran += " AND (a.ended_at IS NULL OR a.ended_at > :since)" if since is not None else ""
    where, tags, key = [ran], "", "a.job_id" if by == "attempt" else _KEYS.get(by, "COALESCE(t.value, '')")
    if owner is not None:
        where.append("a.owner = :owner")
        fixed["owner"] = owner
    if job_ids is not None:
        these, chosen = one_of("a.job_id", job_ids)
        where.append(these)
        fixed |= chosen
    if by.startswith("tag:"):
        tags, fixed["tag"] = "LEFT JOIN job_tags t ON t.job_id = a.job_id AND t.key = :tag", by.removeprefix("tag:")
    # A job is counted with its first attempt in the period. Most have one attempt, and need no look for others.
    before = f"e.job_id = a.job_id AND e.number < a.number AND {ran.replace('a.', 'e.')}"
    first = f"a.number = 1 OR NOT EXISTS (SELECT 1 FROM attempts e WHERE {before})"  # noqa: S608
    rows = connection.tuples(
        f"SELECT {key}, {_SIZE}, SUM(CASE WHEN {first} THEN 1 ELSE 0 END), COUNT(*), "  # noqa: S608
        f"SUM(a.nodes * ({end} - ({begin}))), COUNT(*) - COUNT(a.ended_at), MIN({begin}), MAX({end}) "
        f"FROM attempts a {tags} WHERE {' AND '.join(where)} "
        f"GROUP BY {key}, {_SIZE}{', a.number' if by == 'attempt' else ''}",
        fixed,
    )
    return [Use._make((*row[:7], bool(row[7]), *row[8:])) for row in rows]
