"""A run on one machine listens on its loopback interface alone, whoever starts it and whatever script it runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
import uuid
from pathlib import Path

import pytest

from orc.launchers.backends.base import LogSelector
from orc.launchers.spec import load_job
from orc.orchestrator.client import Client

PLAIN = """
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    rank, group = dist.get_rank(), dist.new_group()
    dist.all_reduce(torch.ones(1))
    """
TRAINED = """
    import torch
    import torch.distributed as dist
    from orc.runtime import Accelerator

    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(torch.nn.Linear(2, 2))
    accelerator.backward(model(torch.ones(1, 2)).sum())
    accelerator.save_state("saved")
    rank = accelerator.process_index
    """
TELL = """
    import json, os, socket

    def listening():
        inodes, ours = set(), os.fsencode("TEST_RUN=" + os.environ["TEST_RUN"])
        for pid in filter(str.isdigit, os.listdir("/proc")):
            try:
                with open(f"/proc/{pid}/environ", "rb") as file:
                    if ours not in file.read().split(bytes(1)):
                        continue
                inodes |= {os.readlink(f"/proc/{pid}/fd/{fd}") for fd in os.listdir(f"/proc/{pid}/fd")}
            except OSError:
                continue
        for family, path in ((socket.AF_INET, "tcp"), (socket.AF_INET6, "tcp6")):
            for line in open(f"/proc/net/{path}").readlines()[1:]:
                fields = line.split()
                if fields[3] == "0A" and f"socket:[{fields[9]}]" in inodes:
                    raw = bytes.fromhex(fields[1].partition(":")[0])
                    yield socket.inet_ntop(family, b"".join(raw[at : at + 4][::-1] for at in range(0, len(raw), 4)))

    if rank == 0:
        print("LISTENING", json.dumps(sorted(set(listening()))), flush=True)
    dist.barrier()
    dist.destroy_process_group()
    """
SCRIPTS = {"plain torch": PLAIN, "orc.runtime": TRAINED}


def write(tmp_path: Path, script: str) -> Path:
    project = tmp_path / "project"
    project.mkdir()
    (project / "train.py").write_text(textwrap.dedent(SCRIPTS[script]) + textwrap.dedent(TELL))
    return project


def addresses(text: str) -> list[str]:
    (line,) = [line for line in text.splitlines() if line.startswith("LISTENING")]
    found: list[str] = json.loads(line.partition(" ")[2])
    return found


@pytest.mark.distributed
@pytest.mark.parametrize(("launcher", "script"), [("python", "plain torch"), ("torchrun", "orc.runtime")])
def test_a_job_on_this_machine(launcher, script, tmp_path, orc_home, monkeypatch):
    scratch = tmp_path / "tmp"
    scratch.mkdir()
    monkeypatch.setenv("TMPDIR", str(scratch))
    project = write(tmp_path, script)
    job = {"name": "j", "script": "train.py", "launcher": launcher, "resources": {"procs_per_node": 2}}
    job["env"] = {"TEST_RUN": str(uuid.uuid4()), "CUDA_VISIBLE_DEVICES": ""}
    (project / "job.yaml").write_text(json.dumps(job))
    with Client() as local:
        view = local.submit(load_job(project / "job.yaml"))
        (done,) = local.wait([view.id], timeout_s=240)
        log = b"".join(chunk.data for chunk in local.read_log(view.id, LogSelector(rank=0))).decode()
    assert done.state == "SUCCEEDED", (done.reason, log)
    assert addresses(log) == ["127.0.0.1"]
    assert [path.name for path in scratch.iterdir() if path.name.startswith("torchelastic_")] == []


@pytest.mark.distributed
@pytest.mark.parametrize("script", SCRIPTS)
def test_orc_launch(script, tmp_path, orc_home):
    project = write(tmp_path, script)
    argv = [sys.executable, "-m", "orc.orchestrator.cli.main", "launch", "-n", "2", "train.py"]
    env = {**os.environ, "TEST_RUN": str(uuid.uuid4()), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(argv, cwd=project, env=env, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert addresses(done.stdout) == ["127.0.0.1"]
