"""Costs: hours of nodes and GPUs times the prices of clusters.yaml, by job, user, project, tag, cluster or day."""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from orc.launchers.errors import LaunchError
from orc.orchestrator.engine.usage import price_of

if TYPE_CHECKING:
    from orc.launchers.spec.clusters import Cluster
    from orc.orchestrator.engine.usage import Use

HOUR_S = 3600.0
WAYS = ("job", "user", "project", "cluster", "day", "tag:KEY")


@dataclass
class _Sum:
    """Sum of what one group has used."""

    jobs: int = 0
    attempts: int = 0
    node_hours: float = 0.0
    gpu_hours: float = 0.0
    cost: dict[str, float] = field(default_factory=dict)  # by currency
    unpriced_node_hours: float = 0.0
    running: bool = False

    def add(self, use: Use, cluster: Cluster | None) -> None:
        """Add *use* at the prices of *cluster*."""
        price, hours = price_of(use, cluster), use.node_s / HOUR_S
        self.jobs += use.jobs
        self.attempts += use.attempts
        self.node_hours += hours
        self.gpu_hours += hours * use.gpus_per_node
        self.running |= use.running
        if price is None:
            self.unpriced_node_hours += hours
        elif cluster is not None and cluster.prices is not None:
            currency = cluster.prices.currency
            self.cost[currency] = self.cost.get(currency, 0.0) + hours * price

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON-able form; ``cost`` is `None` where no price is known."""
        return {
            "jobs": self.jobs,
            "attempts": self.attempts,
            "node_hours": round(self.node_hours, 9),
            "gpu_hours": round(self.gpu_hours, 9),
            "cost": {name: round(value, 9) for name, value in sorted(self.cost.items())} or None,
            "unpriced_node_hours": round(self.unpriced_node_hours, 9),
            "running": self.running,
        }


def add_up(uses: Iterable[Use], clusters: Mapping[str, Cluster], by: str) -> dict[str, Any]:
    """Return hours and costs by group, the dearest first: ``{"by", "groups": [{"key", ...}], "total"}``. Pure.

    *uses* are of *by*; of single attempts for days. Hours without a price are in ``unpriced_node_hours``, never free.
    """
    groups: dict[str, _Sum] = {}
    total, seen = _Sum(), set[tuple[str, str]]()
    for use in uses:
        total.add(use, clusters.get(use.cluster))
        for part in _days(use, seen) if by == "day" else (use,):
            groups.setdefault(part.key, _Sum()).add(part, clusters.get(use.cluster))
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


def _days(use: Use, seen: set[tuple[str, str]]) -> Iterator[Use]:
    """Yield the parts of an attempt by the days of this machine's time zone. A day counts each job once (*seen*)."""
    begin, whole = use.began_at, use.ended_at - use.began_at
    while True:
        day = datetime.datetime.fromtimestamp(begin).date()
        midnight = datetime.datetime.combine(day + datetime.timedelta(days=1), datetime.time()).timestamp()
        end, of_day = min(use.ended_at, midnight), (day.isoformat(), use.key)
        node_s = use.node_s * (end - begin) / whole if whole else 0.0
        yield use._replace(key=of_day[0], jobs=int(of_day not in seen), node_s=node_s)
        seen.add(of_day)
        if midnight >= use.ended_at:
            return
        begin = midnight
