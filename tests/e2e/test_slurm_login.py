"""A laptop and a Slurm cluster that share nothing but an SSH connection, from the command line."""

from __future__ import annotations

import json
from pathlib import Path

from command_line import Orc
from slurm_testbed import SlurmTestbed, eventually

from orc.launchers.spec.clusters import Cluster

SCRIPT = """
import os, time
def ordinary():
    while not os.path.exists(os.path.join(os.environ["ORC_JOB_DIR"], "go")): time.sleep(0.05)
def odd():
    while not os.path.exists(os.path.join(os.environ["ORC_JOB_DIR"], "go")): time.sleep(0.05)
print("up", flush=True)
(odd if os.environ["RANK"] == "1" else ordinary)()
"""


def test_a_job_is_submitted_looked_into_and_ended_from_a_laptop(
    slurm: SlurmTestbed, login_cluster: Cluster, tmp_path: Path
) -> None:
    folder = tmp_path / "job"
    folder.mkdir()
    orc = Orc(folder, login_cluster)
    orc.write_job(SCRIPT, resources={"nodes": 2, "procs_per_node": 2}, env={"GREETING": "hello there"})
    (synced,) = json.loads(orc("sync", "job.yaml", "--cluster", "far", "--json"))["hosts"]
    assert (synced["host"], synced["error"]) == ("login", None)
    job = orc.submit()
    eventually(lambda: all("up" in orc.log(job, rank) for rank in range(4)), timeout_s=120)
    root = Path(str(login_cluster.root))
    assert (root / "jobs" / job / "a1" / "logs" / "rank-3.log").read_text() == "up\n"

    said = orc(
        "exec", job, "--rank", "3", "--", "sh", "-c", 'echo "$GREETING|$RANK|$SLURM_NODEID"; pwd; exit 7', status=7
    )
    assert said.splitlines() == ["hello there|3|1", str(root / "jobs" / job / "work")]
    samples = [json.loads(line) for line in orc("top", "--once", "--json").splitlines()]
    assert [[rank["rank"] for rank in sample["ranks"]] for sample in samples] == [[0, 1], [2, 3]]
    groups = json.loads(orc("stacks", job, "--timeout", "60", "--json"))["groups"]
    assert [(group["ranks"], group["frames"][0][2]) for group in groups] == [([1], "odd"), ([0, 2, 3], "ordinary")]

    (root / "jobs" / job / "go").touch()
    assert orc.until(job, lambda view: view["state"] == "SUCCEEDED")["attempts"]
    assert json.loads(orc("gc", "--cluster", "far", "--json")) is not None
