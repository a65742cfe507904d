"""Starting an agent on a host without a scheduler: it takes slots and the lease, or says who has them.

Shipped as ``orc_agent_host.py`` beside the agent: standard library only, Python >= 3.9. One short command over SSH that
prints one line of JSON. Format: docs/explanation/attempt-directory.md.
"""

from __future__ import annotations

import fcntl
import json
import os
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from orc.launchers import agent
else:
    try:
        import orc_agent as agent
    except ImportError:  # not on a node
        from orc.launchers import agent

EXIT_BUSY = 78
# What comes to a host for one attempt alone and must not stay.
CONFIDENTIAL = ("secrets.json", "link.json")


# --- slots -----------------------------------------------------------------------------------------------------------


class Slots:
    """Places for processes (or GPUs) of this host: files that the agent holds locks on, so they go with the agent."""

    def __init__(self, root: str) -> None:
        # By machine: the root may be on a file system that several machines share.
        self.directory = os.path.join(root, "slots", os.uname().nodename)
        self.held: dict[int, int] = {}  # index -> file descriptor

    def take(self, total: int, count: int, marker: str) -> list[str]:
        """Take *count* of *total* and return an empty list, or nothing and return the markers of those who have them.

        Raises `agent.LaunchFailure` when there are not that many at all.
        """
        if count > total:
            raise agent.LaunchFailure(f"the job takes {count} slots of this host, which has {total}")
        os.makedirs(self.directory, mode=0o700, exist_ok=True)
        turn = os.open(os.path.join(self.directory, ".turn"), os.O_RDWR | os.O_CREAT, 0o600)
        holders: list[str] = []
        try:
            fcntl.flock(turn, fcntl.LOCK_EX)  # two that take some each would both get none
            for index in range(total):
                if len(self.held) == count:
                    break
                fd = os.open(os.path.join(self.directory, str(index)), os.O_RDWR | os.O_CREAT, 0o600)
                try:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    holders.append(_marker_in(fd))
                    os.close(fd)
                else:
                    self.held[index] = fd
            if len(self.held) < count:
                self.close()
                return sorted(set(holders))
            for fd in self.held.values():
                os.ftruncate(fd, 0)
                os.pwrite(fd, json.dumps({"marker": marker, "pid": os.getpid(), "at": time.time()}).encode(), 0)
            return []
        except BaseException:
            self.close()
            raise
        finally:
            os.close(turn)

    def close(self) -> None:
        """Let others have them."""
        for fd in self.held.values():
            os.close(fd)
        self.held = {}


def _marker_in(fd: int) -> str:
    try:
        return str(json.loads(os.pread(fd, 4096, 0))["marker"])
    except (ValueError, KeyError, TypeError):
        return "unknown"


# --- start -----------------------------------------------------------------------------------------------------------


def start(config: dict[str, Any], node: int, owner: str) -> int:
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
        status = answer.pop("status", agent.EXIT_LAUNCH)
        print(json.dumps(answer), flush=True)
        return int(status)
    os.close(read)
    status = agent.EXIT_LAUNCH
    try:
        os.setsid()
        os.chdir("/")
        own = agent.Node(config, node, owner)
        answer = hold(own)
        status = int(answer["status"])
        if status == 0:
            detach(own)
        elif answer.get("alive") is not True and config["marker"] not in answer.get("holders", ()):
            # What was just brought is nobody's.
            for name in CONFIDENTIAL:
                agent.remove(os.path.join(own.private, name))
        try:
            os.write(write, json.dumps(answer).encode() + b"\n")
        except BrokenPipeError:
            pass  # who asked is gone; the node is held all the same, and will be found
        os.close(write)
        if status == 0:
            status = own.work_through()
    except BaseException:
        import traceback

        agent.complain(traceback.format_exc())
    finally:
        os._exit(status)


def hold(own: agent.Node) -> dict[str, Any]:
    """Slots, port and lease, or nothing."""
    path = os.path.join(own.dir, "lease.json")
    slots = Slots(str(own.config["root"]))
    try:
        for directory in (own.logs, own.dir):
            os.makedirs(directory, mode=0o700, exist_ok=True)
        if os.path.exists(path):
            return taken(path)
        wanted = own.config.get("slots") or {}
        host = str(own.config["hosts"][own.node]["name"]) if wanted else ""
        if wanted:
            total, count = int(wanted["total"][host]), int(wanted["take"])
            if holders := slots.take(total, count, str(own.config["marker"])):
                if own.config["marker"] in holders and os.path.exists(path):
                    return taken(path)
                return {"state": "busy", "holders": holders, "status": EXIT_BUSY}
            own.slots = slots
            if wanted.get("gpus") and count < total:
                own.own_env["CUDA_VISIBLE_DEVICES"] = ",".join(str(index) for index in sorted(slots.held))
        where: dict[str, Any] = {}
        if own.linked:
            own.link = agent.beside("link").Link(own)
            if own.node == 0:
                where = own.link.listen()
                own.me["hub"] = where  # in the lease, for who completes a start that was cut off
        if not own.take_lease():
            slots.close()
            return taken(path)
    except (agent.LaunchFailure, OSError) as error:
        slots.close()
        return {"state": "failed", "reason": str(error), "status": agent.EXIT_LAUNCH}
    return {"state": "held", "pid": os.getpid(), **where, "status": 0}


def taken(path: str) -> dict[str, Any]:
    """Another copy has the lease."""
    lease = agent.read_json(path) or {}
    holder = {name: lease.get(name) for name in ("owner", "pid", "host", "at")}
    where = lease.get("hub") or {}
    return {"state": "taken", "holder": holder, "alive": _runs(lease), **where, "status": agent.EXIT_HELD}


def detach(own: agent.Node) -> None:
    """Let go of the caller's terminal and pipes: SSH waits for them."""
    path = os.path.join(own.logs, f"node-{own.node}.log")
    log = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    null = os.open(os.devnull, os.O_RDONLY)
    sys.stdout.flush()
    sys.stderr.flush()
    for target, source in ((0, null), (1, log), (2, log)):
        os.dup2(source, target)
    os.close(log)
    os.close(null)


def _runs(lease: dict[str, Any]) -> bool:
    return agent.is_running(int(lease.get("pid", 0)), str(lease.get("pid_start")), str(lease.get("boot_id")))
