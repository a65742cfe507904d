"""Slurm requeues the job of a node that it cannot reach, where everything goes on: only one of both trains."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from slurm_testbed import SlurmTestbed, eventually

from orc.launchers.agent.records import read_json
from orc.launchers.backends.base import Phase

# Trains one sample after the other, and notes each with the run and the time of the machine that all nodes share.
TRAIN = """
import os, time
fd = os.open(os.environ["ORC_JOB_DIR"] + "/samples", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
run = os.environ["ORC_RESTART"]
print("up", flush=True)
for sample in range(3000 if run == "0" else 50):
    os.write(fd, f"{run} {time.monotonic()}\\n".encode())
    time.sleep(0.02)
"""
PEER_TIMEOUT_S = 4.0
Fault = Callable[[str], contextlib.AbstractContextManager[None]]


@contextlib.contextmanager
def link_cut(node: str) -> Iterator[None]:
    link = f"stb-n{node.removeprefix('node')}"
    subprocess.run(["ip", "link", "set", link, "down"], check=True)
    try:
        yield
    finally:
        subprocess.run(["ip", "link", "set", link, "up"], check=True)


@contextlib.contextmanager
def slurmd_frozen(node: str) -> Iterator[None]:
    named = (p for p in psutil.process_iter(["name", "cmdline"]) if p.info["name"] == "slurmd")
    (slurmd,) = [p for p in named if p.info["cmdline"][-1] == node]
    slurmd.suspend()
    try:
        yield
    finally:
        slurmd.resume()


@contextlib.contextmanager
def unreachable(slurm: SlurmTestbed, node: str, how: Fault) -> Iterator[None]:
    """Slurm cannot reach the node, and has noticed."""
    with how(node):
        try:
            slurm.set_down(node)  # at once, not after SlurmdTimeout
            yield
        finally:
            slurm.resume(node)


def agent_of(directory: Path) -> psutil.Process:
    """The agent of the attempt's only node, by the machine's own process number."""
    wanted = f"{directory}/agent.json"
    named = (p for p in psutil.process_iter(["cmdline", "name"]) if wanted in (p.info["cmdline"] or ()))
    (found,) = [p for p in named if p.info["name"].startswith("python") and p.parent().name().startswith("slurmstepd")]
    return found


def freeze(agent: psutil.Process, directory: Path) -> None:
    agent.suspend()


def hang(agent: psutil.Process, directory: Path) -> None:
    """The next write of the heartbeat does not return, as on a file system whose server is away."""
    pid = (read_json(str(directory / "node-0" / "lease.json")) or {})["pid"]

    def in_its_way() -> bool:
        with contextlib.suppress(FileExistsError):
            os.mkfifo(directory / "node-0" / f"heartbeat.json.{os.uname().nodename}.{pid}.tmp")
            return True
        return False

    eventually(in_its_way, every_s=0.001)


def nothing_more(agent: psutil.Process, directory: Path) -> None:
    """The agent lives and sees its files."""


@pytest.mark.slow
@pytest.mark.parametrize(("how", "besides"), [(slurmd_frozen, nothing_more), (slurmd_frozen, freeze), (link_cut, hang)])
def test_a_job_that_slurm_requeues_trains_on_one_node_alone(runs, how, besides) -> None:
    retry = {"on": ["node_failure"]}
    run = runs.start(TRAIN, cluster={"peer_timeout": PEER_TIMEOUT_S}, retry=retry)
    run.until_said("up")
    (node,) = run.poll().hosts
    agent = agent_of(run.directory)
    with unreachable(runs.slurm, node, how):
        besides(agent, run.directory)
        seen = run.ended(timeout_s=120)
    assert (seen.phase, seen.restarts) == (Phase.SUCCEEDED, 1), run.everything()
    assert node not in seen.hosts
    times: dict[str, list[float]] = {"0": [], "1": []}
    for line in (run.directory.parent / "samples").read_text().splitlines():
        restart, at = line.split()
        times[restart].append(float(at))
    assert len(times["1"]) == 50
    assert times["0"]
    assert max(times["0"]) < min(times["1"]), "the node that was cut off trained beside the other one"
    eventually(lambda: not agent.is_running() or agent.status() == psutil.STATUS_ZOMBIE)
