"""All nodes of an attempt on one machine: one forked agent each, and a parent that sees them end."""

from __future__ import annotations

import os
import sys
import time

from orc.launchers.agent.cleanup import kill_attempt, kill_descendants
from orc.launchers.agent.completion import finish_gang
from orc.launchers.agent.errors import EXIT_BUSY, EXIT_HELD, EXIT_LAUNCH, LaunchFailure, log_stderr
from orc.launchers.agent.gpus import gpu_names
from orc.launchers.agent.lease import say_held
from orc.launchers.agent.node import Node
from orc.launchers.agent.processes import become_subreaper, decode_wait_status, describe_exit, detach, load_libc
from orc.launchers.agent.procfs import holder_runs, identity
from orc.launchers.agent.records import create_json, read_json, remove
from orc.launchers.agent.signals import ENDING, next_signal, signal_process, take_signals
from orc.launchers.agent.slots import Slots
from orc.launchers.agent.state import FAILURE_GRACE_S

TYPE_CHECKING = False
if TYPE_CHECKING:
    from orc.launchers.agent.config import AgentConfig


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
        read, write = os.pipe()
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if pid:
            os.close(write)
            answer = os.read(read, 1)
            return answer[0] if answer else EXIT_LAUNCH
        os.close(read)
        status = EXIT_LAUNCH
        try:
            os.setsid()
            os.chdir("/")
            status = self.hold()
            if status == 0:
                detach(os.path.join(self.attempt_dir, "logs", "gang.log"))
            os.write(write, bytes([status]))
            os.close(write)
            if status == 0:
                self.supervise()
        except (LaunchFailure, OSError) as error:
            log_stderr(str(error))
        finally:
            os._exit(status)

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
        create_json(
            os.path.join(self.attempt_dir, "stop-r0.json"),
            {
                "node": node,
                "host": os.uname().nodename,
                "outcome": "node_failure",
                "reason": f"the agent of node {node} {how}",
                "forward": True,
                "grace_s": FAILURE_GRACE_S,
                "exit_status": 1,
                "first_failure": None,
                "lost_node": node,
                "at": time.time(),
            },
        )
