"""State of one node's part in an attempt: its records, and why its ranks are being ended."""

from __future__ import annotations

import json
import os
import sys
import time

from orc.launchers.agent.errors import EXIT_CANCELLED, EXIT_LAUNCH, EXIT_PREEMPTED, EXIT_TIMEOUT, log_stderr
from orc.launchers.agent.processes import decode_wait_status, ended_children
from orc.launchers.agent.procfs import identity
from orc.launchers.agent.records import FORMAT, PROGRESS_BYTES, create_json, read_json, refresh_json, remove, write_json

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from orc.launchers.agent.config import AgentConfig


_STATUSES = {"preempted": EXIT_PREEMPTED, "launch": EXIT_LAUNCH, "timeout": EXIT_TIMEOUT, "cancelled": EXIT_CANCELLED}


class StopRequest:
    """Reason for ending the ranks before they end by themselves; its outcome decides the exit status if that is 0."""

    def __init__(
        self,
        outcome: str,
        reason: str,
        grace_s: float,
        *,
        forward: bool = True,
        failure: dict[str, Any] | None = None,
        exit_status: int = 0,
        lost: bool = False,
        lost_node: int | None = None,
        announced: bool = False,
    ) -> None:
        self.outcome = outcome
        self.reason = reason
        self.grace_s = grace_s
        self.forward = forward  # send SIGTERM at once; a rank that left with 75 shows that the others are leaving too
        self.failure = failure
        self.exit_status = exit_status or _STATUSES.get(outcome, 1)
        self.lost = lost
        self.lost_node = lost_node  # which one, where that is known
        self.announced = announced  # learned from another node, so it need not be told

    def record(self, node: int, host: str) -> dict[str, Any]:
        """Return the announcement of this stop by an agent."""
        told = {"outcome": self.outcome, "reason": self.reason, "forward": self.forward, "grace_s": self.grace_s}
        why = {"exit_status": self.exit_status, "first_failure": self.failure, "lost_node": self.lost_node}
        return {"node": node, "host": host, **told, **why, "at": time.time()}


POLL_S = 0.25  # how often the records of others are looked at
ATTENTIVE = 256  # nodes that are looked at so often
FAST_POLL_S = 0.02  # the same while the nodes of an attempt find each other
FAILURE_GRACE_S = 5.0  # ranks whose peer has crashed hang in a collective; there is nothing to save
RESERVE_BYTES = 32768  # kept on disk so that the exit record can be written when the disk is full


class Rank:
    """Rank (or launcher, or service beside them) that this agent has started."""

    def __init__(
        self, rank: int | None, local_rank: int | None, pid: int, log: str, log_start: int, role: str = ""
    ) -> None:
        self.role = role  # of a service; empty for a rank or a launcher
        self.rank = rank
        self.local_rank = local_rank
        self.pid = pid
        self.log = log
        self.log_start = log_start
        self.status: int | None = None
        self.at = 0.0


class NodeState:
    """State of one node's part in one incarnation (restart) of an attempt."""

    def __init__(
        self,
        config: AgentConfig,
        node: int,
        owner: str,
        restart: int = 0,
        *,
        master_host: str | None = None,
        gang_pid: int | None = None,
    ) -> None:
        self.config = config
        self.gang_pid = gang_pid
        self.node = node
        self.owner = owner
        self.restart = restart
        self.master_host = master_host
        self.nnodes = config.nnodes
        self.nproc = config.nproc
        self.attempt_dir = config.attempt_dir
        self.work = config.work_dir or os.path.join(config.job_dir, "work")
        self.logs = config.logs_dir or os.path.join(self.attempt_dir, "logs")
        self.private = config.private_dir or self.attempt_dir
        self.dir = os.path.join(self.attempt_dir, f"node-{node}")
        self.heartbeat_s = config.heartbeat_s
        self.peer_timeout_s = config.peer_timeout_s
        # A cut that heals in time must not look longer than it was.
        self.heartbeat_s *= max(1.0, config.nnodes / ATTENTIVE)  # node 0 reads those of all
        self.heartbeat_s = min(self.heartbeat_s, self.peer_timeout_s / 6)
        self.grace_s = config.grace_s
        self.preempt_exit = config.preempt_exit
        self.python = config.python or sys.executable
        self.prepared: dict[str, Any] = {}  # what the environment step says: python, path, env, prefix
        self.me = identity()
        self.started_at = time.time()
        self.begun = time.monotonic()
        self.state = "setup"
        self.stop: StopRequest | None = None
        self.kill_at = float("inf")  # monotonic; when the grace period is over
        self.secrets: dict[str, str] = {}
        self.sessions: dict[int, str] = {}  # pid -> start time, every session leader that is not reaped
        self.ended: dict[int, int] = {}  # pid -> wait status
        self.ranks: list[Rank] = []
        self.port: Any = None
        command = config.command
        self.shims = command["spawn"] == "launcher"  # the ranks are a launcher's, each below a shim
        self.driven = command.get("primary") == "first"  # the program, or its launcher, runs on node 0 alone
        self.follows = self.driven and node > 0  # its end is this node's
        self.remote_shell = bool(command.get("remote_shell")) and self.nnodes > 1
        # Of a driver there is one, whatever the nodes have.
        self.local_ranks = self.nproc if self.shims or not self.driven else int(node == 0)
        self.services: list[Rank] = []  # what runs beside the program on this node
        self.calls: Any = None  # what other nodes ask of this one, where the first node alone has the launcher
        self.fence: Any = None  # against other runs of the same job
        self.superseded = False  # a newer one owns the job: nothing more is written where that writes too
        self.linked = config.link and self.nnodes > 1
        self.link: Any = None  # to the other hosts, where they share no file system
        self.slots: Any = None  # what this node holds of its host
        self.gpu_errors: Any = None  # what the kernel says of its GPUs while ranks run
        self.own_env: dict[str, str] = {}  # variables of this node alone
        self.token = ""  # of the ranks of this incarnation
        self.listening: tuple[str, str] | None = None  # interface and address that the job's `network` holds ranks to
        self.min_nodes = config.min_nodes or self.nnodes
        self.lost: set[int] = set()  # nodes that the gang goes on without
        self.stacks: Any = None  # what this node has been asked for
        self.stalled = ""  # what a rank has reported of a stall
        self.unexplained: tuple[Rank, float] | None = None  # a failed launcher, until (monotonic) another node says why
        self.beats: dict[int, tuple[int, dict[str, Any] | None]] = {}  # when it was written, and its content
        self.watch = [0] if node else list(range(1, self.nnodes))
        self.seen: dict[int, tuple[object, float]] = {}  # peer -> (its last heartbeat, when it was new, monotonic)
        self.next_beat = self.next_poll = self.last_poll = 0.0
        self.log_fd = -1

    def rendezvous_id(self) -> str:
        """Return the rendezvous id, which is fresh for every incarnation."""
        return f"{self.config.marker}-r{self.restart}"

    def request_stop(self, stop: StopRequest) -> None:
        """Begin to stop; the first reason counts."""
        if self.stop is None:
            self.stop = stop
            self.log(f"stopping: {stop.reason}")
            if not stop.announced:
                self.announce(stop)

    def announce(self, stop: StopRequest) -> None:
        """Announce the stop to the other nodes, and keep the first failure should this agent not live to record it."""
        path = os.path.join(self.attempt_dir, f"stop-r{self.restart}.json")
        try:
            create_json(path, stop.record(self.node, self.me["host"]))
        except OSError as error:
            self.log(f"cannot write {path}: {error}")
            remove(os.path.join(self.dir, ".reserve"))  # the exit record can do with less
        self.notify_link()

    def peer_record(self, peer: int, name: str) -> dict[str, Any] | None:
        """Return a record of the peer's current incarnation."""
        record = read_json(os.path.join(self.attempt_dir, f"node-{peer}", name))
        return record if record is not None and int(record.get("restart", 0)) == self.restart else None

    def heartbeat_of(self, peer: int) -> dict[str, Any] | None:
        """Return the last heartbeat of a peer; read again when it has changed, where the file is on this host."""
        if not self.link:
            return self.peer_record(peer, "heartbeat.json")
        try:
            changed = os.stat(os.path.join(self.attempt_dir, f"node-{peer}", "heartbeat.json")).st_mtime_ns
        except OSError:
            return None
        if self.beats.get(peer, (0, None))[0] != changed:
            self.beats[peer] = changed, self.peer_record(peer, "heartbeat.json")
        return self.beats[peer][1]

    def shim_records(self, running: bool = False) -> dict[int, dict[str, Any]]:
        """Return the records of the shims around a launcher's ranks, by rank: ends, or with *running* starts."""
        suffix = f"-r{self.restart}.{'pid' if running else 'json'}"
        found = {}
        for name in os.listdir(self.dir):
            if name.startswith("rank-") and name.endswith(suffix):
                record = read_json(os.path.join(self.dir, name))
                if record is not None:
                    found[int(record["rank"])] = record
        return dict(sorted(found.items()))

    def stall(self, rank: int | None = None) -> str:
        """Return the runtime watchdog's report of *rank* or of any rank of this node: one line, empty without."""
        try:
            names = sorted(os.listdir(self.dir))
        except FileNotFoundError:  # the next heartbeat will notice
            return ""
        for name in names:
            if name.startswith("stall-") and name.endswith(".json"):
                report = read_json(os.path.join(self.dir, name)) or {}
                if report.get("restart") == self.restart and rank in (None, report.get("rank")):
                    return self.masked(str(report.get("summary") or ""))[:2000]
        return ""

    def masked(self, text: str) -> str:
        """Return *text* without values of secrets: what a job prints stays in its own log, and travels no further."""
        if not self.secrets:
            return text
        from orc.launchers.agent.masking import masked

        return masked(text, self.secrets.values())

    def log(self, message: str) -> None:
        """Write a line to this node's log."""
        stamp = time.strftime("%Y-%m-%d %H:%M:%S")
        try:
            os.write(self.log_fd, f"[orc {stamp} node {self.node}] {message}\n".encode("utf-8", "replace"))
        except OSError as error:  # a full disk must not stop the agent from ending its ranks
            log_stderr(f"{message} (not in the log: {error})")

    def write_heartbeat(self, state: str) -> None:
        """Show the others that this node is alive, if the job is still its own: raises `Superseded`."""
        self.state = state
        self.next_beat = time.monotonic() + self.heartbeat_s
        if self.superseded:
            return
        alive = sum(rank.status is None for rank in self.ranks)
        if self.shims and (alive or self.calls):
            alive = self.nproc - len(self.shim_records())
        progress = read_json(os.path.join(self.dir, "progress.json"), PROGRESS_BYTES) or {}
        record = {
            "at": time.time(),
            "restart": self.restart,
            "state": state,
            "ranks_alive": alive,
            "progress": progress,
            "stall": self.stalled,
        }
        try:
            began = self.fence.clock()
            self.fence.check()
            refresh_json(os.path.join(self.dir, "heartbeat.json"), record)
            self.fence.renew(began)
        except FileNotFoundError:  # nobody can see this attempt any more, nor reach it to cancel it
            reason = f"{self.attempt_dir} was removed"
            self.request_stop(StopRequest("node_failure", reason, FAILURE_GRACE_S, lost=True))
        except OSError as error:
            self.log(f"cannot write a heartbeat: {error}")
        self.notify_link()

    def notify_link(self) -> None:
        """Wake the link: there is a new record for other hosts."""
        if self.link:
            self.link.wake()

    def record_pids(self) -> None:
        """Note what has to be killed should this agent be killed."""
        record = {
            "host": self.me["host"],
            "boot_id": self.me["boot_id"],
            "agent": {"pid": self.me["pid"], "start": self.me["pid_start"]},
            "sessions": [{"pid": pid, "start": start} for pid, start in self.sessions.items()],
            "env": self.own_env,
        }
        try:
            write_json(os.path.join(self.dir, "pids.json"), record, durable=False)
        except OSError as error:
            self.log(f"cannot write pids.json: {error}")

    def reap(self, first: int = 0) -> None:
        """Collect the children that have ended, the one that was *first* before the others."""
        for pid, status in ended_children(first):
            if self.sessions.pop(pid, None) is not None:
                self.ended[pid] = status
            if self.link and pid == self.link.pid:
                self.link.on_end()
            if self.fence:
                self.fence.on_end(pid)
            for rank in (*self.ranks, *self.services):
                if rank.pid == pid:
                    rank.status, rank.at = status, time.time()
                    self.on_rank_end(rank)

    def on_rank_end(self, rank: Rank) -> None:
        """React to the end of a rank (or of the launcher)."""

    def answer_stack_requests(self) -> None:
        """Answer requests for the stacks of the ranks."""

    def reserve(self) -> None:
        """Keep room for the exit record: it is what counts when the job has filled the disk."""
        with open(os.path.join(self.dir, ".reserve"), "wb") as file:
            file.write(b"\0" * RESERVE_BYTES)

    def record(self, ending: dict[str, Any], name: str = "exit.json") -> None:
        """Write the exit record; where the disk refuses even a few bytes, standard error has it."""
        path = os.path.join(self.dir, name)
        record = {
            "format": FORMAT,
            "marker": self.config.marker,
            "owner": self.owner,
            "node": self.node,
            "host": self.me["host"],
            "restart": self.restart,
            "started_at": self.started_at,
            "ended_at": time.time(),
            **ending,
            **({"lost_nodes": sorted(self.lost)} if self.lost else {}),
            **self.gpu_errors_for(str(ending["outcome"])),
            "ranks": {str(number): end for number, end in self.rank_records().items()},
        }
        self.log(f"{ending['outcome']}: {ending['reason']}" if ending["reason"] else str(ending["outcome"]))
        for attempt in range(20):
            try:
                write_json(path, record)
                break
            except OSError as error:
                log_stderr(f"cannot write {path}: {error}")
                if isinstance(error, FileNotFoundError):
                    break  # the directory was removed; it does not come back
                remove(os.path.join(self.dir, ".reserve"))
                if attempt == 1 and record["first_failure"]:
                    record["first_failure"] = {**record["first_failure"], "log_tail": ""}
                if attempt:
                    time.sleep(0.5)
        else:
            log_stderr(json.dumps(record))
        remove(os.path.join(self.dir, ".reserve"))
        self.notify_link()

    def gpu_errors_for(self, outcome: str) -> dict[str, str]:
        """Return ``gpu_errors`` of the exit record: the errors that may be the cause of *outcome*."""
        if self.gpu_errors is None or self.superseded or outcome in ("succeeded", "cancelled", "preempted"):
            return {}
        told = self.gpu_errors.summary()
        return {"gpu_errors": told} if told else {}

    def exit_name(self) -> str:
        """The name of this run's exit record: not that of the attempt any more when a later restart has the lease."""
        lease = read_json(os.path.join(self.dir, "lease.json")) or {}
        own = (lease.get("owner"), lease.get("restart"), lease.get("pid")) == (self.owner, self.restart, self.me["pid"])
        return "exit.json" if own else f"exit-r{self.restart}.json"

    def rank_records(self) -> dict[int, dict[str, Any]]:
        """Return how each rank of this node ended, as far as known."""
        if self.shims:
            return {
                number: {"exit_code": r["exit_code"], "signal": r["signal"], "at": r["at"]}
                for number, r in self.shim_records().items()
            }
        found = {}
        for rank in self.ranks:
            if rank.rank is not None and rank.status is not None:
                code, name = decode_wait_status(rank.status)
                found[rank.rank] = {"exit_code": code, "signal": name, "at": rank.at}
        return found
