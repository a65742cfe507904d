"""The flags that are rendered for torchrun, given to the torchrun that is installed."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from orc.launchers.agent.network import Port
from orc.launchers.commands import build_command
from orc.launchers.spec import JobSpec

SCRIPT = """
import os
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
total = torch.ones(1) * dist.get_rank()
dist.all_reduce(total)
names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "GROUP_RANK", "MASTER_PORT", "TORCHELASTIC_RUN_ID")
# One write per rank: several ranks share the pipe.
os.write(1, (" ".join([*(os.environ[name] for name in names), str(int(total))]) + "\\n").encode())
dist.barrier()
dist.destroy_process_group()
"""


@pytest.fixture
def port() -> Iterator[int]:
    """As the agents choose it: nobody else's until the test is over."""
    held = Port()
    yield held.number
    held.close()


def _start(tmp_path: Path, job: JobSpec, node: int, port: int) -> subprocess.Popen[str]:
    """What the agent of *node* starts, without the shim around each rank."""
    facts = {
        "python": sys.executable,
        "nnodes": job.resources.min_nodes,
        "node_rank": node,
        "nproc": job.resources.nproc,
    }
    facts |= {"master_addr": "127.0.0.1", "master_port": port, "rdzv_id": "attempt-7", "attempt_dir": tmp_path}
    command = build_command(job)
    argv = [word.format(**facts) for word in command.launcher]
    argv += [sys.executable, *command.program[1:]]
    env = {**os.environ, **command.env, "GLOO_SOCKET_IFNAME": "lo", "PYTHONUNBUFFERED": "1"}
    return subprocess.Popen(argv, cwd=tmp_path, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.distributed
@pytest.mark.parametrize(("nodes", "local"), [(1, 2), (2, 1)])
def test_ranks_meet_at_the_given_port(nodes: int, local: int, port: int, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    job = JobSpec.model_validate(
        {
            "name": "x",
            "script": "train.py",
            "resources": {"nodes": nodes, "procs_per_node": local},
            "launcher": {"kind": "torchrun", "options": {"monitor_interval": 0.1, "rdzv_conf": {"timeout": 60}}},
        }
    )
    launchers = [_start(tmp_path, job, node, port) for node in range(nodes)]
    lines: list[str] = []
    try:
        for launcher in launchers:
            output, errors = launcher.communicate(timeout=150)
            assert launcher.returncode == 0, errors
            lines += output.splitlines()
    finally:
        for launcher in launchers:
            launcher.kill()
            launcher.wait()
    assert sorted(lines) == [f"{rank} {rank % local} 2 {rank // local} {port} attempt-7 1" for rank in range(2)]


@pytest.mark.distributed
def test_a_failing_rank_ends_the_launcher_without_a_restart(port: int, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        """
import os, sys, time
open("starts", "a").write("x")
if os.environ["RANK"] == "1":
    while os.path.getsize("starts") < 2:  # the launcher would end the other one
        time.sleep(0.02)
    sys.exit(3)
"""
    )
    job = JobSpec.model_validate({"name": "x", "script": "train.py", "resources": {"procs_per_node": 2}})
    launcher = _start(tmp_path, job, 0, port)
    _, errors = launcher.communicate(timeout=150)
    assert launcher.returncode == 1
    assert "exitcode  : 3" in errors
    assert (tmp_path / "starts").read_text() == "xx"
