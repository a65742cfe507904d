"""A training that is longer than its time limit: it saves in time, and the next attempt does the rest."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from orc.launchers.spec import load_job
from orc.launchers.spec.clusters import Cluster
from orc.orchestrator.client import Client

SLURM = pytest.param("testbed", marks=[pytest.mark.slurm, pytest.mark.xdist_group("slurm")])

# Every attempt does one of two parts; only the last one ends by itself.
SCRIPT = """
import os, signal, sys, time
state = os.path.join(os.environ["ORC_JOB_DIR"], "part-" + os.environ["RANK"])
part = int(open(state).read()) if os.path.exists(state) else 0
print("attempt", os.environ["ORC_ATTEMPT"], "begins part", part, flush=True)
def save(*_):
    with open(state, "w") as file:
        file.write(str(part + 1))
    print("saved", flush=True)
    os._exit(75)
signal.signal(signal.SIGTERM, save)
while part < 1:
    time.sleep(0.05)
"""


@pytest.fixture
def client(orc_home: Path, request: pytest.FixtureRequest) -> Iterator[Client]:
    entries: dict[str, Any] = {}
    if request.node.callspec.params["where"] == "testbed":
        cluster: Cluster = request.getfixturevalue("slurm_cluster")
        entries["testbed"] = {k: v for k, v in cluster.model_dump(mode="json").items() if k != "name" and v}
    clusters = orc_home / "config" / "clusters.yaml"
    clusters.parent.mkdir(parents=True, exist_ok=True)
    clusters.write_text(yaml.safe_dump(entries))
    with Client() as made:
        yield made


@pytest.mark.parametrize("where", [SLURM])
def test_what_is_left_at_the_time_limit_is_done_by_the_next_attempt(client: Client, where: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    job = {
        "name": "long",
        "script": "train.py",
        "launcher": "python",
        "cluster": where,
        "grace": 4,
        # The agents end the ranks after half of it: the time that these have to get as far as to hear that.
        "resources": {"nodes": 2, "time": 40},
        "retry": {"on": ["timeout"], "max_attempts": 1, "backoff": 0},
        "workdir": {"exclude": ["root"]},
    }
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(job))
    view = client.submit(load_job(tmp_path / "job.yaml"))
    (view,) = client.wait([view.id], timeout_s=300)
    assert view.state == "SUCCEEDED", view
    assert [attempt.cause for attempt in view.attempts] == ["timeout", None]
    logs = []
    for attempt in view.attempts:
        (rank, *_) = client.log_selectors(view.id, attempt.number)
        logs.append(b"".join(chunk.data for chunk in client.read_log(view.id, rank, attempt.number)).decode())
    assert logs == [
        "attempt 1 begins part 0\nsaved\n",
        "attempt 2 begins part 1\n",
    ]
    assert "saved at the time limit (1)" in str([event.data for event in client.events(view.id)])
