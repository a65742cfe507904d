"""An attempt directory made by hand, and agents started on it the way backends start them."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from polling import until

from orc.launchers.agent.processes import signal_process
from orc.launchers.agent.procfs import descendants, is_running, marked_processes
from orc.launchers.agent.records import read_json
from orc.launchers.attempts.confidential import new_link_token
from orc.launchers.snapshot.runtime_tree import runtime_files

FILES = runtime_files()
RUNTIME = [path for path in FILES if path == "__main__.py" or path.startswith("lib/orc/launchers/")]
TOKEN = new_link_token()
IDLE = "import time; print('ready', flush=True); time.sleep(600)"


def lay_out(runtime: Path) -> None:
    """The agent's part of a runtime tree."""
    for path in RUNTIME:
        (runtime / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(FILES[path], runtime / path)


_TREE = tempfile.TemporaryDirectory(prefix="orc-runtime-")
AGENT = Path(_TREE.name)  # for what needs no attempt of its own
lay_out(AGENT)


@dataclass
class Attempt:
    """One attempt on this machine, for any number of simulated nodes."""

    root: Path
    config: dict[str, Any]
    agents: list[subprocess.Popen[str]] = field(default_factory=list)

    @property
    def directory(self) -> Path:
        return Path(self.config["attempt_dir"])

    def write(self, **changes: Any) -> Attempt:
        self.config.update(changes)
        self.directory.mkdir(parents=True, exist_ok=True)
        (self.directory / "agent.json").write_text(json.dumps(self.config))
        return self

    def start(self, node: int = 0, *, owner: str = "test:1", restart: int = 0, **environ: str) -> subprocess.Popen[str]:
        """A ``node`` agent, in the background."""
        argv = [sys.executable, "-I", "-S", self.config["runtime_tree"], "node", str(self.directory / "agent.json")]
        argv += ["--owner", owner, "--node-rank", str(node), "--restart", str(restart)]
        process = subprocess.Popen(
            argv, env={**os.environ, **environ}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        self.agents.append(process)
        return process

    def started(self, ranks: int = 1, **options: Any) -> subprocess.Popen[str]:
        """A ``node`` agent whose ranks have begun."""
        process = self.start(**options)
        self.until_log("ready", *range(ranks))
        return process

    def run(self, node: int = 0, **options: Any) -> int:
        process = self.start(node, **options)
        process.communicate(timeout=60)
        return process.returncode

    def record(self, name: str, node: int = 0) -> dict[str, Any] | None:
        return read_json(str(self.directory / f"node-{node}" / name))

    def exit(self, node: int = 0) -> dict[str, Any]:
        record = self.record("exit.json", node)
        assert record is not None, f"node {node} has left no exit record"
        return record

    def log(self, rank: int = 0) -> str:
        path = self.directory / "logs" / f"rank-{rank}.log"
        return path.read_text() if path.exists() else ""

    def node_log(self, node: int = 0) -> str:
        path = self.directory / "logs" / f"node-{node}.log"
        return path.read_text() if path.exists() else ""

    def until_log(self, text: str, *ranks: int) -> None:
        for rank in ranks or (0,):
            until(
                lambda rank=rank: text in self.log(rank), what=f"{text!r} in the log of rank {rank}: {self.log(rank)!r}"
            )

    def remains(self) -> list[int]:
        return marked_processes(str(self.directory))


@pytest.fixture
def attempt(tmp_path: Path) -> Iterator[Callable[..., Attempt]]:
    """``attempt(script, nnodes=1, nproc=1, ...)`` writes everything an agent needs."""
    made: list[Attempt] = []

    def make(source: str, /, **changes: Any) -> Attempt:
        root = tmp_path / "root"
        code, runtime, job = root / "store/trees/code", root / "store/trees/runtime", root / "jobs/job-1"
        code.mkdir(parents=True)
        lay_out(runtime)
        (code / "train.py").write_text(textwrap.dedent(source))
        config: dict[str, Any] = {
            "format": 1,
            "job": "job-1",
            "name": "job",
            "attempt": 1,
            "marker": "orc-job-1-a1",
            "root": str(root),
            "job_dir": str(job),
            "attempt_dir": str(job / "a1"),
            "code_tree": str(code),
            "runtime_tree": str(runtime),
            "nnodes": 1,
            "nproc": 1,
            "python": None,
            "command": {"spawn": "ranks", "launcher": [], "program": ["{python}", "train.py"], "env": {}},
            "env": {},
            "secrets": [],
            "setup": [],
            "grace_s": 30.0,
            "deadline_s": None,
            "heartbeat_s": 0.2,
            "peer_timeout_s": 60.0,  # a busy machine is no silence; tests of silence give their own
            "preempt_exit": 75,
            "on_exit": None,
        }
        made.append(Attempt(root, config).write(**changes))
        return made[-1]

    yield make
    for one in made:
        for process in one.agents:
            if process.poll() is None:
                process.kill()
            process.communicate()
        for pid in one.remains():
            signal_process(pid, signal.SIGKILL)  # they are ending already
        shutil.rmtree(one.root, ignore_errors=True)


@dataclass
class Linked:
    """One attempt on hosts of its own roots."""

    nodes: list[Attempt]
    hub: dict = field(default_factory=dict)

    def start(
        self, node: int, address: str = "127.0.0.1", port: int | None = None, before: Sequence[str] = (), **given
    ) -> dict:
        """What ``start`` has answered; *before* goes before the agent on Python's command line."""
        job = self.nodes[node]
        link = {"token": TOKEN}
        if node:
            link["hub"] = {"port": port or self.hub["port"], "addresses": [address]}
        (job.directory / "link.json").write_text(json.dumps({**link, **given}))
        argv = [
            sys.executable,
            "-I",
            "-S",
            *before,
            job.config["runtime_tree"],
            "start",
            str(job.directory / "agent.json"),
        ]
        argv += ["--node-rank", str(node), "--owner", "ssh:orc-job-1-a1"]
        done = subprocess.run(argv, capture_output=True, text=True, timeout=60)
        answer = json.loads(done.stdout)
        assert done.returncode == {"held": 0, "busy": 78, "taken": 76, "failed": 77}[answer["state"]], done.stderr
        if node == 0 and answer["state"] == "held":
            self.hub = answer
        return answer

    def start_all(self, **options) -> None:
        for node in range(len(self.nodes)):
            answer = self.start(node, **(options if node else {}))
            assert answer["state"] == "held", answer

    def lease(self, node: int) -> dict:
        return read_json(str(self.nodes[node].directory / f"node-{node}/lease.json")) or {}

    def over(self, node: int) -> bool:
        lease = self.lease(node)
        return bool(lease) and not is_running(lease["pid"], lease["pid_start"], lease["boot_id"])

    def until_over(self, *nodes: int, timeout_s: float = 60.0) -> None:
        for node in nodes or range(len(self.nodes)):
            until(lambda node=node: self.over(node), timeout_s, f"the end of node {node}: {self.log(node)}")

    def log(self, node: int) -> str:
        return self.nodes[node].node_log(node)

    def exit(self, node: int, seen_from: int | None = None) -> dict:
        return self.nodes[node if seen_from is None else seen_from].exit(node)

    def until_ready(self, nproc: int = 1) -> None:
        for node, job in enumerate(self.nodes):
            job.until_log("ready", *range(node * nproc, (node + 1) * nproc))

    def link(self, node: int) -> dict:
        return read_json(str(self.nodes[node].directory / f"node-{node}/link.json")) or {}

    def process_of_link(self, node: int) -> int:
        """The process that keeps the records in step."""
        pid = self.lease(node)["pid"]
        return until(lambda: next((c for c in descendants(pid) if _is_link(c, pid)), None))


def _is_link(pid: int, agent: int) -> bool:
    return _cmdline(pid) == _cmdline(agent) and not _is_guard(pid)


def _is_guard(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/comm").read_text() == "orc-fence\n"
    except OSError:  # it has just ended
        return False


def guard_of(pid: int) -> int:
    """The process that ends the ranks of the agent *pid* when their term is over; 0 without one."""
    return next((p for p in descendants(pid) if _is_guard(p)), 0)


def _cmdline(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


@pytest.fixture
def linked(attempt: Callable[..., Attempt], tmp_path: Path) -> Iterator[Callable[..., Linked]]:
    """``linked(script, nnodes=2, ...)``: as many attempt directories as nodes; nothing is left running."""
    made: list[Linked] = []

    def make(script, /, nnodes=2, **changes):
        first = attempt(script, nnodes=nnodes, link=True, peer_timeout_s=changes.pop("peer_timeout_s", 60.0), **changes)
        nodes = []
        for node in range(nnodes):
            root = tmp_path / f"host-{node}"
            shutil.copytree(first.root, root)
            config = json.loads(json.dumps(first.config).replace(str(first.root), str(root)))
            nodes.append(Attempt(root, config).write())
        made.append(Linked(nodes))
        return made[-1]

    yield make
    for one in made:
        for node, job in enumerate(one.nodes):
            if one.lease(node) and not one.over(node):
                signal_process(one.lease(node)["pid"], signal.SIGKILL)
            until(lambda job=job: not job.remains(), what="the end of the ranks")
