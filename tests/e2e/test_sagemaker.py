"""The main job, end to end through the command line: on SageMaker's API."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from command_line import EPOCH, Orc
from sagemaker_testbed import SagemakerTestbed

from orc.launchers.spec.clusters import Cluster

pytestmark = [pytest.mark.xdist_group("sagemaker")]

SMALL = ("--set", "launcher=python", "--set", "resources.nodes=2")
SPOT = (
    *("--set", "resources.options.sagemaker.use_spot_instances=true"),
    *("--set", "resources.options.sagemaker.max_wait=3600"),
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    directory = tmp_path / "job"
    directory.mkdir()
    return directory


def accuracy(shown: str) -> float:
    found = re.search(r"test accuracy (0\.\d+)", shown)
    assert found, shown
    return float(found[1])


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.timeout(600)
def test_digits_on_two_spot_instances_goes_on_from_its_checkpoint_after_an_interruption(
    sagemaker: SagemakerTestbed, sagemaker_cluster: Cluster, folder: Path
) -> None:
    orc = Orc(folder, sagemaker_cluster)
    orc.init_digits()
    orc.take_time("ORC_RESTART", "0")
    sagemaker.interrupt_when("epoch  2/4")
    job = orc.submit(*SMALL, *SPOT, "--set", "resources.procs_per_node=1")
    view = orc.until(job, lambda view: view["state"] in ("SUCCEEDED", "FAILED"), timeout_s=400)
    shown = orc.log(job, 0)
    assert view["state"] == "SUCCEEDED", shown + orc("logs", job, "--node", "0")
    (attempt,) = view["attempts"]
    assert (attempt["hosts"], attempt["restarts"]) == (["algo-1", "algo-2"], 1)
    assert sorted(attempt["exit"]["ranks"]) == ["0", "1"]
    assert sorted(set(map(int, EPOCH.findall(shown)))) == list(range(1, 5))
    assert "resumed from /opt/ml/checkpoints/" in shown
    assert accuracy(shown) >= 0.9
    described = sagemaker.client("sagemaker").describe_training_job(TrainingJobName=attempt["native_id"])
    statuses = [transition["Status"] for transition in described["SecondaryStatusTransitions"]]
    assert (statuses.count("Training"), statuses.count("Interrupted"), statuses[-1]) == (2, 1, "Completed")
