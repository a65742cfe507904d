"""Cleanup of TPUs that no attempt needs, by the API's listing and the ledger. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING, Literal

from orc.launchers.backends.base import Leftover
from orc.launchers.backends.tpu.request import IDLE_SINCE, IDLE_TIMEOUT, MARKER, ON_FINISH, tpu_id

if TYPE_CHECKING:
    from orc.launchers.backends.tpu.lifecycle import Node, QueuedResource
    from orc.launchers.backends.tpu.listing import Listing


def leftovers(listing: Listing, live: Collection[str], over: Collection[str], *, now: float) -> list[Leftover]:
    """Return labelled TPUs of none of the attempts *live*, those that can be deleted first."""
    needed = {tpu_id(marker) for marker in live}
    ended = {tpu_id(marker): marker for marker in over}
    found = []
    for item, node in _labelled(listing):
        own = _label(item, node, MARKER)
        if own in needed or item.state == "DELETING":
            continue
        why = _why(item, node, now) if own in ended else "unknown"
        what = f"{'TPU' if item is node else 'queued resource'} {item.id} in {item.zone}"
        found.append(Leftover(item.name, ended.get(own, own), what, item.state, why, item.created_at))
    return sorted(found, key=lambda one: (("over", "idle", "kept", "unknown").index(one.why), one.what))


def idle_for_too_long(listing: Listing, *, now: float) -> list[str]:
    """Return the names of kept TPUs whose idle time is over."""
    return [i.name for i, n in _labelled(listing) if _is_idle_for_too_long(i, n, now) and i.state != "DELETING"]


def _labelled(listing: Listing) -> Iterator[tuple[QueuedResource | Node, Node | None]]:
    """Yield resources with orc's label, each with its node; a node goes with its queued resource."""
    for (zone, name), queued in listing.queued.items():
        if MARKER in queued.labels:
            yield queued, listing.nodes.get((zone, name))
    for node in listing.nodes.values():
        if MARKER in node.labels and (node.zone, node.queued.rpartition("/")[2]) not in listing.queued:
            yield node, node


def _why(item: QueuedResource | Node, node: Node | None, now: float) -> Literal["over", "idle", "kept"]:
    if _label(item, node, ON_FINISH) == "delete" or node is None or node.state != "READY":
        return "over"
    return "idle" if _is_idle_for_too_long(item, node, now) else "kept"


def _is_idle_for_too_long(item: QueuedResource | Node, node: Node | None, now: float) -> bool:
    since, allowed = _label(item, node, IDLE_SINCE), _label(item, node, IDLE_TIMEOUT)
    return since.isdecimal() and allowed.isdecimal() and now - int(since) > int(allowed)


def _label(item: QueuedResource | Node, node: Node | None, key: str) -> str:
    """Return a label: the node's are newer than those of the request for it."""
    return str({**item.labels, **(node.labels if node is not None else {})}.get(key, ""))
