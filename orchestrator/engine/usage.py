"""Usage: the attempts that have run on nodes, for reports of hours and costs, and what they have cost."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from orc.launchers.errors import LaunchError
from orc.orchestrator.ledger.database import Connection, one_of
from orc.orchestrator.ledger.records import machine_of

if TYPE_CHECKING:
    from orc.launchers.spec.clusters import Cluster, Prices
    from orc.orchestrator.workspace import Workspace


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
