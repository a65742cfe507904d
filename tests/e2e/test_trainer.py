"""An unmodified job of Transformers' Trainer that is preempted goes on at the same sample, and has metrics."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest
from command_line import Orc
from slurm_testbed import SlurmTestbed
from trainer_job import check_preempted

from orc.launchers.spec.clusters import Cluster

pytestmark = [pytest.mark.distributed, pytest.mark.slow, pytest.mark.timeout(600)]


def test_a_preempted_trainer_job_goes_on_at_the_same_sample(tmp_path: Path) -> None:
    (tmp_path / "job").mkdir()
    orc = Orc(tmp_path / "job", Cluster(name="local", kind="local"))

    def tell_one_rank(job: str) -> None:
        (pid,) = re.findall(r"^pid (\d+)$", orc.log(job, 1), re.MULTILINE)
        os.kill(int(pid), signal.SIGTERM)

    view = check_preempted(orc, tmp_path / "undisturbed", tell_one_rank, procs_per_node=2)
    assert [attempt["cause"] for attempt in view["attempts"]] == ["preempted", None]


def test_a_trainer_job_that_slurm_requeues_goes_on_at_the_same_sample(
    slurm: SlurmTestbed, slurm_cluster: Cluster, tmp_path: Path
) -> None:
    (tmp_path / "job").mkdir()
    orc = Orc(tmp_path / "job", slurm_cluster)
    spot = {"nodes": 2, "procs_per_node": 1, "options": {"slurm": {"partition": "spot"}}}
    view = check_preempted(orc, tmp_path / "undisturbed", lambda job: slurm.preempt(), **spot)
    assert [attempt["restarts"] for attempt in view["attempts"]] == [1]
    assert view["attempts"][0]["hosts"] == ["node1", "node2"]
