"""Stacks of all ranks of an attempt that hangs: requested by a file, answered by every agent for its own ranks.

A rank's Python writes its
stacks itself when it gets `number` (launchers/rank_hooks/startup.py: `faulthandler`, in C, so it works whatever the
rank is stuck in); ``py-spy`` is used where it is installed. Format: docs/explanation/attempt-directory.md.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import time

from orc.launchers.agent.config import load_config
from orc.launchers.agent.processes import background, make_private, signal_process
from orc.launchers.agent.procfs import descendants, process_start
from orc.launchers.agent.records import create_json, read_json, write_json
from orc.launchers.agent.state import FAST_POLL_S, NodeState

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    from orc.launchers.agent.config import AgentConfig


ANSWER_S = 5.0  # for the ranks to write, from when they are asked
SPY_S = 15.0
TIMEOUT_S = 10.0
_THREAD = re.compile(r"(?:Current thread|Thread) 0x[0-9a-f]+(?: \[(?P<name>.*)\])? \(most recent call first\):")
_FRAME = re.compile(r'  File "(?P<file>.*)", line (?P<line>\d+|\?\?\?) in (?P<function>.*)')


def number() -> int:
    """Return the signal that makes a rank's Python write its stacks: one that no program uses or sends."""
    return int(signal.SIGRTMIN) + 13


# --- the agent's side ------------------------------------------------------------------------------------------------


class StackRequests:
    """Requests for stacks that this node has seen."""

    def __init__(self, node: NodeState) -> None:
        self.node = node
        self.directory = os.path.join(node.attempt_dir, "stacks")
        self.answered: set[str] = set()

    def poll(self) -> None:
        """Answer what is new."""
        try:
            names = os.listdir(self.directory)
        except FileNotFoundError:  # the attempt's directory was removed
            return
        for name in names:
            request = name[: -len(".json")]
            if name.endswith(".json") and "." not in request and request not in self.answered:
                self.answered.add(request)
                if os.path.exists(os.path.join(self.directory, f"{request}.node-{self.node.node}.json")):
                    continue  # before this restart
                pid = background(lambda request=request: self.answer(request), self.node.log_fd)  # type: ignore[misc]
                if request.startswith("stall-"):
                    self.wait_for(pid)

    def wait_for(self, pid: int) -> None:
        """Wait for the stacks of a stalled job's ranks, which are about to be ended."""
        node = self.node
        node.sessions[pid] = process_start(pid) or ""
        deadline = time.monotonic() + 2 * ANSWER_S
        while pid not in node.ended and time.monotonic() < deadline:
            time.sleep(FAST_POLL_S)
            if time.monotonic() >= node.next_beat:  # the other nodes must not take this for silence
                node.write_heartbeat(node.state)
            node.reap()

    def answer(self, request: str) -> None:
        """Write this node's answer."""
        node = self.node
        answer = {
            "id": request,
            "node": node.node,
            "host": node.me["host"],
            "restart": node.restart,
            "at": time.time(),
            "state": node.state,
            "ranks": stacks_of(node.dir, running_ranks(node), node.masked),
        }
        write_json(os.path.join(self.directory, f"{request}.node-{node.node}.json"), answer, durable=False)


def ask(attempt_dir: str, request: str) -> bool:
    """Request the stacks of all nodes; False when there is a request of the same name."""
    directory = os.path.join(attempt_dir, "stacks")
    os.makedirs(directory, mode=0o700, exist_ok=True)
    return create_json(os.path.join(directory, f"{request}.json"), {"id": request, "at": time.time()})


def running_ranks(node: NodeState) -> list[tuple[int, int, int]]:
    """Return ``(rank, local rank, pid)`` of the ranks of this node that run."""
    if node.shims:
        ended = node.shim_records()
        found = []
        for rank, record in node.shim_records(running=True).items():
            program = record.get("program") or {}
            over = rank in ended and ended[rank]["pid"] == record["pid"]
            if not over and process_start(int(program.get("pid", 0))) == program.get("start"):
                found.append((rank, int(record["local_rank"]), int(program["pid"])))
        return found
    return [(r.rank, r.local_rank or 0, r.pid) for r in node.ranks if r.rank is not None and r.status is None]


# --- one rank --------------------------------------------------------------------------------------------------------


def stacks_of(directory: str, ranks: Sequence[tuple[int, int, int]], masked: Any = str) -> list[dict[str, Any]]:
    """Return the stacks of these ranks, whose files are in *directory*."""
    import shutil

    spy = shutil.which("py-spy")
    # All are asked before the first is waited for: the stacks of one moment.
    asked = {} if spy else {rank: RankStackDump(directory, rank, pid) for rank, _, pid in ranks}
    found = []
    for rank, local_rank, pid in ranks:
        source, error = "py-spy", ""
        threads: list[dict[str, Any]] = []
        if spy is not None:
            threads, error = py_spy_stacks(spy, pid)
        if not threads:  # py-spy may not be allowed to look
            own, why = (asked.get(rank) or RankStackDump(directory, rank, pid)).answer()
            if own or spy is None:
                source, threads, error = "faulthandler", own, why
        for frame in (frame for thread in threads for frame in thread["frames"]):
            frame["file"], frame["function"] = masked(frame["file"]), masked(frame["function"])
        entry = {"rank": rank, "local_rank": local_rank, "pid": pid, "source": source}
        found.append({**entry, "error": error or None, "threads": threads})
    return found


class RankStackDump:
    """Stacks of one rank, which gets the signal when this is made and appends them to its file."""

    def __init__(self, directory: str, rank: int, pid: int) -> None:
        self.path = os.path.join(directory, f"stacks-{rank}.txt")
        # To one without a handler, the signal would be the end.
        self.pid = next((p for p in (pid, *descendants(pid)) if _has_signal(f"/proc/{p}/status", "SigCgt")), 0)
        if not os.path.exists(self.path):
            self.pid = 0
        if not self.pid:  # none that could answer
            return
        self.start = os.path.getsize(self.path)
        self.deaf = stack_signal_state(self.pid)[1]
        self.until = time.monotonic() + ANSWER_S
        signal_process(self.pid, number())

    def answer(self) -> tuple[list[dict[str, Any]], str]:
        """Return what it writes until it writes no more, or the reason why there is nothing."""
        if not self.pid:
            return [], "its program is no Python that was started with orc's start-up hook"
        while time.monotonic() < self.until:
            if os.path.getsize(self.path) > self.start and not self.is_writing():
                break
            if not process_start(self.pid):
                return [], "it ended while it was asked"
            time.sleep(0.005)
        with open(self.path, encoding="utf-8", errors="replace") as file:
            file.seek(self.start)
            threads = parse(file.read())
        os.truncate(self.path, 0)  # what is in it has been told; it is opened to append
        return threads, "" if threads else f"it did not answer within {ANSWER_S:g} s"

    def is_writing(self) -> bool:
        """Return whether the signal waits for a thread or is being handled: in that thread it is blocked meanwhile.

        Not by how long nothing was written: on a busy machine a rank may rest between two lines.
        """
        pending, blocked = stack_signal_state(self.pid)
        return pending or bool(blocked - self.deaf)


def stack_signal_state(pid: int) -> tuple[bool, set[str]]:
    """Return whether `number` is pending in a process, and which of its threads block it."""
    tasks = f"/proc/{pid}/task"
    try:
        threads = os.listdir(tasks)
    except OSError:  # it has ended
        return False, set()
    pending = any(_has_signal(f"{tasks}/{thread}/status", "SigPnd", "ShdPnd") for thread in threads)
    return pending, {thread for thread in threads if _has_signal(f"{tasks}/{thread}/status", "SigBlk")}


def _has_signal(status: str, *names: str) -> bool:
    """Return whether `number` is in one of these sets of a process or thread."""
    try:
        with open(status, encoding="ascii", errors="replace") as file:
            for line in file:
                name, _, value = line.partition(":")
                if name in names and int(value, 16) >> (number() - 1) & 1:
                    return True
    except (OSError, ValueError):
        pass
    return False


def parse(text: str) -> list[dict[str, Any]]:
    """Return the threads of `faulthandler`'s output: its newest thread first, the main thread last."""
    threads: list[dict[str, Any]] = []
    for line in text.splitlines():
        thread, frame = _THREAD.match(line), _FRAME.match(line)
        if thread:
            threads.append({"name": (thread["name"] or "").strip(), "main": False, "frames": []})
        elif frame and threads:
            place = int(frame["line"]) if frame["line"].isdigit() else None
            threads[-1]["frames"].append({"file": frame["file"], "line": place, "function": frame["function"]})
    if threads:
        threads[-1]["main"] = True
    return threads


def py_spy_stacks(spy: str, pid: int) -> tuple[list[dict[str, Any]], str]:
    """Return the threads of a process as py-spy sees them."""
    import subprocess

    try:
        done = subprocess.run(
            [spy, "dump", "--json", "--pid", str(pid)], capture_output=True, timeout=SPY_S, check=False
        )
        answer = json.loads(done.stdout) if done.returncode == 0 else None
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:
        return [], f"py-spy: {error}"
    if not answer:
        said = done.stderr.decode(errors="replace").strip().splitlines()
        return [], f"py-spy: {said[-1] if said else f'exit status {done.returncode}'}"
    threads = []
    for thread in answer:
        frames = [
            {"file": str(f.get("filename")), "line": f.get("line") or None, "function": str(f.get("name"))}
            for f in thread.get("frames") or ()
        ]
        name = str(thread.get("thread_name") or "")
        threads.append({"name": name, "main": name == "MainThread", "frames": frames})
    return threads, ""


# --- the side that asks ----------------------------------------------------------------------------------------------


def main(arguments: Sequence[str]) -> int:
    """Request stacks, wait, print one JSON object: ``{"id", "answers", "missing"}``."""
    directory, *rest = arguments
    options = dict(zip(rest[::2], rest[1::2]))
    config = load_config(os.path.join(directory, "agent.json"))
    make_private()
    request = f"{time.time_ns()}-{os.getpid()}"
    ask(directory, request)
    nodes = expected(config, directory)
    deadline = time.monotonic() + float(options.get("--timeout", TIMEOUT_S))
    answers: dict[int, dict[str, Any]] = {}
    while len(answers) < len(nodes) and time.monotonic() < deadline:
        time.sleep(0.02)
        for node in nodes:
            found = read_json(os.path.join(directory, "stacks", f"{request}.node-{node}.json"))
            if found is not None:
                answers[node] = found
    missing = [node for node in nodes if node not in answers]
    print(json.dumps({"id": request, "answers": [answers[n] for n in sorted(answers)], "missing": missing}))
    sys.stdout.flush()
    return 0


def expected(config: AgentConfig, directory: str) -> list[int]:
    """Return the nodes whose answers get here and that have not ended: on node 0 and on shared files those of all."""
    nodes = list(range(config.nnodes))
    if config.link:
        own = [node for node in nodes if os.path.exists(os.path.join(directory, f"node-{node}", "pids.json"))]
        nodes = nodes if 0 in own else own
    over = [
        node
        for node in nodes
        if any(os.path.exists(os.path.join(directory, f"node-{node}", name)) for name in ("exit.json", "lost.json"))
    ]
    return [node for node in nodes if node not in over]
