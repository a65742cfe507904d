"""Rendezvous of the nodes of an attempt: address and port of rank 0."""

from __future__ import annotations

import os
import time

from orc.launchers.agent.network import Port, allowed_address, own_address
from orc.launchers.agent.peers import is_ready, start_timed_out
from orc.launchers.agent.records import read_json, write_json
from orc.launchers.agent.state import NodeState
from orc.launchers.agent.supervision import Supervisor

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any


def join_rendezvous(node: Supervisor) -> tuple[str, int] | None:
    """Agree with the other nodes on address and port; `None` when a stop came first."""
    if not node.node:
        node.token = node.link.token_of_ranks(node.rendezvous_id()) if node.link else os.urandom(32).hex()
    if node.nnodes == 1:
        node.port = Port()
        if node.shims:
            publish(node, "127.0.0.1", node.port.number)
        return "127.0.0.1", node.port.number
    if node.config.network:
        node.listening = allowed_address(node.config.network)
    node.write_heartbeat("waiting")
    node.next_poll = 0.0
    if node.node == 0:
        peers = list(range(1, node.nnodes))
        late = list(peers)

        def all_ready() -> bool:
            while late and is_ready(node, late[-1]):
                late.pop()
            return not late

        if not node.until(all_ready):
            return None
        if node.link and not node.until(lambda: node.link.state().get("address") is not None):
            return None
        node.port = Port()
        addr = address(
            node, [read_json(os.path.join(node.attempt_dir, f"node-{p}", "lease.json")) or {} for p in peers]
        )
        publish(node, addr, node.port.number)
        return addr, node.port.number
    found: list[dict[str, Any]] = []
    path = os.path.join(node.attempt_dir, f"rendezvous-r{node.restart}.json")

    def published() -> bool:
        record = read_json(path)
        if record is not None:
            found.append(record)
        return record is not None or start_timed_out(node, 0)

    if not node.until(published) or not found:
        return None
    node.token = node.link.token_of_ranks(node.rendezvous_id()) if node.link else str(found[0].get("token") or "")
    return str(found[0]["addr"]), int(found[0]["port"])


def publish(node: NodeState, addr: str, port: int) -> None:
    """Publish address and port of rank 0 to the other nodes, and to the shims below a launcher."""
    record = {"addr": addr, "port": port, "id": node.rendezvous_id(), "at": time.time()}
    if node.nnodes > 1 and not node.link:  # the link is signed, not encrypted
        record["token"] = node.token
    path = os.path.join(node.attempt_dir, f"rendezvous-r{node.restart}.json")
    write_json(path, record, durable=node.nnodes > 1)
    node.notify_link()


def address(node: NodeState, leases: Sequence[dict[str, Any]]) -> str:
    """Return the address of node 0 for the nodes that hold *leases*."""
    if node.listening:
        return node.listening[1]
    if node.master_host:
        return node.master_host
    if node.link and (reached := node.link.state().get("address")):
        return str(reached)
    here = (node.me["boot_id"], node.me["net"])
    if all((lease.get("boot_id"), lease.get("net")) == here for lease in leases):
        return "127.0.0.1"
    return str(own_address([str(lease["host"]) for lease in leases if lease.get("host")]))


def node_address(node: NodeState, master: str) -> str:
    """Return the address of this node for the others, given that of node 0."""
    if node.listening:
        return node.listening[1]
    if node.link and (own := node.link.state().get("address")):
        return str(own)
    if not node.node or master in ("127.0.0.1", "::1"):
        return master
    return str(own_address([master]))
