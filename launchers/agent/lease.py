"""Lease of a node: exactly one agent runs a node's part in one restart of an attempt."""

from __future__ import annotations

import os

from orc.launchers.agent.errors import log_stderr
from orc.launchers.agent.records import create_json, read_json, write_json
from orc.launchers.agent.state import NodeState

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any


def take_lease(node: NodeState) -> bool:
    """Exactly one copy of this node's agent gets past this line."""
    path = os.path.join(node.dir, "lease.json")
    lease = {"owner": node.owner, "restart": node.restart, "marker": node.config.marker, **node.me}
    if create_json(path, lease):
        return True
    held = read_json(path) or {}
    later = held.get("owner") == node.owner and int(held.get("restart", 0)) < node.restart
    # Of several copies of the same restart one wins this link; then the lease is its own to replace.
    if later and create_json(os.path.join(node.dir, f"lease-r{node.restart}.json"), lease):
        # Who comes later still has to know whom this one has replaced.
        create_json(os.path.join(node.dir, f"lease-r{int(held.get('restart', 0))}.json"), held)
        before = os.path.join(node.dir, "exit.json")
        if os.path.exists(before):
            os.rename(before, os.path.join(node.dir, f"exit-r{int(held.get('restart', 0))}.json"))
        write_json(path, lease)
        return True
    say_held(f"node {node.node} of {node.config.marker}", held)
    return False


def say_held(what: str, lease: Mapping[str, Any]) -> None:
    """Print who holds *what*, as the *lease* of that agent says."""
    holder = f"{lease.get('owner')} (pid {lease.get('pid')} on {lease.get('host')})"
    log_stderr(f"{what} is held by {holder}; nothing was started")


def succeeded_before(node: NodeState) -> bool:
    """Return whether an earlier restart of this attempt has ended well on every node.

    A scheduler that lost its memory (a killed Slurm controller) may requeue a job that has succeeded. The records
    stay as they are, so every agent of this restart sees the same.
    """
    if not node.restart:
        return False
    paths = [os.path.join(node.attempt_dir, f"node-{k}", "exit.json") for k in range(node.nnodes)]
    records = [read_json(path) for path in paths]
    return all(
        record is not None
        and record.get("owner") == node.owner
        and record.get("outcome") == "succeeded"
        and int(record.get("restart", 0)) < node.restart
        for record in records
    )
