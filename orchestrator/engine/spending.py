"""Spending: what users and projects have cost in the last 30 days, for quotas of the resource ``cost``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from orc.launchers.errors import LaunchError
from orc.orchestrator.engine.pricing import instance_of, price_of_node_hour
from orc.orchestrator.ledger.usage import Usage, read_usage

if TYPE_CHECKING:
    from orc.launchers.spec.clusters import Cluster
    from orc.orchestrator.ledger.database import Connection
    from orc.orchestrator.workspace import Workspace

PERIOD_S = 30 * 86400.0
_KEPT_S = 60.0  # for which a reading is good enough

Spent = Mapping[tuple[str, str], float]  # by scope and name


def add_up(usages: Iterable[Usage], clusters: Mapping[str, Cluster], now: float) -> Spent:
    """Return what users and projects have spent in the `PERIOD_S` before *now*. What has no price costs nothing."""
    spent: Counter[tuple[str, str]] = Counter()
    for usage in usages:
        cluster = clusters.get(usage.cluster)
        if cluster is None:
            continue
        resources = usage.spec.get("resources", {})
        nodes = usage.hosts or int(str(resources.get("nodes", 1)).partition(":")[0])
        gpus = int(resources.get("gpus_per_node") or 0)
        price = price_of_node_hour(cluster.prices, gpus, instance_of(usage.spec, cluster)) or 0.0
        began = max(usage.started_at, now - PERIOD_S)
        hours = max((usage.ended_at or now) - began, 0.0) / 3600
        for place in (("user", usage.owner), ("project", usage.project)):
            spent[place] += hours * nodes * price  # type: ignore[assignment]
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
