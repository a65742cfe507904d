"""One job file on bare hosts, started by every launcher: only the line `launcher:` differs."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from command_line import EPOCH, Orc
from hosts_testbed import HostsTestbed

WHO = """
import json, os, sys
names = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "ORC_NODE_RANK", "MINE"]
print(json.dumps([[os.environ[name] for name in names], os.uname().nodename, os.environ["MASTER_ADDR"], sys.argv[1:]]))
"""
WITHOUT_MLFLOW = Path(__file__).parents[1] / "testbed" / "without"
NASTY = ["a b", "$HOME", "it's", "%n", ""]


@pytest.fixture
def laptop(hosts: HostsTestbed, tmp_path: Path) -> Orc:
    directory = tmp_path / "job"
    directory.mkdir()
    return Orc(directory, hosts.cluster(slots=2, connect_timeout=10, peer_timeout=10))


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_digits_trains_alike_on_hosts_by_torchrun_mpirun_and_deepspeed(laptop: Orc, hosts: HostsTestbed) -> None:
    laptop.init_digits()
    file = laptop.directory / "job.yaml"
    given = file.read_text()
    trained = {}
    for launcher in ("torchrun", "mpirun", "deepspeed"):
        file.write_text(f"{given}\nlauncher: {launcher}\n")
        sets = ("resources.nodes=2", "resources.procs_per_node=1", f"env.PYTHONPATH={WITHOUT_MLFLOW}")
        words = (word for value in sets for word in ("--set", value))
        shown = laptop("submit", "job.yaml", "--cluster", "lab", *words, "--follow")
        accuracy = re.search(r"test accuracy (0\.\d+)", shown)
        assert accuracy, shown
        assert float(accuracy[1]) >= 0.9
        view = laptop.job("@last")
        (attempt,) = view["attempts"]
        assert (view["state"], view["backend"], attempt["state"]) == ("SUCCEEDED", "ssh", "SUCCEEDED")
        assert attempt["hosts"] == list(hosts.names[:2])
        assert {rank: end["exit_code"] for rank, end in attempt["exit"]["ranks"].items()} == dict.fromkeys("01", 0)
        log = laptop.log("@last", 0)
        assert EPOCH.findall(log) == [str(epoch) for epoch in range(1, 5)]
        trained[launcher] = re.findall(r"^epoch +\d+/\d+ +loss ([0-9.]+)", log, re.MULTILINE), accuracy[1]
    assert "succeeded" in laptop("logs", "@last", "--node", "1")
    assert "node1, node2" in laptop("status", "@last")
    assert not list((hosts.root("node3") / "jobs").glob("*"))
    assert trained["mpirun"] == trained["torchrun"]
    assert trained["deepspeed"] == trained["torchrun"]


@pytest.mark.parametrize(
    ("launcher", "program"),
    [
        ({"kind": "mpirun", "options": {"program": "mpirun.mpich"}}, "mpirun.mpich"),
        ({"kind": "deepspeed", "options": {"launcher": "pdsh"}}, "pdsh"),
    ],
    ids=["MPICH", "pdsh"],
)
def test_ranks_know_who_they_are_on_hosts_without_ssh_to_each_other(
    laptop: Orc, hosts: HostsTestbed, launcher: dict[str, Any], program: str
) -> None:
    if shutil.which(program) is None:
        pytest.skip(f"no {program}")
    for name in hosts.names[:2]:
        assert not (hosts.home(name) / ".ssh" / "id_ed25519").exists()
    resources = {"nodes": 2, "procs_per_node": 2}
    laptop.write_job(
        WHO, launcher=launcher, args=NASTY, resources=resources, env={"MINE": "x y", "PYTHONPATH": str(WITHOUT_MLFLOW)}
    )
    job = laptop.submit()
    laptop("wait", job)
    view = laptop.job(job)
    assert view["state"] == "SUCCEEDED", laptop("logs", job, "--node", "0")
    where = {}
    for rank in range(4):
        who, host, master, arguments = json.loads(laptop.log(job, rank))
        assert who[:4] == [str(rank), str(rank % 2), "4", "2"]
        assert who[5] == "x y"
        assert (arguments, host) == (NASTY, view["attempts"][0]["hosts"][int(who[4])])
        where[rank] = (host, master)
    assert len({master for _, master in where.values()}) == 1
    assert where[0][0] == where[1][0] != where[2][0] == where[3][0]


AGAIN = """
import os, pathlib, sys, time
seen = pathlib.Path(os.environ["ORC_JOB_DIR"], "seen")
print("again" if seen.exists() else "first", flush=True)
if seen.exists():
    sys.exit(0)
seen.touch()
while os.environ["RANK"] == "0":
    time.sleep(0.05)
sys.exit(3)
"""


def test_torchrun_starts_the_ranks_of_all_hosts_anew_when_one_fails(laptop: Orc) -> None:
    options = {"rdzv_backend": "c10d", "max_restarts": 1, "monitor_interval": 0.1}
    launcher = {"kind": "torchrun", "options": options}
    laptop.write_job(AGAIN, launcher=launcher, resources={"nodes": 2, "procs_per_node": 1})
    job = laptop.submit()
    laptop("wait", job)
    view = laptop.job(job)
    assert (view["state"], len(view["attempts"])) == ("SUCCEEDED", 1)
    said = sorted(laptop.log(job, rank) for rank in (0, 1))  # ranks may change hosts
    assert sorted("".join(said).split()) == ["again", "again", "first", "first"]


REDUCING = """
import time
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
print("world", dist.get_world_size(), flush=True)
steps = 1000 if dist.get_world_size() == 3 else 5
for _ in range(steps):
    dist.all_reduce(torch.ones(1))
    time.sleep(0.1)
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_an_elastic_job_loses_a_host_and_goes_on_within_the_attempt(laptop: Orc, hosts: HostsTestbed) -> None:
    options = {"rdzv_backend": "c10d", "max_restarts": 2, "monitor_interval": 0.1}
    launcher = {"kind": "torchrun", "options": options}
    laptop.write_job(REDUCING, launcher=launcher, resources={"nodes": "2:3", "procs_per_node": 1})
    job = laptop.submit()
    laptop.until_log(job, 0, "world 3")
    assert laptop.job(job)["attempts"][0]["hosts"] == list(hosts.names[:3])
    hosts.fault("crash", hosts.names[2])
    laptop("wait", job)
    view = laptop.job(job)
    assert (view["state"], len(view["attempts"])) == ("SUCCEEDED", 1)
    assert "world 2" in laptop.log(job, 0)


def test_a_launcher_that_a_host_does_not_have_is_named(laptop: Orc) -> None:
    launcher = {"kind": "mpirun", "options": {"program": "/opt/no/mpirun"}}
    laptop.write_job("print('never')", launcher=launcher, resources={"nodes": 2, "procs_per_node": 1})
    job = laptop.submit()
    laptop("wait", job, status=1)
    assert "/opt/no/mpirun" in laptop("logs", job, "--node", "0")
    assert yaml.safe_load(laptop("status", job, "--json", status=(0, 1)))["jobs"][0]["state"] == "FAILED"
