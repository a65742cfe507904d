"""Looking into a job on a real Slurm cluster, and its environment there."""

from __future__ import annotations

import json
import sys
import tarfile
from pathlib import Path

from command_line import Orc
from slurm_testbed import SlurmTestbed, eventually

from orc.launchers.spec.clusters import Cluster

SCRIPT = """
import os, time
def ordinary():
    while True: time.sleep(0.05)
def odd():
    while True: time.sleep(0.05)
print("up", os.environ["CONDA_PREFIX"], flush=True)
(odd if os.environ["RANK"] == "1" else ordinary)()
"""


def test_nodes_of_a_slurm_job_are_entered_measured_and_asked(
    slurm: SlurmTestbed, slurm_cluster: Cluster, tmp_path: Path
) -> None:
    folder = tmp_path / "job"
    folder.mkdir()
    orc = Orc(folder, slurm_cluster)
    home = tmp_path / "prefix" / "bin"
    home.mkdir(parents=True)
    (home / "python").symlink_to(sys.executable)
    (home / "conda-unpack").write_text("")
    with tarfile.open(folder / "env.tar.gz", "w:gz") as tar:
        tar.add(home, "bin")
    orc.write_job(
        SCRIPT,
        environment={"conda": "env.tar.gz"},
        resources={"nodes": 2, "procs_per_node": 2},
        env={"GREETING": "hello there"},
    )
    job = orc.submit()
    eventually(lambda: all("up" in orc.log(job, rank) for rank in range(4)), timeout_s=120)
    made = Path(str(slurm_cluster.root)) / "envs"
    assert f"up {made}" in orc.log(job, 3)
    assert len([path for path in made.iterdir() if path.is_dir()]) == 1  # one node built, the other waited

    said = orc(
        "exec", job, "--rank", "3", "--", "sh", "-c", 'echo "$GREETING|$RANK|$SLURM_NODEID"; pwd; exit 7', status=7
    )
    assert said.splitlines() == ["hello there|3|1", str(Path(str(slurm_cluster.root)) / "jobs" / job / "work")]
    assert orc("exec", job, "--node", "1", "--", "sh", "-c", "echo $ORC_NODE_RANK $CONDA_PREFIX").startswith(
        f"1 {made}"
    )
    samples = [json.loads(line) for line in orc("top", "--once", "--json").splitlines()]
    assert [[rank["rank"] for rank in sample["ranks"]] for sample in samples] == [[0, 1], [2, 3]]
    groups = json.loads(orc("stacks", job, "--timeout", "60", "--json"))["groups"]
    assert [(group["ranks"], group["frames"][0][2]) for group in groups] == [([1], "odd"), ([0, 2, 3], "ordinary")]
    assert orc.job(job)["state"] == "RUNNING"  # nobody was disturbed
    orc("cancel", job, "--grace", "1")
    orc("wait", job, "--timeout", "120", status=3)
