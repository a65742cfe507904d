"""All nodes of an attempt on one machine: one forked agent each, and a parent that sees them end.

Shipped as ``orc_agent_gang.py`` beside the agent: standard library only, Python >= 3.9.
"""

from __future__ import annotations

import os
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

    from orc.launchers import agent
else:
    try:
        import orc_agent as agent
    except ImportError:  # not on a node
        from orc.launchers import agent


def finish(config: Mapping[str, Any]) -> None:
    """What happens once when all nodes of a gang have ended: no secret stays, and the next decision gets made."""
    attempt_dir = str(config["attempt_dir"])
    agent.remove(os.path.join(attempt_dir, "secrets.json"))
    on_exit = config.get("on_exit")
    if not on_exit or not agent.create_json(os.path.join(attempt_dir, "finished.json"), agent.identity()):
        return
    env = {name: value for name, value in os.environ.items() if name not in agent.DERIVED}
    env.update(on_exit.get("env") or {}, ORC_GANG=config["marker"])
    sys.stderr.flush()
    if os.fork() == 0:
        try:
            os.setsid()
            agent.release_signals()
            os.umask(agent.users_umask)
            os.execvpe(on_exit["argv"][0], on_exit["argv"], env)
        except OSError as error:
            agent.complain(f"cannot start {on_exit['argv'][0]}: {error}")
        finally:
            os._exit(127)


class Gang:
    """All nodes of an attempt on this machine: one forked agent each, and one parent that sees them end."""

    def __init__(self, config: dict[str, Any], owner: str) -> None:
        self.config = config
        self.owner = owner
        self.attempt_dir = str(config["attempt_dir"])
        self.agents: dict[int, int] = {}  # pid -> node

    def run(self) -> int:
        """Detach, and return to the caller as soon as the gang is held (0) or known to be held by another (76)."""
        read, write = os.pipe()
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if pid:
            os.close(write)
            answer = os.read(read, 1)
            return answer[0] if answer else agent.EXIT_LAUNCH
        os.close(read)
        status = agent.EXIT_LAUNCH
        try:
            os.setsid()
            os.chdir("/")
            status = self.hold()
            if status == 0:
                self.detach()
            os.write(write, bytes([status]))
            os.close(write)
            if status == 0:
                self.supervise()
        except OSError as error:
            agent.complain(str(error))
        finally:
            os._exit(status)

    def hold(self) -> int:
        """The gang's own lease: a second copy of the same submission ends here."""
        path = os.path.join(self.attempt_dir, "gang.json")
        os.makedirs(os.path.join(self.attempt_dir, "logs"), mode=0o700, exist_ok=True)
        lease = {"owner": self.owner, "restart": 0, "marker": self.config["marker"], **agent.identity()}
        if agent.create_json(path, lease):
            return 0
        held = agent.read_json(path) or {}
        agent.complain(
            f"{self.config['marker']} is held by {held.get('owner')} (pid {held.get('pid')} on "
            f"{held.get('host')}); nothing was started"
        )
        if not agent.is_running(int(held.get("pid", 0)), str(held.get("pid_start")), str(held.get("boot_id"))):
            agent.remove(os.path.join(self.attempt_dir, "secrets.json"))  # nobody is left to remove it
        return agent.EXIT_HELD

    def detach(self) -> None:
        """Let go of the caller's terminal and pipes."""
        log = os.open(os.path.join(self.attempt_dir, "logs", "gang.log"), os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        null = os.open(os.devnull, os.O_RDONLY)
        sys.stderr.flush()
        for target, source in ((0, null), (1, log), (2, log)):
            os.dup2(source, target)
        os.close(log)
        os.close(null)

    def supervise(self) -> None:
        """Start one agent per node and wait for all of them."""
        agent.take_signals()
        agent.become_subreaper()
        me = os.getpid()
        agent.load_libc()
        for node in range(int(self.config["nnodes"])):
            pid = os.fork()
            if pid == 0:
                status = agent.EXIT_LAUNCH
                try:
                    os.setsid()
                    status = agent.Node(self.config, node, self.owner, gang_pid=me).run()
                except BaseException:
                    import traceback

                    agent.complain(traceback.format_exc())
                finally:
                    os._exit(status)
            self.agents[pid] = node
        while self.agents:
            received = agent.next_signal(3600.0)
            if received is not None and received.si_signo in agent.ENDING:
                for pid in self.agents:
                    agent.signal_process(pid, received.si_signo)
            self.reap()
        agent.kill_descendants(self.config["marker"])
        finish(self.config)

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
            if node is not None and agent.read_json(exited) is None:
                self.on_lost_agent(node, agent.how_it_ended(*agent.exit_of(status)))

    def on_lost_agent(self, node: int, how: str) -> None:
        """An agent was killed: what it had started must not run on, and the others need not wait for a time-out."""
        agent.complain(f"the agent of node {node} {how}")
        agent.kill_attempt(self.attempt_dir, node)
        agent.create_json(
            os.path.join(self.attempt_dir, "stop-r0.json"),
            {
                "node": node,
                "host": os.uname().nodename,
                "outcome": "node_failure",
                "reason": f"the agent of node {node} {how}",
                "forward": True,
                "grace_s": agent.FAILURE_GRACE_S,
                "exit_status": 1,
                "first_failure": None,
                "lost_node": node,
                "at": time.time(),
            },
        )
