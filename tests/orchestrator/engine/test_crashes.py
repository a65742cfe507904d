"""``kill -9`` of real submissions and passes: never two runs, and never none once a job is durable."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
import yaml
from hosts_testbed import eventually

from orc.orchestrator.client import Client
from orc.orchestrator.engine import steps

BEFORE_DURABLE = ("snapshot-taken", "secrets-kept")
SUBMIT = [sys.executable, "-m", "orc.orchestrator.cli.main", "submit"]


class Hurried:
    """The real time, and a skip over what would be waited for."""

    def __init__(self) -> None:
        self.skipped = 0.0

    def __call__(self) -> float:
        return time.time() + self.skipped

    def sleep(self, seconds: float) -> None:
        self.skipped += seconds
        time.sleep(0.02)


@pytest.fixture
def runs(tmp_path) -> Path:
    """The job appends a line to this file each time it runs."""
    return tmp_path / "runs"


@pytest.fixture
def job_yaml(tmp_path, runs) -> Path:
    directory = tmp_path / "project"
    directory.mkdir()
    path = directory / "job.yaml"
    path.write_text(
        f"name: once\ncommand: [/bin/sh, -c, 'echo $ORC_JOB_ID $ORC_ATTEMPT >> {runs}']\nlauncher: python\n"
        "secrets: [TOKEN]\n"
    )
    return path


def submit(job_yaml: Path, **env: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [*SUBMIT, str(job_yaml)],
        env={**os.environ, "TOKEN": "hunter2", **env},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def finish_all(*, hurries: bool = True) -> list[str]:
    """Passes until every job of the ledger has ended; the ids of those that succeeded."""
    hurried = Hurried()
    with Client(clock=hurried, sleep=hurried.sleep) if hurries else Client() as client:
        ids = [row.id for row in client.jobs(limit=None)]
        ended = client.wait(ids, timeout_s=100_000)
    assert {view.state for view in ended} <= {"SUCCEEDED"}, [(view.state, view.reason) for view in ended]
    return ids


def lines(runs: Path) -> list[str]:
    return sorted(runs.read_text().splitlines()) if runs.exists() else []


@pytest.mark.parametrize("point", steps.FAULT_POINTS)
def test_a_submission_killed_at_any_point_runs_exactly_once_or_was_never_promised(point, job_yaml, runs, orc_home):
    killed = submit(job_yaml, **{steps.FAULT_POINT: point})
    assert killed.wait(120) == -signal.SIGKILL
    ids = finish_all()
    if point in BEFORE_DURABLE:
        assert (ids, lines(runs)) == ([], [])
    else:
        assert lines(runs) == [f"{ids[0]} 1"]
        # Whoever records the end removes them next: that may be the pass that the agent has started.
        eventually(lambda: not list((orc_home / "state" / "job-secrets").iterdir()))


SLURM = pytest.param("slurm", marks=[pytest.mark.slurm, pytest.mark.xdist_group("slurm")])


@pytest.fixture(params=["local", SLURM])
def cluster(request, orc_home) -> str:
    """The name of a cluster that is real."""
    if request.param == "local":
        return "local"
    found = request.getfixturevalue("slurm_cluster").model_dump(mode="json")
    clusters = orc_home / "config" / "clusters.yaml"
    clusters.parent.mkdir(parents=True)
    clusters.write_text(yaml.safe_dump({"testbed": {k: v for k, v in found.items() if k != "name" and v}}))
    return "testbed"


PASSES = """
from orc.orchestrator.client import Client
with Client() as client:
    while True:
        client.refresh()
"""


def test_what_is_killed_at_random_moments_runs_every_attempt_once(cluster, job_yaml, runs, tmp_path):
    """A submission and two passes at once, of which all are killed; every first attempt fails."""
    job = yaml.safe_load(job_yaml.read_text())
    script = f"echo $ORC_JOB_ID $ORC_ATTEMPT >> {runs}; test $ORC_ATTEMPT -gt 1"
    retry = {"max_attempts": 2, "on": ["crash"], "backoff": 0}
    job_yaml.write_text(
        yaml.safe_dump({**job, "cluster": cluster, "command": ["/bin/sh", "-c", script], "retry": retry})
    )
    chance = random.Random(20)
    killed = Counter()
    assert submit(job_yaml).wait(120) == 0
    for _ in range(8 if cluster == "local" else 4):
        passes = [
            subprocess.Popen([sys.executable, "-c", PASSES], stderr=subprocess.DEVNULL, start_new_session=True)
            for _ in range(2)
        ]
        submission = submit(job_yaml)
        time.sleep(chance.uniform(0.2, 1.5))
        for process in [submission, *passes]:
            process.kill()
            killed[process is submission] += process.wait(120) == -signal.SIGKILL
    ids = finish_all(hurries=cluster == "local")  # a cut-off message to Slurm may still arrive
    assert killed[False] > 0  # passes never end by themselves; a submission may have been faster
    assert ids
    assert lines(runs) == sorted(f"{job_id} {number}" for job_id in ids for number in (1, 2))
