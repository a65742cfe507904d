"""Cost of a training job: billable seconds times the user's prices. Pure."""

from __future__ import annotations

from collections.abc import Mapping


def cost_text(billable_s: int | None, request: Mapping[str, object], prices: Mapping[str, float]) -> str:
    """``331 billable seconds on 2 × ml.g5.xlarge: 0.26``; empty when nothing was billed (yet).

    *prices* are for one instance and one hour, in whatever currency they are given; without one there is no sum.
    SageMaker counts billable seconds of spot instances with their savings, so no other price goes with them.
    """
    if not billable_s:
        return ""
    resources = request.get("ResourceConfig")
    resources = resources if isinstance(resources, Mapping) else {}
    count, name = int(resources.get("InstanceCount") or 1), str(resources.get("InstanceType") or "")
    text = f"{billable_s} billable seconds on {f'{count} × ' if count > 1 else ''}{name}"
    price = prices.get(name)
    return text if price is None else f"{text}: {billable_s / 3600 * price * count:.2f}"
