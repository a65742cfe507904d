"""Node: one node's part in one incarnation of an attempt, from the lease to the exit record."""

from __future__ import annotations

import os
import sys
import time

from orc.launchers.agent.errors import EXIT_HELD, EXIT_LAUNCH, LaunchFailure, Superseded, log_stderr
from orc.launchers.agent.failures import check_rank_records, make_verdict, verdict
from orc.launchers.agent.fence import Fence
from orc.launchers.agent.gpus import gpu_count
from orc.launchers.agent.preparation import end_containers, load_secrets, prepare, step
from orc.launchers.agent.processes import become_subreaper, kill_descendants, release_signals, take_signals, users_umask
from orc.launchers.agent.procfs import identity
from orc.launchers.agent.ranks import join_rendezvous, launch_environment, start_process, start_ranks
from orc.launchers.agent.records import create_json, log_tail, read_json, remove, write_json
from orc.launchers.agent.state import FAILURE_GRACE_S, FAST_POLL_S, NodeState, StopRequest
from orc.launchers.agent.supervision import (
    Supervisor,
    end_processes,
    end_services,
    kill_sessions,
    rank_processes,
    stop_ranks_now,
)
from orc.launchers.agent.variables import substitute, without_own

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

    from orc.launchers.agent.config import AgentConfig


class Node(Supervisor):
    """Agent of one node, from the lease to the exit record."""

    def run(self) -> int:
        """Do this node's part; returns the agent's exit status."""
        for directory in (self.logs, self.dir):
            os.makedirs(directory, mode=0o700, exist_ok=True)
        if succeeded_before(self):
            return 0
        if not take_lease(self):
            return EXIT_HELD
        if self.node == 0 and self.config.nnodes_from:
            # With the real number of nodes.
            write_json(os.path.join(self.attempt_dir, "agent.json"), self.config.to_dict())
        return self.run_with_lease()

    def run_with_lease(self) -> int:
        """Do this node's part once the lease is held; returns the agent's exit status."""
        take_signals()
        become_subreaper()
        log = os.path.join(self.logs, f"node-{self.node}.log")
        self.log_fd = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        self.fence = Fence(self)
        try:
            return self.run_as_owner()
        except Superseded as newer:
            return self.end_superseded(str(newer))

    def run_as_owner(self) -> int:
        """Do this node's part for as long as no newer run owns the job."""
        try:
            self.fence.claim()
            self.reserve()
            self.record_pids()
            if self.linked:
                from orc.launchers.agent.link.process import Link

                self.link = self.link or Link(self)
                self.link.start()
            ending = self.run_ranks()
        except LaunchFailure as error:
            ending = make_verdict("launch", str(error), EXIT_LAUNCH)
        except Superseded:
            raise
        except Exception as error:  # whatever happens, the ranks are ended and the record is written
            import traceback

            self.log("the agent failed:\n" + traceback.format_exc())
            ending = make_verdict("launch", f"the agent failed: {type(error).__name__}: {error}", EXIT_LAUNCH)
        if ending["outcome"] == "launch":
            self.announce(StopRequest("launch", ending["reason"], 0.0))
        kill_sessions(self)
        end_containers(self)
        self.fence.stop_guard()
        self.record(ending)
        kill_descendants(self.config.marker, spare=[self.link.pid] if self.link else [])
        self.clean_up(ending)
        if self.link:
            self.link.await_delivery(others_go_on=ending["outcome"] == "succeeded")
            self.link.close()
        elif ending["exit_status"] and not (self.stop and self.stop.lost):
            self.await_peers()
        return int(ending["exit_status"])

    def end_superseded(self, reason: str) -> int:
        """End the ranks at once, without grace, because they would save: a newer run owns the job."""
        self.superseded = True
        kill_sessions(self)
        self.fence.stop_guard()
        kill_descendants(self.config.marker)
        end_containers(self)
        log_stderr(f"{reason}; ended node {self.node} of {self.config.marker}")
        stop = StopRequest(
            "node_failure", f"{reason} (node failure; {self.me['host']})", 0.0, lost=True, lost_node=self.node
        )
        self.record(verdict(self, stop), self.exit_name())
        for held in filter(None, (self.port, self.slots, self.link)):
            held.close()
        # Not a failure: srun would have Slurm end the step of that number, which is by now that of the newer run.
        return 0

    def run_ranks(self) -> dict[str, Any]:
        """Prepare the node, start the ranks and wait for their end."""
        self.write_heartbeat("setup")
        try:
            load_secrets(self)
            cancel = read_json(os.path.join(self.attempt_dir, "cancel.json"))
            if cancel is not None:  # it came before the start did
                self.on_cancel(cancel)
            if self.stop is None and self.await_predecessors() and prepare(self) and (where := join_rendezvous(self)):
                if gpu_count() != 0:
                    from orc.launchers.agent.gpu_errors import GpuErrors

                    self.gpu_errors = GpuErrors(self.dir, {**os.environ, **self.config.env, **self.own_env})
                values, env = launch_environment(self, *where)
                if start_services(self, values, env):
                    start_ranks(self, values, env)
        except LaunchFailure:
            stop_ranks_now(self)
            raise
        self.write_heartbeat("running" if self.ranks or self.calls or self.services else "stopping")
        return self.supervise()

    def await_predecessors(self) -> bool:
        """Wait until no earlier run of the job has ranks any more; False when a stop came first."""
        if not self.fence.predecessors_ended():
            before = self.fence.predecessors()
            hosts = ", ".join(sorted({str(lease.get("host")) for _, _, lease in before}))
            limit = f"it ends itself within {self.fence.wait_s:g} s"
            self.log(f"an earlier run of this job on {hosts} has not ended; {limit}")
            if not self.until(self.fence.predecessors_ended):
                return False
        self.fence.record_predecessors_end()
        self.fence.start_guard()
        return True

    def supervise(self) -> dict[str, Any]:
        """Wait until the last rank has ended; returns the exit record's verdict."""
        if self.follows:
            if self.until(lambda: self.peer_record(0, "exit.json") is not None):
                return self.follow_first_node()
        elif self.ranks and self.until(
            lambda: self.unexplained is None and all(rank.status is not None for rank in self.ranks)
        ):
            if self.services:
                self.write_heartbeat("stopping")  # the other nodes' services may end with these
                end_services(self)
            return make_verdict("succeeded", "", 0)
        stop = self.stop
        if stop is None:
            raise AssertionError("neither ranks nor a reason to stop")
        self.write_heartbeat("stopping")
        if not stop.forward:
            deadline = time.monotonic() + stop.grace_s
            while rank_processes(self) and time.monotonic() < min(deadline, self.kill_at):
                self.tick()
        if self.follows and self.services:  # the driver may need them to save
            deadline = time.monotonic() + stop.grace_s
            while not self.peer_record(0, "exit.json") and time.monotonic() < min(deadline, self.kill_at):
                self.tick()
        end_processes(self, lambda: rank_processes(self))
        return verdict(self, stop)

    def follow_first_node(self) -> dict[str, Any]:
        """Return the verdict of a node without a program when the first node, which has it, has ended."""
        record = self.peer_record(0, "exit.json") or {}
        if record.get("outcome") != "succeeded":
            self.poll(time.monotonic())  # a cancellation may be the reason of both
            # Otherwise it has left no word, or that has not come yet.
            self.request_stop(StopRequest("peer", f"node 0 has ended: {record.get('reason')}", 0.0, announced=True))
            end_processes(self, lambda: rank_processes(self))
            return verdict(self, self.stop)  # type: ignore[arg-type]
        end_services(self)
        deadline = time.monotonic() + FAILURE_GRACE_S
        while self.sessions and time.monotonic() < deadline:  # the launcher's daemons
            self.next_poll = time.monotonic() + FAST_POLL_S
            self.tick()
        check_rank_records(self)
        return verdict(self, self.stop) if self.stop else make_verdict("succeeded", "", 0)

    def await_peers(self) -> None:
        """Stay until the other nodes have recorded too, or had their grace.

        A scheduler that sees this agent fail kills the others within seconds, in the middle of saving.
        """
        deadline = time.monotonic() + (self.stop.grace_s if self.stop else self.grace_s) + 5.0
        while time.monotonic() < deadline and os.path.isdir(self.dir):
            if all(self.peer_record(node, "exit.json") for node in range(self.nnodes) if node not in self.lost):
                return
            time.sleep(FAST_POLL_S)

    def clean_up(self, ending: dict[str, Any]) -> None:
        """Remove the secrets when the attempt is over; one that is run again in the same place still needs them."""
        if self.port:
            self.port.close()
        if self.slots:
            self.slots.close()
        if os.path.isdir(scratch := os.path.join(self.dir, "launcher")):
            import shutil

            shutil.rmtree(scratch, ignore_errors=True)  # what torchrun keeps for its ranks while they run
        if self.config.link:  # nothing on this host is another node's
            for name in ("secrets.json", "link.json"):
                remove(os.path.join(self.private, name))
            return
        everyone = [self.peer_record(node, "exit.json") for node in range(self.nnodes)]
        if all(everyone) and self.gang_pid is not None and os.getppid() != self.gang_pid:
            finish_gang(self.config)  # the gang process, whose task this is, was killed
        elif all(everyone) and self.gang_pid is None and ending["outcome"] != "preempted":
            for name in ("secrets.json", "link.json"):  # the latter where it turned out that hosts share their files
                remove(os.path.join(self.private, name))


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


def finish_gang(config: AgentConfig) -> None:
    """Remove the secrets and start ``on_exit``, once, when all nodes of a gang have ended."""
    attempt_dir = config.attempt_dir
    remove(os.path.join(attempt_dir, "secrets.json"))
    on_exit = config.on_exit
    if not on_exit or not create_json(os.path.join(attempt_dir, "finished.json"), identity()):
        return
    env = without_own(os.environ)
    env.update(on_exit.get("env") or {}, ORC_GANG=config.marker)
    sys.stderr.flush()
    if os.fork() == 0:
        try:
            os.setsid()
            release_signals()
            os.umask(users_umask())
            os.execvpe(on_exit["argv"][0], on_exit["argv"], env)
        except OSError as error:
            log_stderr(f"cannot start {on_exit['argv'][0]}: {error}")
        finally:
            os._exit(127)


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
