"""Services of a command: what a node runs beside the program, such as the head of a cluster or one of its workers."""

from __future__ import annotations

import os

from orc.launchers.agent.errors import LaunchFailure
from orc.launchers.agent.preparation import step
from orc.launchers.agent.ranks import start_process
from orc.launchers.agent.records import log_tail
from orc.launchers.agent.supervision import Supervisor
from orc.launchers.agent.variables import substitute

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping


def start_services(node: Supervisor, values: Mapping[str, str], env: dict[str, str]) -> bool:
    """Start what runs beside the program on this node, and wait on node 0 until all nodes have found each other.

    Returns True when the program is to start here: False on nodes that have a service alone, and when a stop came.
    """
    command = node.config.command
    log = os.path.join(node.logs, f"node-{node.node}.log")
    prefix = list(node.prepared.get("prefix") or ())  # of a container
    for service in command.get("services") or ():
        if (service["nodes"] == "first") == (node.node == 0):
            argv = [*prefix, *(substitute(word, values) for word in service["argv"])]
            node.services.append(start_process(node, argv, env, log, role=str(service["role"])))
    if node.services:
        node.record_pids()
    if node.follows and not node.remote_shell:
        return False
    if command.get("ready"):
        process = start_process(node, [*prefix, *(substitute(word, values) for word in command["ready"])], env, log)
        if step(node, process.pid) and node.stop is None:
            tail = log_tail(log, process.log_start, list(node.secrets.values()))
            raise LaunchFailure(f"the nodes have not found each other\n{tail}".rstrip())
    return node.stop is None
