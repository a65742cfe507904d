"""Spending: what an hour of a job's nodes costs, and what users and projects have cost in the last 30 days (quotas)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from orc.launchers.errors import LaunchError
from orc.orchestrator.ledger.usage import Usage, read_usage

if TYPE_CHECKING:
    from orc.launchers.spec.clusters import Cluster, Prices
    from orc.orchestrator.ledger.database import Connection
    from orc.orchestrator.workspace import Workspace

_INSTANCE_KEYS = ("instance_type", "accelerator_type", "type")
PERIOD_S = 30 * 86400.0
_KEPT_S = 60.0  # for which a reading is good enough

Spent = Mapping[tuple[str, str], float]  # by scope and name


def instance_of(spec: Mapping[str, Any], cluster: Cluster | None) -> str:
    """Return the type of machine that a job or else its cluster requests; empty where neither does."""
    kind = cluster.kind if cluster else ""
    for options in (spec.get("resources", {}).get("options", {}).get(kind, {}), cluster.options if cluster else {}):
        for key in _INSTANCE_KEYS:
            if isinstance(options.get(key), str):
                return str(options[key])
    return ""


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


def add_up(usages: Iterable[Usage], clusters: Mapping[str, Cluster], now: float) -> Spent:
    """Return what users and projects have spent in the `PERIOD_S` before *now*. What has no price costs nothing."""
    spent: Counter[tuple[str, str]] = Counter()
    for usage in usages:
        cluster = clusters.get(usage.cluster)
        if cluster is None:
            continue
        price = price_of_node_hour(cluster.prices, usage.gpus_per_node, instance_of(usage.spec, cluster)) or 0.0
        began = max(usage.started_at, now - PERIOD_S)
        hours = max((usage.ended_at or now) - began, 0.0) / 3600
        for place in (("user", usage.owner), ("project", usage.project)):
            spent[place] += hours * usage.nodes * price  # type: ignore[assignment]
    return spent


def read_spent(ws: Workspace, connection: Connection, now: float) -> Spent:
    """Return what users and projects have spent, at most `_KEPT_S` old."""
    if ws.spent is not None and 0 <= now - ws.spent[0] < _KEPT_S:
        return ws.spent[1]
    usages = list(read_usage(connection, since=now - PERIOD_S))
    clusters: dict[str, Cluster] = {}
    for name in {usage.cluster for usage in usages}:
        try:
            clusters[name] = ws.backend(name).cluster
        except LaunchError:
            continue  # not configured any more: its hours have no price
    ws.spent = (now, add_up(usages, clusters, now))
    return ws.spent[1]
