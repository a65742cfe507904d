"""A Slurm cluster is discovered, written down and looked at, on its login node and over SSH."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import yaml
from command_line import Orc
from login_node import LoginNode
from slurm_testbed import SlurmTestbed, eventually

from orc.launchers.spec.clusters import Cluster


@pytest.fixture
def orc(slurm_cluster: Cluster, tmp_path: Path) -> Orc:
    folder = tmp_path / "job"
    folder.mkdir()
    return Orc(folder, slurm_cluster)


def clusters_file(orc: Orc) -> Path:
    return Path(orc.env["ORC_CONFIG_DIR"]) / "clusters.yaml"


def test_a_discovered_cluster_can_be_used_at_once(slurm: SlurmTestbed, login_node: LoginNode, orc: Orc) -> None:
    ways = ("--login", "login", "--ssh-config", str(login_node.ssh_config), "--conf", str(slurm.conf))
    file = clusters_file(orc)
    file.write_text(f"# mine\n{file.read_text()}")
    before = file.read_text()
    shown = orc("clusters", "discover", "slurm", *ways, "--name", "far")
    assert file.read_text() == before
    described = yaml.safe_load(shown)["far"]
    assert described["options"]["partition"] == "cpu"
    assert described["options"]["account"] == "research"
    assert "#   gpu: 2 nodes, 16 cores, at most 1 d 0:00:00, gpu:a100:4 per node" in shown

    assert orc("clusters", "discover", "slurm", *ways, "--name", "far", "--write") == shown
    assert file.read_text() == f"{before.rstrip()}\n\n{shown}"
    assert file.stat().st_mode & 0o777 == 0o644
    findings = json.loads(orc("clusters", "check", "far", "--json"))["findings"]
    # Which Python is the first on the login node, and whether it has torch, is this machine's affair.
    assert [f["level"] for f in findings if "has no torch" not in f["what"]] == ["info"]

    orc("clusters", "discover", "slurm", *ways, "--name", "far", "--write", status=2)
    assert file.read_text() == f"{before.rstrip()}\n\n{shown}"
    assert [path.name for path in file.parent.iterdir()] == ["clusters.yaml"]


def test_a_file_that_cannot_take_the_entry_stays_as_it_is(slurm: SlurmTestbed, orc: Orc) -> None:
    file = clusters_file(orc)
    text = '{"other": {"kind": "slurm", "root": "/x"}}\n'
    file.write_text(text)
    with orc.start("clusters", "discover", "slurm", "--conf", str(slurm.conf), "--write") as process:
        _, said = process.communicate(timeout=150)
    assert process.returncode == 2
    assert "Nothing was written" in said
    assert file.read_text() == text
    assert [path.name for path in file.parent.iterdir()] == ["clusters.yaml"]


def test_no_slurm_is_said_to_be_none(orc: Orc) -> None:
    with orc.start("clusters", "discover", "slurm", "--bin", "/nowhere") as process:
        _, said = process.communicate(timeout=150)
    assert process.returncode == 2
    assert "/nowhere/sbatch: command not found" in said


def test_the_queue_shows_partitions_and_when_our_jobs_start(slurm: SlurmTestbed, orc: Orc) -> None:
    slurm.run("sbatch", "--nodes=4", "--exclusive", "--time=30", "--output=/dev/null", "--wrap=sleep 600")
    orc.write_job("print('hi')", resources={"nodes": 2, "time": "10m"})
    job = orc.submit()

    def expected() -> dict[str, object] | None:
        (cluster,) = json.loads(orc("queue", "--json"))["clusters"]
        assert [partition["name"] for partition in cluster["partitions"]][:2] == ["cpu", "gpu"]
        assert cluster["partitions"][0]["nodes"] == 4
        (waiting,) = cluster["jobs"]
        return waiting if waiting["starts_at"] else None

    waiting = eventually(expected, timeout_s=90, every_s=1)
    assert (waiting["job"], waiting["state"], waiting["partition"], waiting["nodes"]) == (job, "PENDING", "cpu", 2)
    assert waiting["reason"] in ("Resources", "Priority")
    assert time.time() < float(str(waiting["starts_at"])) <= time.time() + 31 * 60
    lines = orc("queue", "--cluster", "testbed").splitlines()
    assert lines[0].split() == [
        "PARTITION",
        "STATE",
        "IDLE",
        "NODES",
        "IDLE",
        "CORES",
        "TIME",
        "LIMIT",
        "GRES",
    ]
    assert lines[1].split() == ["cpu*", "up", "0/4", "0/32", "1d00h", *["gpu:a100:4", "on", "2", "of", "4", "nodes"]]
    assert lines[-1].split()[:5] == [job, waiting["native_id"], "PENDING", "cpu", "2"]
    orc("cancel", job)


def test_clusters_without_a_queue_of_their_own_are_named(orc: Orc) -> None:
    with orc.start("queue", "--cluster", "local") as process:
        _, said = process.communicate(timeout=150)
    assert process.returncode == 2
    assert "clusters of kind local have no queue of their own" in said


def test_a_cluster_that_does_not_answer_does_not_hide_the_others(slurm: SlurmTestbed, orc: Orc) -> None:
    file = clusters_file(orc)
    silent = {"silent": {"kind": "slurm", "options": {"bin": "/nowhere"}}}
    file.write_text(file.read_text() + yaml.safe_dump(silent))
    found = json.loads(orc("queue", "--json", status=1))["clusters"]
    assert [cluster["cluster"] for cluster in found] == ["testbed", "silent"]
    assert "/nowhere/sinfo: command not found" in found[1]["error"]
