"""Starting an agent on a host without a scheduler: it takes slots and the lease, or names their holders.

One short command over SSH that prints one line of JSON. Format: docs/explanation/attempt-directory.md.
"""

from __future__ import annotations

import json
import os
import sys

from orc.launchers.agent.errors import EXIT_BUSY, EXIT_HELD, EXIT_LAUNCH, LaunchFailure, log_stderr
from orc.launchers.agent.gang import Slots, slot_names
from orc.launchers.agent.lease import take_lease
from orc.launchers.agent.node import Node
from orc.launchers.agent.processes import detach
from orc.launchers.agent.procfs import holder_runs
from orc.launchers.agent.records import CONFIDENTIAL, read_json, remove

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from orc.launchers.agent.config import AgentConfig


def start(config: AgentConfig, node: int, owner: str) -> int:
    """Start one node's agent in the background; prints how that went, and returns when it holds the node (0) or not.

    It prints one line: ``{"state": "held", "pid"}``, of node 0 with ``"port"`` and ``"addresses"`` for the others;
    ``{"state": "busy", "holders"}`` (78) when others have the host's slots; ``{"state": "taken", "holder", "alive"}``
    (76) when another copy has the lease, with the same two; ``{"state": "failed", "reason"}`` (77).
    """
    read, write = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        os.close(write)
        with os.fdopen(read, "rb") as pipe:
            line = pipe.readline()  # the agent keeps no copy of the other end
        answer = json.loads(line) if line.endswith(b"\n") else {"state": "failed", "reason": "the agent was killed"}
        status = answer.pop("status", EXIT_LAUNCH)
        print(json.dumps(answer), flush=True)
        return int(status)
    os.close(read)
    status = EXIT_LAUNCH
    try:
        os.setsid()
        os.chdir("/")
        own = Node(config, node, owner)
        answer = hold(own)
        status = int(answer["status"])
        if status == 0:
            detach(os.path.join(own.logs, f"node-{own.node}.log"))  # SSH waits for the pipes
        elif answer.get("alive") is not True and config.marker not in answer.get("holders", ()):
            # What was just brought is nobody's.
            for name in CONFIDENTIAL:
                remove(os.path.join(own.private, name))
        try:
            os.write(write, json.dumps(answer).encode() + b"\n")
        except BrokenPipeError:
            pass  # who asked is gone; the node is held all the same, and will be found
        os.close(write)
        if status == 0:
            status = own.run_with_lease()
    except BaseException:
        import traceback

        log_stderr(traceback.format_exc())
    finally:
        os._exit(status)


def hold(own: Node) -> dict[str, Any]:
    """Take slots, port and lease, or nothing."""
    path = os.path.join(own.dir, "lease.json")
    slots = Slots(own.config.root)
    try:
        for directory in (own.logs, own.dir):
            os.makedirs(directory, mode=0o700, exist_ok=True)
        if os.path.exists(path):
            return taken(path)
        wanted = own.config.slots or {}
        host = str(own.config.hosts[own.node]["name"]) if wanted else ""
        if wanted:
            total, count = int(wanted["total"][host]), int(wanted["take"])
            names = slot_names(wanted, total, {**os.environ, **own.config.env})
            kind = "GPUs" if wanted.get("gpus") and len(names) < total else "slots"
            if holders := slots.take(names, count, own.config.marker, kind):
                if own.config.marker in holders and os.path.exists(path):
                    return taken(path)
                return {"state": "busy", "holders": holders, "status": EXIT_BUSY}
            own.slots = slots
            if wanted.get("gpus") and (count < total or any(name.startswith("MIG-") for name in slots.held)):
                own.own_env["CUDA_VISIBLE_DEVICES"] = ",".join(slots.held)
        where: dict[str, Any] = {}
        if own.linked:
            from orc.launchers.agent.link.process import Link

            own.link = Link(own)
            if own.node == 0:
                where = own.link.listen()
                own.me["hub"] = where  # in the lease, for who completes a start that was cut off
        if not take_lease(own):
            slots.close()
            return taken(path)
    except (LaunchFailure, OSError) as error:
        slots.close()
        return {"state": "failed", "reason": str(error), "status": EXIT_LAUNCH}
    return {"state": "held", "pid": os.getpid(), **where, "status": 0}


def taken(path: str) -> dict[str, Any]:
    """Return the answer when another copy has the lease."""
    lease = read_json(path) or {}
    holder = {name: lease.get(name) for name in ("owner", "pid", "host", "at")}
    where = lease.get("hub") or {}
    return {"state": "taken", "holder": holder, "alive": holder_runs(lease), **where, "status": EXIT_HELD}
