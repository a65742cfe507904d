"""The fence: of all runs of a job (its attempts and their restarts) only the newest trains.

``<job>/fence.json`` names the newest run. Every agent reads it before each heartbeat: an older one ends its ranks. A
run's *term* begins anew when a look at the file and the heartbeat after it have worked, counted from before the look;
its guard, a process that touches no file system, ends ranks whose term is over. So a newer run that has waited for
longer than a term after it wrote its name is alone, whatever the older one's links, agents and disks do.
docs/explanation/agent.md has the rule and its limits.

"""

from __future__ import annotations

import os
import select
import signal
import time

from orc.launchers.agent.errors import Superseded
from orc.launchers.agent.failures import verdict
from orc.launchers.agent.preparation import end_containers
from orc.launchers.agent.processes import (
    ENDING,
    KILL_S,
    NEWS,
    PR_SET_PDEATHSIG,
    background,
    decode_wait_status,
    kill_attempt,
    load_libc,
    prctl,
    signal_process,
)
from orc.launchers.agent.procfs import descendants, is_running, runs_another
from orc.launchers.agent.records import create_json, read_json, write_json
from orc.launchers.agent.state import NodeState, StopRequest

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from typing import Any


NAME = "fence.json"
GUARD_NAME = b"orc-fence"  # of the guard's process, for ps
WAIT = 1.5  # terms that a successor waits: for the guard's pace, its waking up and the ranks' end
SHARE = 6  # of a term that a guard which was stopped itself gives its agent to look again
RECORD_S = 10.0  # for the exit record of an agent that did not answer; it may be the file system that hangs
_PR_SET_NAME = 15
_NEWER = 3  # exit code of the process that leaves word: there is a newer run
_LINE = 24  # bytes of one renewal


def _clock() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def _run_of(record: Mapping[str, Any]) -> tuple[int, int]:
    return int(record.get("attempt", 0)), int(record.get("restart", 0))


def describe(record: Mapping[str, Any]) -> str:
    """Return the name of a run: ``attempt 1, restart 2 on node3``."""
    attempt, restart = _run_of(record)
    return f"attempt {attempt}, restart {restart} on {record.get('host')}"


class Fence:
    """The hold of one agent on its job: the right to run ranks, for one term at a time."""

    def __init__(self, node: NodeState) -> None:
        self.node = node
        self.path = os.path.join(node.config.job_dir, NAME)
        self.run = (node.config.attempt, node.restart)
        self.term_s = node.peer_timeout_s
        self.wait_s = WAIT * self.term_s
        self.guard: Guard | None = None
        self.claimed = self.renewed = _clock()

    @staticmethod
    def clock() -> float:
        """Seconds that go on while the machine sleeps."""
        return _clock()

    # the right to run

    def claim(self) -> None:
        """Own the job, unless a newer run does: then it raises `Superseded`."""
        self.check()
        self.claimed = self.renewed = _clock()

    def check(self) -> None:
        """Raise `Superseded` when a newer run owns the job.

        A file that is older than this run is replaced: at its first look, or where two that came at once have crossed.
        """
        owner = read_json(self.path) or {}
        if _run_of(owner) > self.run:
            raise Superseded(f"{describe(owner)} owns the job now")
        if _run_of(owner) < self.run:
            attempt, restart = self.run
            mine = {"attempt": attempt, "restart": restart, "owner": self.node.owner, **self.node.me}
            write_json(self.path, mine)

    def renew(self, since: float) -> None:
        """Begin a new term: a look at the file that began at *since*, and the heartbeat after it, have worked."""
        self.renewed = since
        if self.guard:
            self.guard.tell(since)

    @property
    def slept(self) -> bool:
        """Return whether this process has been stopped for so long that it has to look before it does anything else."""
        return self.guard is not None and _clock() - self.renewed > max(1.0, 3 * self.node.heartbeat_s)

    def yield_to_guard(self) -> None:
        """Wait for the guard when it is ending this agent: what happens to the ranks now is the guard's doing.

        The guard stops the agent first, but a scheduler that resumes a suspended job continues all of its processes.
        It comes back only where the guard spares the agent, because a newer run owns the job.
        """
        if self.guard and self.guard.ending():
            self.guard.wait()
            self.guard.forget()
            self.guard = None

    # its guard

    def start_guard(self) -> None:
        """Start the guard: from now on the ranks do not outlive the term."""
        self.guard = Guard(self)

    def stop_guard(self) -> None:
        """No rank is left to be ended."""
        guard, self.guard = self.guard, None
        if guard:
            guard.close()

    def on_end(self, pid: int) -> None:
        """Start the guard again when it is the child that has ended."""
        if self.guard and pid == self.guard.pid:
            self.node.log("the guard's process has ended; starting it again")
            self.guard.forget()
            self.start_guard()
            self.renew(self.renewed)

    # those before

    def predecessors(self) -> list[tuple[str, int, dict[str, Any]]]:
        """Return directory, node number and lease of every earlier run's node that has left no exit record."""
        found = []
        for directory, node in _nodes(os.path.dirname(self.path), self.run[0]):
            place = os.path.join(directory, f"node-{node}")
            taken = [read_json(os.path.join(place, name)) for name in _names(place, "lease")]
            for lease in filter(None, taken):
                run = (int(directory.rpartition("/a")[2]), int(lease.get("restart", 0)))
                if run < self.run and not _has_ended(place, run[1]):
                    found.append((directory, node, lease))
        return found

    def predecessors_ended(self) -> bool:
        """Return whether no earlier run has ranks any more. What it has left on this machine is ended."""
        # No short cut: what is on this machine is not waited for.
        open_ = [one for one in self.predecessors() if not self._end_here(*one)]
        return not open_ or _clock() - self.claimed > self.wait_s

    def record_predecessors_end(self) -> None:
        """Record the end of those that were waited for, so that later runs do not wait for them again."""
        for directory, node, lease in self.predecessors():
            restart = int(lease.get("restart", 0))
            path = os.path.join(directory, f"node-{node}", f"exit-r{restart}.json")
            reason = "it did not say how it ended"
            create_json(path, {"restart": restart, "outcome": "peer", "reason": reason, "at": time.time()})

    def _end_here(self, directory: str, node: int, lease: Mapping[str, Any]) -> bool:
        """End a predecessor on this machine; False when it was on another one, or may have been."""
        me = self.node.me
        if not lease.get("pid_ns") or any(lease.get(name) != me[name] for name in ("boot_id", "pid_ns")):
            # Who shares no files with it cannot tell. There the next run is only made when the last one has ended:
            # by the SSH backend after the fence, by SageMaker with containers that are gone.
            return bool(self.node.config.hosts)
        pid, start = int(lease.get("pid", 0)), str(lease.get("pid_start"))
        if is_running(pid, start, me["boot_id"]):
            end_below(pid, self.node.config.marker)
            signal_process(pid, signal.SIGKILL)
        if directory != self.node.attempt_dir or node == self.node.node:  # else its own new agent does that
            kill_attempt(directory, node)
        return not is_running(pid, start, me["boot_id"])


def _nodes(job_dir: str, last: int) -> Iterator[tuple[str, int]]:
    for attempt in range(1, last + 1):
        directory = os.path.join(job_dir, f"a{attempt}")
        if os.path.isdir(directory):
            for name in os.listdir(directory):
                kind, _, number = name.partition("-")
                if kind == "node" and number.isdigit():
                    yield directory, int(number)


def _names(place: str, kind: str) -> list[str]:
    """Return the names of ``<kind>.json`` and of those of single restarts."""
    return [name for name in os.listdir(place) if name.startswith((f"{kind}.", f"{kind}-r")) and name.endswith(".json")]


def _has_ended(place: str, restart: int) -> bool:
    records = (read_json(os.path.join(place, name)) for name in _names(place, "exit"))
    return any(record is not None and int(record.get("restart", 0)) == restart for record in records)


def end_below(pid: int, marker: str, spare: int = 0) -> bool:
    """Stop the agent *pid* and SIGKILL all below it, but the process *spare* and other attempts than *marker*."""
    signal_process(pid, signal.SIGSTOP)
    deadline = time.monotonic() + KILL_S
    while left := descendants(pid, lambda other: other == spare or runs_another(other, marker)):
        if time.monotonic() > deadline:
            return False
        for below in left:
            signal_process(below, signal.SIGKILL)
        time.sleep(0.005)
    return True


class Guard:
    """A process beside the agent that ends its ranks when the term is over."""

    def __init__(self, fence: Fence) -> None:
        read, self._write = os.pipe()
        for end in (read, self._write):
            os.set_blocking(end, False)
        self._begun, begin = os.pipe()
        os.set_blocking(self._begun, False)
        node, parent, write = fence.node, os.getpid(), self._write

        def work() -> None:
            os.close(write)
            if node.slots:
                node.slots.close()  # the agent's copy counts
            if node.link and node.link.listener:
                node.link.listener.close()
            for number in (*ENDING, signal.SIGHUP, NEWS):  # what a scheduler sends to all of a step
                signal.signal(number, signal.SIG_IGN)
            load_libc().prctl(_PR_SET_NAME, GUARD_NAME, 0, 0, 0)
            if watch(read, fence.term_s, fence.renewed):
                os.write(begin, b"x")
                _end_term(fence, parent)

        try:
            self.pid = background(work, node.log_fd)
        finally:
            os.close(read)
            os.close(begin)

    def ending(self) -> bool:
        """Return whether the guard has begun to end the agent."""
        try:
            return os.read(self._begun, 1) == b"x"
        except BlockingIOError:
            return False

    def tell(self, since: float) -> None:
        """The term counts from *since* on."""
        try:
            os.write(self._write, f"{since:.6f}".rjust(_LINE - 1).encode() + b"\n")
        except OSError:
            pass  # it has just ended and gets a successor, or has not read for a long time and will look at the newest

    def forget(self) -> None:
        """Close the pipe of a guard that has ended."""
        os.close(self._write)
        os.close(self._begun)

    def close(self) -> None:
        """End it."""
        self.forget()
        signal_process(self.pid, signal.SIGKILL)
        self.wait()

    def wait(self) -> None:
        """Wait until its process has ended."""
        try:
            os.waitpid(self.pid, 0)
        except ChildProcessError:
            pass  # reaped already


def watch(pipe: int, term_s: float, renewed: float) -> bool:
    """Read renewals from *pipe* until the term is over (True) or its last writer is gone (False).

    When this process itself was stopped, so were probably the agent and the ranks: by a scheduler that suspends a job,
    or with the machine. Then the agent gets a moment, once, to look whether it still owns the job.
    """
    share = term_s / SHARE
    woke, until, given = _clock(), 0.0, -1.0
    while True:
        ready, _, _ = select.select([pipe], [], [], share / 2)
        now = _clock()
        if ready:
            data = os.read(pipe, 64 * _LINE)
            if not data:
                return False
            renewed = max(renewed, float(data[-_LINE:]))
        if now - woke > 1.5 * share and given != renewed:
            until, given = now + share, renewed
        woke = now
        if now > renewed + term_s and now > until:
            return True


def _end_term(fence: Fence, parent: int) -> None:
    """The term is over: end the ranks, leave word if the file system lets us, and end the agent."""
    node = fence.node
    prctl(PR_SET_PDEATHSIG, 0)
    gone = end_below(parent, node.config.marker, os.getpid())
    reason = f"the agent of node {node.node} has not renewed its heartbeat for {fence.term_s:g} s; its ranks were ended"

    def leave_word() -> None:
        node.superseded, node.link = True, None  # no heartbeat more
        node.prepared = read_json(os.path.join(node.dir, "environment.json")) or {}
        end_containers(node)
        stop = StopRequest(
            "node_failure", f"{reason} (node failure; {node.me['host']})", 0.0, lost=True, lost_node=node.node
        )
        node.announce(stop)
        node.record(verdict(node, stop), node.exit_name())
        try:
            fence.check()
        except Superseded:
            os._exit(_NEWER)

    ended = status = 0
    if gone:
        writer = background(leave_word)
        deadline = time.monotonic() + RECORD_S
        while not ended and time.monotonic() < deadline:
            ended, status = os.waitpid(writer, os.WNOHANG)
            time.sleep(0.01)
    # Where the end of a replaced agent would end the newer run too, it stays stopped.
    if decode_wait_status(status) != (_NEWER, None) or not node.config.stay_stopped:
        signal_process(parent, signal.SIGKILL)
