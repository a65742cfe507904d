"""A node that failed a job is left out when the job is tried again, as far as Slurm has others."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from slurm_testbed import SlurmTestbed, eventually

from orc.launchers.spec import load_job
from orc.launchers.spec.clusters import Cluster
from orc.orchestrator.client import Client
from orc.orchestrator.views import JobView

# The agent of the second node is killed in the first attempt.
SCRIPT = """\
import json, os, signal, time
if os.environ["ORC_ATTEMPT"] == "1":
    if os.environ["ORC_NODE_RANK"] == "1":
        with open(os.path.join(os.environ["ORC_ATTEMPT_DIR"], "node-1", "pids.json")) as file:
            os.kill(json.load(file)["agent"]["pid"], signal.SIGKILL)
    while True:
        time.sleep(0.1)
"""


@pytest.fixture
def client(orc_home: Path, slurm_cluster: Cluster) -> Iterator[Client]:
    clusters = orc_home / "config" / "clusters.yaml"
    clusters.parent.mkdir(parents=True)
    described = {key: value for key, value in slurm_cluster.model_dump(mode="json").items() if key != "name" and value}
    clusters.write_text(yaml.safe_dump({"testbed": described}))
    with Client() as made:
        yield made


@pytest.fixture
def retried(client: Client, tmp_path: Path):
    """Runs the script on two nodes until its second attempt is at Slurm; the job."""

    def run(**options: object) -> JobView:
        (tmp_path / "train.py").write_text(SCRIPT)
        job = {
            "name": "t",
            "script": "train.py",
            "launcher": "python",
            "cluster": "testbed",
            "grace": 1,
            "resources": {"nodes": 2, "options": {"slurm": {"requeue": False, **options}}},
            "retry": {"on": ["node_failure"], "max_attempts": 2, "backoff": 0},
            "workdir": {"exclude": ["root"]},
        }
        (tmp_path / "job.yaml").write_text(yaml.safe_dump(job))
        job_id = client.submit(load_job(tmp_path / "job.yaml")).id

        def sent() -> JobView | None:
            client.refresh([job_id])
            view = client.job(job_id)
            assert not view.ended, view
            return view if len(view.attempts) == 2 and view.attempts[1].native_id else None

        return eventually(sent, timeout_s=90)

    return run


@pytest.mark.slow
def test_the_next_attempt_runs_on_other_nodes(client: Client, slurm: SlurmTestbed, retried) -> None:
    view = retried()
    first, second = view.attempts
    assert (first.cause, first.failed_hosts) == ("node_failure", first.hosts[1:])
    assert f"ExcNodeList={first.failed_hosts[0]}" in slurm.run("scontrol", "show", "job", str(second.native_id))
    (ended,) = client.wait([view.id], timeout_s=90)
    assert ended.state == "SUCCEEDED"
    assert first.failed_hosts[0] not in ended.attempts[1].hosts


@pytest.mark.slow
def test_where_there_are_no_other_nodes_the_same_are_used_again(client: Client, slurm: SlurmTestbed, retried) -> None:
    view = retried(nodelist="node1,node2")
    assert view.attempts[0].failed_hosts
    (ended,) = client.wait([view.id], timeout_s=90)
    assert ended.state == "SUCCEEDED"
    assert set(ended.attempts[1].hosts) == {"node1", "node2"}
    assert "released" in [event.kind for event in client.events(view.id)]
