"""Pricing: what an hour of a job's nodes costs by the prices of its cluster. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from orc.launchers.spec.clusters import Cluster, Prices

_INSTANCE_KEYS = ("instance_type", "accelerator_type", "type")


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
