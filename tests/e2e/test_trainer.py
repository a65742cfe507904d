"""An unmodified job of Transformers' Trainer that is preempted goes on at the same sample, and has metrics."""

from __future__ import annotations

from pathlib import Path

import pytest
from command_line import Orc
from slurm_testbed import SlurmTestbed
from trainer_job import check_preempted

from orc.launchers.spec.clusters import Cluster

pytestmark = [pytest.mark.distributed, pytest.mark.slow, pytest.mark.timeout(600)]


def test_a_trainer_job_that_slurm_requeues_goes_on_at_the_same_sample(
    slurm: SlurmTestbed, slurm_cluster: Cluster, tmp_path: Path
) -> None:
    (tmp_path / "job").mkdir()
    orc = Orc(tmp_path / "job", slurm_cluster)
    spot = {"nodes": 2, "procs_per_node": 1, "options": {"slurm": {"partition": "spot"}}}
    view = check_preempted(orc, tmp_path / "undisturbed", lambda job: slurm.preempt(), **spot)
    assert [attempt["restarts"] for attempt in view["attempts"]] == [1]
    assert view["attempts"][0]["hosts"] == ["node1", "node2"]
