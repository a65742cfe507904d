"""Start of agents in the background: of one node on a host, or of all nodes of an attempt on one machine (a gang).

Slots are places for processes (or GPUs) of this host, which the agents of all attempts share.
"""

from __future__ import annotations

import fcntl
import json
import os
import sys
import time

from orc.launchers.agent.errors import EXIT_BUSY, EXIT_HELD, EXIT_LAUNCH, LaunchFailure, log_stderr
from orc.launchers.agent.gpus import gpu_names
from orc.launchers.agent.node import Node, finish_gang, say_held, take_lease
from orc.launchers.agent.processes import (
    ENDING,
    become_subreaper,
    decode_wait_status,
    describe_exit,
    detach,
    kill_attempt,
    kill_descendants,
    load_libc,
    next_signal,
    signal_process,
    take_signals,
)
from orc.launchers.agent.procfs import holder_runs, identity
from orc.launchers.agent.records import CONFIDENTIAL, create_json, read_json, remove
from orc.launchers.agent.state import FAILURE_GRACE_S, StopRequest

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import Any

    from orc.launchers.agent.config import AgentConfig


class Slots:
    """Places for processes (or GPUs) of this host: files that the agent holds locks on, so they go with the agent."""

    def __init__(self, root: str) -> None:
        # By machine: the root may be on a file system that several machines share.
        self.directory = os.path.join(root, "slots", os.uname().nodename)
        self.held: dict[str, int] = {}  # name -> file descriptor

    def take(self, names: Sequence[str], count: int, marker: str, kind: str = "slots") -> list[str]:
        """Take *count* of *names* and return an empty list, or nothing and return the markers of those who have them.

        Raises `LaunchFailure` when there are not that many at all.
        """
        if count > len(names):
            raise LaunchFailure(f"the job takes {count} {kind} of this host, which has {len(names)}")
        os.makedirs(self.directory, mode=0o700, exist_ok=True)
        turn = os.open(os.path.join(self.directory, ".turn"), os.O_RDWR | os.O_CREAT, 0o600)
        holders: list[str] = []
        try:
            fcntl.flock(turn, fcntl.LOCK_EX)  # two that take some each would both get none
            for name in names:
                if len(self.held) == count:
                    break
                fd = os.open(os.path.join(self.directory, name.replace("/", "_")), os.O_RDWR | os.O_CREAT, 0o600)
                try:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    holders.append(_marker_in(fd))
                    os.close(fd)
                else:
                    self.held[name] = fd
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
        """Release the slots."""
        for fd in self.held.values():
            os.close(fd)
        self.held = {}


def slot_names(wanted: Mapping[str, Any], total: int, env: Mapping[str, str]) -> list[str]:
    """Return the names of the slots of a host that a job may take: its GPUs first, one for each slot that has one.

    *wanted* is the ``slots`` of ``agent.json``, *total* what the host has. A job that asks for GPUs may take those
    alone: raises `LaunchFailure` where they cannot be listed.
    """
    try:
        gpus = gpu_names(env)[:total]
    except LaunchFailure:
        if wanted.get("gpus"):
            raise
        gpus = []
    return gpus if wanted.get("gpus") and gpus else [*gpus, *map(str, range(len(gpus), total))]


def _marker_in(fd: int) -> str:
    try:
        return str(json.loads(os.pread(fd, 4096, 0))["marker"])
    except (ValueError, KeyError, TypeError):
        return "unknown"


COPY_S = 10.0  # for another copy of the same submission to write its lease


class Gang:
    """All nodes of an attempt on this machine: one forked agent each, and one parent that sees them end."""

    def __init__(self, config: AgentConfig, owner: str) -> None:
        self.config = config
        self.owner = owner
        self.attempt_dir = config.attempt_dir
        self.agents: dict[int, int] = {}  # pid -> node
        self.slots = Slots(config.root)  # the GPUs of all nodes

    def run(self) -> int:
        """Detach, and return to the caller as soon as the gang is held (0) or known to be held by another (76)."""
        answer = in_background(self._hold_and_supervise)
        return answer[0] if answer else EXIT_LAUNCH

    def _hold_and_supervise(self, answer: Callable[[bytes], None]) -> int:
        status = self.hold()
        if status == 0:
            detach(os.path.join(self.attempt_dir, "logs", "gang.log"))
        answer(bytes([status]))
        if status == 0:
            self.supervise()
        return status

    def hold(self) -> int:
        """The gang's own lease and its GPUs: a second copy of the same submission ends here."""
        path = os.path.join(self.attempt_dir, "gang.json")
        os.makedirs(os.path.join(self.attempt_dir, "logs"), mode=0o700, exist_ok=True)
        if holders := self.take_gpus(path):
            log_stderr(f"waiting for GPUs, which {', '.join(holders)} {'has' if len(holders) == 1 else 'have'}")
            return EXIT_BUSY
        lease = {"owner": self.owner, "restart": 0, "marker": self.config.marker, **identity()}
        if create_json(path, lease):
            return 0
        held = read_json(path) or {}
        say_held(self.config.marker, held)
        if not holder_runs(held):
            remove(os.path.join(self.attempt_dir, "secrets.json"))  # nobody is left to remove it
        return EXIT_HELD

    def take_gpus(self, lease: str) -> list[str]:
        """Take the GPUs of all nodes, or return the markers of those who have them. Raises `LaunchFailure`."""
        count = int((self.config.slots or {}).get("take", 0)) * self.config.nnodes
        if not count or os.path.exists(lease):
            return []
        names = gpu_names({**os.environ, **self.config.env})
        deadline = time.monotonic() + COPY_S
        while holders := self.slots.take(names, count, self.config.marker, "GPUs"):
            if self.config.marker not in holders or time.monotonic() > deadline:
                return holders
            if os.path.exists(lease):  # of another copy of this submission, which had them an instant before
                return []
            time.sleep(0.01)
        return []

    def give_gpus(self, agent: Node) -> None:
        """Show the ranks of a node its own share of the GPUs; its agent holds them too, should this process die."""
        if names := list(self.slots.held):
            share = len(names) // self.config.nnodes
            agent.slots = self.slots
            agent.own_env["CUDA_VISIBLE_DEVICES"] = ",".join(names[agent.node * share : (agent.node + 1) * share])

    def supervise(self) -> None:
        """Start one agent per node and wait for all of them."""
        take_signals()
        become_subreaper()
        me = os.getpid()
        load_libc()
        for node in range(self.config.nnodes):
            pid = os.fork()
            if pid == 0:
                status = EXIT_LAUNCH
                try:
                    os.setsid()
                    agent = Node(self.config, node, self.owner, gang_pid=me)
                    self.give_gpus(agent)
                    status = agent.run()
                except BaseException:
                    import traceback

                    log_stderr(traceback.format_exc())
                finally:
                    os._exit(status)
            self.agents[pid] = node
        while self.agents:
            received = next_signal(3600.0)
            if received is not None and received.si_signo in ENDING:
                for pid in self.agents:
                    signal_process(pid, received.si_signo)
            self.reap()
        kill_descendants(self.config.marker)
        self.slots.close()  # what ``on_exit`` starts may take them
        finish_gang(self.config)

    def reap(self) -> None:
        """Collect the children that have ended."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if not pid:
                return
            node = self.agents.pop(pid, None)
            exited = os.path.join(self.attempt_dir, f"node-{node}", "exit.json")
            if node is not None and read_json(exited) is None:
                self.on_lost_agent(node, describe_exit(*decode_wait_status(status)))

    def on_lost_agent(self, node: int, how: str) -> None:
        """An agent was killed: what it had started must not run on, and the others need not wait for a time-out."""
        log_stderr(f"the agent of node {node} {how}")
        kill_attempt(self.attempt_dir, node)
        stop = StopRequest("node_failure", f"the agent of node {node} {how}", FAILURE_GRACE_S, lost_node=node)
        create_json(os.path.join(self.attempt_dir, "stop-r0.json"), stop.record(node, os.uname().nodename))


def start(config: AgentConfig, node: int, owner: str) -> int:
    """Start one node's agent in the background; prints how that went, and returns when it holds the node (0) or not.

    It prints one line: ``{"state": "held", "pid"}``, of node 0 with ``"port"`` and ``"addresses"`` for the others;
    ``{"state": "busy", "holders"}`` (78) when others have the host's slots; ``{"state": "taken", "holder", "alive"}``
    (76) when another copy has the lease, with the same two; ``{"state": "failed", "reason"}`` (77).
    """

    def run(tell: Callable[[bytes], None]) -> int:
        own = Node(config, node, owner)
        answer = hold(own)
        status = int(answer["status"])
        if status == 0:
            detach(os.path.join(own.logs, f"node-{own.node}.log"))  # SSH waits for the pipes
        elif answer.get("alive") is not True and config.marker not in answer.get("holders", ()):
            # What was just brought is nobody's.
            for name in CONFIDENTIAL:
                remove(os.path.join(own.private, name))
        tell(json.dumps(answer).encode() + b"\n")
        return own.run_with_lease() if status == 0 else status

    line = in_background(run)
    answer = json.loads(line) if line.endswith(b"\n") else {"state": "failed", "reason": "the agent was killed"}
    status = answer.pop("status", EXIT_LAUNCH)
    print(json.dumps(answer), flush=True)
    return int(status)


def in_background(work: Callable[[Callable[[bytes], None]], int]) -> bytes:
    """Run *work* in a forked session; return what it tells the caller by its argument, nothing when it ends before."""
    read, write = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    if os.fork():
        os.close(write)
        with os.fdopen(read, "rb") as pipe:
            return pipe.readline()  # the agent keeps no copy of the other end

    def tell(answer: bytes) -> None:
        try:
            os.write(write, answer)
        except BrokenPipeError:
            pass  # who asked is gone; what is held is held all the same, and will be found
        os.close(write)

    os.close(read)
    status = EXIT_LAUNCH
    try:
        os.setsid()
        os.chdir("/")
        status = work(tell)
    except LaunchFailure as error:
        log_stderr(str(error))
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
