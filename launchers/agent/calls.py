"""Calls: how a launcher starts something on another node of its attempt without SSH between the hosts.

`rsh` is what the launcher
runs in place of ``ssh``: it leaves a call in the attempt directory and waits for its end. `RemoteCalls` is the other
side: the agent of the node that is named runs it. Format: docs/explanation/attempt-directory.md.
"""

from __future__ import annotations

import os
import signal
import sys
import time

from orc.launchers.agent.config import load_config
from orc.launchers.agent.errors import LaunchFailure, log_stderr
from orc.launchers.agent.processes import (
    agent_argv,
    decode_wait_status,
    make_private,
    shell_exit_status,
    signal_group,
    spawn,
    users_umask,
)
from orc.launchers.agent.procfs import holder_runs, identity, process_start
from orc.launchers.agent.records import read_json, write_json
from orc.launchers.agent.shim import node_of
from orc.launchers.agent.state import FAILURE_GRACE_S, FAST_POLL_S, POLL_S, NodeState

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any

    from orc.launchers.agent.config import AgentConfig


EXIT_NO_CONNECTION = 255  # what ssh exits with when it could not do it
HURRY_FOR_S = 30.0
OUTPUT_BYTES = 8192  # of what a call has printed, for those who ask a host something
NAMES = ("ssh", "rsh")
# Options of ssh and rsh that take an argument; the others stand alone. None of them means anything here.
_WITH_ARGUMENT = "BbcDEeFIiJLlmOoPpQRSWw"


# --- who is asked ----------------------------------------------------------------------------------------------------


def resolve_node(host: str, config: AgentConfig, attempt_dir: str) -> int | None:
    """Return the node that a launcher means by *host*, any of its names or addresses."""
    nnodes = config.nnodes
    leases = [read_json(os.path.join(attempt_dir, f"node-{node}", "lease.json")) or {} for node in range(nnodes)]
    machines = [str(lease.get("host") or "") for lease in leases]
    known: dict[str, int] = {}
    for node in range(nnodes):
        known[f"node-{node}"] = node
    if len(set(machines)) == nnodes:
        known.update({name: node for node, name in enumerate(machines)})
    for node, entry in enumerate(config.hosts):
        for key in ("address", "name"):
            if entry.get(key):
                known[str(entry[key])] = node
    return known.get(host, known.get(host.partition(".")[0]))


# --- the side that asks ----------------------------------------------------------------------------------------------


def parse(arguments: Sequence[str]) -> tuple[str, str]:
    """Return ``(host, shell text)`` of a command line for ssh or rsh. Raises `LaunchFailure`."""
    host = ""
    rest = list(arguments)
    while rest:
        word = rest.pop(0)
        if word == "--":
            continue
        if word.startswith("-") and len(word) > 1:
            for at, letter in enumerate(word[1:], 2):
                if letter in _WITH_ARGUMENT:
                    if at == len(word) and rest:
                        rest.pop(0)
                    break
        elif not host:
            host = word.rpartition("@")[2]
        else:
            rest.insert(0, word)
            break
    if not host or not rest:
        raise LaunchFailure("usage: rsh [options] [user@]host command ...: what it runs, it runs without a terminal")
    return host, " ".join(rest)


def rsh(arguments: Sequence[str]) -> int:
    """Have a command run on another node of this attempt; returns its exit status, 255 when it could not be done."""
    attempt_dir = os.environ.get("ORC_ATTEMPT_DIR")
    if attempt_dir is None:
        raise LaunchFailure("rsh runs below a launcher of an orc agent: ORC_ATTEMPT_DIR must be set")
    host, text = parse(arguments)
    config = load_config(os.path.join(attempt_dir, "agent.json"))
    node = resolve_node(host, config, attempt_dir)
    if node is None:
        names = ", ".join(str(entry["name"]) for entry in config.hosts) or "node-0, node-1 and so on"
        log_stderr(f"{host} is no host of this attempt; they are {names}")
        return EXIT_NO_CONNECTION
    own = node_of(attempt_dir)
    me = identity()
    call = {
        "id": f"{own[0] if own else 0}-{me['pid']}-{time.time_ns()}",
        "node": node,
        "from": own[0] if own else int(os.environ.get("ORC_NODE_RANK") or 0),
        "restart": int(os.environ.get("ORC_RESTART") or 0),
        "command": text,
        "caller": {name: me[name] for name in ("pid", "pid_start", "boot_id")},
        "at": me["at"],
    }
    make_private()
    os.makedirs(os.path.join(attempt_dir, "calls"), mode=0o700, exist_ok=True)
    base = os.path.join(attempt_dir, "calls", str(call["id"]))
    signalled: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda number, _: signalled.append(number))
    write_json(f"{base}.json", call, durable=False)
    return _wait(base, attempt_dir, call, signalled)


def _wait(base: str, attempt_dir: str, call: Mapping[str, Any], signalled: Sequence[int]) -> int:
    ended = os.path.join(attempt_dir, f"node-{call['node']}", "exit.json")
    patience = None
    pause = 0.005
    while True:
        done = read_json(f"{base}.done.json")
        if done is not None:
            sys.stdout.write(str(done.get("output") or ""))
            sys.stdout.flush()
            return int(done["status"])
        now = time.monotonic()
        if signalled and patience is None:
            write_json(f"{base}.end.json", {"id": call["id"], "node": call["node"]}, durable=False)
            patience = now + FAILURE_GRACE_S + 2.0
        over = read_json(ended)
        if over is not None and int(over.get("restart", 0)) == call["restart"] and patience is None:
            patience = now + 1.0  # its last word may be on the way
        if patience is not None and now > patience:
            return EXIT_NO_CONNECTION
        time.sleep(pause)
        pause = min(pause * 1.2, 0.1)


# --- the side that is asked ------------------------------------------------------------------------------------------


def install(directory: str, runtime_tree: str) -> str:
    """Put the look-alikes of ``ssh`` and ``rsh`` into *directory*, which goes first on a launcher's PATH."""
    import shlex

    os.makedirs(directory, mode=0o700, exist_ok=True)
    words = " ".join(shlex.quote(word) for word in (*agent_argv(runtime_tree), "rsh"))
    for name in NAMES:
        path = os.path.join(directory, name)
        with open(path, "w", encoding="utf-8") as file:
            file.write(f'#!/bin/sh\nexec {words} "$@"\n')
        os.chmod(path, 0o700)
    return directory


class RemoteCalls:
    """Calls of other nodes to this one, for as long as its agent runs."""

    def __init__(self, node: NodeState, env: Mapping[str, str]) -> None:
        self.node = node
        self.env = dict(env)
        self.directory = os.path.join(node.attempt_dir, "calls")
        self.asked: dict[str, dict[str, Any]] = {}  # what this node has asked others, while its caller lives
        self.begun: dict[str, tuple[dict[str, Any], int]] = {}  # what was started, and where its output begins
        self.next_callers = 0.0
        self.running: dict[str, int] = {}  # id -> pid
        self.kill_at: dict[str, float] = {}  # calls that are being ended -> when they are killed (monotonic)
        self.settled: set[str] = set()  # ids that need no further look
        self.failed: dict[str, Any] | None = None  # the last one that failed while no rank had been started
        self.since = time.monotonic()

    def pace(self) -> float:
        """Seconds until the next look: launchers call at their start, one node after the other."""
        return FAST_POLL_S if time.monotonic() - self.since < HURRY_FOR_S else POLL_S

    def poll(self) -> None:
        """Start new calls, end those to be ended, report those that have ended."""
        for call, pid in list(self.running.items()):
            if pid in self.node.ended:
                del self.running[call]
                self.done(call, self.node.ended[pid])
        try:
            names = set(os.listdir(self.directory))
        except FileNotFoundError:
            return
        for name in sorted(names):
            call = name[: -len(".json")]
            if not name.endswith(".json") or "." in call or call in self.settled:
                continue
            if f"{call}.done.json" in names:
                self.settled.add(call)
                self.asked.pop(call, None)
                continue
            if call not in self.begun and call not in self.asked:
                self.consider(call)
            if f"{call}.end.json" in names and call in self.running:
                self.end(call)
        now = time.monotonic()
        if now >= self.next_callers:
            self.next_callers = now + POLL_S
            self.end_abandoned_calls()

    def consider(self, call: str) -> None:
        """Take note of a new call, and start it when it is for this node."""
        record = read_json(os.path.join(self.directory, f"{call}.json"))
        if record is None:
            return
        if int(record.get("restart", 0)) != self.node.restart:
            self.settled.add(call)
            return
        if record["from"] == self.node.node:
            self.asked[call] = record
        if record["node"] == self.node.node:
            if self.node.stop is None:
                self.start(call, record)
        elif record["from"] != self.node.node:
            self.settled.add(call)  # between two others

    def end_abandoned_calls(self) -> None:
        """End calls whose caller is gone."""
        for call, record in list(self.asked.items()):
            if not holder_runs(record.get("caller") or {}):
                del self.asked[call]
                path = os.path.join(self.directory, f"{call}.end.json")
                try:
                    write_json(path, {"id": call, "node": record["node"]}, durable=False)
                except OSError as error:
                    self.node.log(f"cannot write {path}: {error}")

    def start(self, call: str, record: dict[str, Any]) -> None:
        """Run it as a session of its own, with the job's environment and directory."""
        node = self.node
        node.log(f"node {record['from']} calls: {node.masked(str(record['command']))}"[:2000])
        self.begun[call] = (record, os.fstat(node.log_fd).st_size)
        argv = ["/bin/sh", "-c", str(record["command"])]
        null = os.open(os.devnull, os.O_RDONLY)
        try:
            pid = spawn(argv, self.env, cwd=node.work, stdin=null, output=node.log_fd, umask=users_umask())
        except LaunchFailure as error:
            node.log(str(error))
            self.done(call, 127 << 8)
            return
        finally:
            os.close(null)
        node.sessions[pid] = process_start(pid) or ""
        node.record_pids()
        self.running[call] = pid

    def end(self, call: str) -> None:
        """End a call whose caller is gone or was cancelled."""
        now = time.monotonic()
        pid = self.running[call]
        if call not in self.kill_at:
            self.kill_at[call] = now + FAILURE_GRACE_S
            signal_group(pid, signal.SIGTERM)
        elif now > self.kill_at[call]:
            signal_group(pid, signal.SIGKILL)

    def done(self, call: str, status: int) -> None:
        """Report the exit status to the caller."""
        record, start = self.begun[call]
        code = shell_exit_status(*decode_wait_status(status))
        answer = {
            "id": call,
            "node": record["node"],
            "from": record["from"],
            "status": code,
            "output": self.output(start),
            "at": time.time(),
        }
        path = os.path.join(self.directory, f"{call}.done.json")
        try:
            write_json(path, answer, durable=False)
        except OSError as error:
            self.node.log(f"cannot write {path}: {error}")
        if code and not self.node.shim_records(running=True):
            self.failed = {**answer, "since": time.monotonic()}

    def failure(self, patience_s: float) -> dict[str, Any] | None:
        """Return a failure record, when what should have started this node's ranks has failed *patience_s* ago.

        Launchers may wait for ever for what did not start on another node; they have had their time to notice.
        """
        call = self.failed
        if call is None or self.running or time.monotonic() - call["since"] < patience_s:
            return None
        if self.node.shim_records(running=True):
            return None
        return {
            "rank": None,
            "local_rank": None,
            "node": self.node.node,
            "host": self.node.me["host"],
            "exit_code": call["status"],
            "signal": None,
            "at": call["at"],
            "log_tail": call["output"],
            "stall": "",
        }

    def output(self, start: int) -> str:
        """Return what this node's log has got since byte *start*, without the agent's own lines: the first 8 KiB."""
        path = os.path.join(self.node.logs, f"node-{self.node.node}.log")
        secrets = list(self.node.secrets.values())
        from orc.launchers.agent.masking import longest, masked

        try:
            with open(path, "rb") as file:
                file.seek(start)
                data, beyond = file.read(OUTPUT_BYTES), file.read(longest(secrets) if secrets else 0)
        except OSError:
            return ""
        text = data.decode("utf-8", "replace")
        if secrets:
            text = masked(text + beyond.decode("utf-8", "replace"), secrets, 0, len(text))
        return "".join(line for line in text.splitlines(keepends=True) if not line.startswith("[orc "))
