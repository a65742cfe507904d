"""Costs: hours of nodes and GPUs times the prices of clusters.yaml, by job, user, project, tag, cluster or day."""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from orc.launchers.errors import LaunchError
from orc.orchestrator.engine.limits import instance_of, price_of_node_hour

if TYPE_CHECKING:
    from orc.launchers.spec.clusters import Cluster
    from orc.orchestrator.ledger.usage import Usage

HOUR_S = 3600.0
WAYS = ("job", "user", "project", "cluster", "day", "tag:KEY")


@dataclass
class _Sum:
    """Sum of what one group has used."""

    jobs: set[str] = field(default_factory=set)
    attempts: set[tuple[str, int]] = field(default_factory=set)
    node_hours: float = 0.0
    gpu_hours: float = 0.0
    cost: dict[str, float] = field(default_factory=dict)  # by currency
    unpriced_node_hours: float = 0.0
    running: bool = False

    def add(self, usage: Usage, hours: float, price: float | None, currency: str) -> None:
        """Add *hours* of an attempt, at *price* for a node and hour."""
        nodes = usage.nodes
        self.jobs.add(usage.job)
        self.attempts.add((usage.job, usage.attempt))
        self.node_hours += hours * nodes
        self.gpu_hours += hours * nodes * usage.gpus_per_node
        self.running |= usage.ended_at is None
        if price is None:
            self.unpriced_node_hours += hours * nodes
        else:
            self.cost[currency] = self.cost.get(currency, 0.0) + hours * nodes * price

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON-able form; ``cost`` is `None` where no price is known."""
        return {
            "jobs": len(self.jobs),
            "attempts": len(self.attempts),
            "node_hours": round(self.node_hours, 9),
            "gpu_hours": round(self.gpu_hours, 9),
            "cost": {name: round(value, 9) for name, value in sorted(self.cost.items())} or None,
            "unpriced_node_hours": round(self.unpriced_node_hours, 9),
            "running": self.running,
        }


def add_up(
    usages: Iterable[Usage],
    clusters: Mapping[str, Cluster],
    *,
    by: str,
    now: float,
    since: float | None = None,
    until: float | None = None,
) -> dict[str, Any]:
    """Return hours and costs by group, the dearest first: ``{"by", "groups": [{"key", ...}], "total"}``. Pure.

    An attempt that still runs counts until *now*. Hours without a price are in ``unpriced_node_hours``, never free.
    """
    groups: dict[str, _Sum] = {}
    total = _Sum()
    for usage in usages:
        cluster = clusters.get(usage.cluster)
        prices = cluster.prices if cluster else None
        price = price_of_node_hour(prices, usage.gpus_per_node, instance_of(usage.spec, cluster))
        currency = prices.currency if prices else ""
        begin = max(usage.started_at, since if since is not None else usage.started_at)
        end = min(usage.ended_at if usage.ended_at is not None else now, until if until is not None else float("inf"))
        for key, length in _parts(usage, by, begin, end):
            for part in (groups.setdefault(key, _Sum()), total):
                part.add(usage, length / HOUR_S, price, currency)
    order = sorted(groups.items(), key=lambda item: item[0] if by == "day" else (-sum(item[1].cost.values()), item[0]))
    return {
        "by": by,
        "groups": [{"key": key, **group.to_dict()} for key, group in order],
        "total": total.to_dict(),
    }


def check_way(by: str) -> str:
    """Return *by* if costs can be grouped so. Raises `LaunchError`."""
    if by in WAYS[:-1] or (by.startswith("tag:") and len(by) > 4):
        return by
    raise LaunchError(f"costs are not grouped by {by!r}", hint=f"one of {', '.join(WAYS)}")


def _parts(usage: Usage, by: str, begin: float, end: float) -> Iterator[tuple[str, float]]:
    """Yield the group of a usage and its seconds; several where it goes over midnight and days are requested."""
    if end < begin:
        return
    if by != "day":
        named = {"job": usage.job, "user": usage.owner, "project": usage.project, "cluster": usage.cluster}
        yield named[by] if by in named else usage.tags.get(by.removeprefix("tag:"), ""), end - begin
        return
    while True:
        day = datetime.datetime.fromtimestamp(begin).date()
        midnight = datetime.datetime.combine(day + datetime.timedelta(days=1), datetime.time()).timestamp()
        yield day.isoformat(), min(end, midnight) - begin
        if midnight >= end:
            return
        begin = midnight
