"""The main job, end to end through the command line: on SageMaker's API, and on this machine under its contract."""

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


@pytest.fixture
def here(folder: Path, tmp_path: Path) -> Orc:
    """A cluster of which nothing is there, on a machine whose AWS libraries cannot even be imported."""
    options = {"region": "us-east-1", "instance_type": "ml.c5.xlarge", "image_uri": "none"}
    libraries = tmp_path / "libraries"
    libraries.mkdir()
    for name in ("boto3", "botocore", "sagemaker"):
        (libraries / f"{name}.py").write_text("raise SystemExit('AWS is asked')")
    cluster = Cluster(name="sagemaker", kind="sagemaker", options={**options, "install_requirements": False})
    return Orc(folder, cluster, {"PYTHONPATH": str(libraries)})


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
    orc.init("digits")
    orc.take_time("ORC_RESTART", "0")
    sagemaker.interrupt_when("epoch  2/12")
    job = orc.submit(*SMALL, *SPOT, "--set", "resources.procs_per_node=1")
    view = orc.until(job, lambda view: view["state"] in ("SUCCEEDED", "FAILED"), timeout_s=400)
    shown = orc.log(job, 0)
    assert view["state"] == "SUCCEEDED", shown + orc("logs", job, "--node", "0")
    (attempt,) = view["attempts"]
    assert (attempt["hosts"], attempt["restarts"]) == (["algo-1", "algo-2"], 1)
    assert sorted(attempt["exit"]["ranks"]) == ["0", "1"]
    assert sorted(set(map(int, EPOCH.findall(shown)))) == list(range(1, 13))
    assert "resumed from /opt/ml/checkpoints/" in shown
    assert accuracy(shown) >= 0.9
    described = sagemaker.client("sagemaker").describe_training_job(TrainingJobName=attempt["native_id"])
    statuses = [transition["Status"] for transition in described["SecondaryStatusTransitions"]]
    assert (statuses.count("Training"), statuses.count("Interrupted"), statuses[-1]) == (2, 1, "Completed")


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.timeout(600)
def test_the_same_job_runs_on_this_machine_under_the_contract_and_nothing_of_aws_is_asked(here: Orc) -> None:
    here.init("digits")
    shown = here(
        *("submit", "job.yaml", "--cluster", "sagemaker", "--local-contract", *SMALL),
        *("--set", "args.epochs=6", "--set", "resources.procs_per_node=1", "--follow"),
        timeout_s=400,
    )
    assert accuracy(shown) >= 0.9
    view = here.job("@last")
    (attempt,) = view["attempts"]
    assert (view["state"], view["cluster"], attempt["hosts"]) == ("SUCCEEDED", "sagemaker", ["algo-1", "algo-2"])
    assert attempt["native_id"] == f"local:contract:orc-{view['id']}-a1"
    assert sorted(attempt["exit"]["ranks"]) == ["0", "1"]
    assert "algo-1, algo-2" in here("status", "@last")
    assert "succeeded" in here("logs", "@last", "--node", "1")


def test_a_job_under_the_contract_is_cancelled_with_grace_and_a_failure_names_its_rank(here: Orc) -> None:
    script = """
import os, signal, sys, time
def end(*_):
    print("saving", flush=True)
    sys.exit(0)
if "FAIL" in os.environ:
    raise ValueError("the loss is not a number")
signal.signal(signal.SIGTERM, end)
print("up", flush=True)
while True:
    time.sleep(0.1)
"""
    here.write_job(script)
    job = here.submit("--local-contract")
    here.until_log(job, 0, "up")
    here("cancel", job)
    assert here.until(job, lambda view: view["state"] != "RUNNING")["state"] == "CANCELLED"
    assert here.log(job, 0) == "up\nsaving\n"

    job = here.submit("--local-contract", "--set", "env.FAIL=1")
    view = here.until(job, lambda view: view["state"] == "FAILED")
    failure = view["attempts"][0]["exit"]["first_failure"]
    assert (failure["rank"], failure["host"], failure["exit_code"]) == (0, "algo-1", 1)
    assert "ValueError: the loss is not a number" in here("status", job)


def test_the_contract_is_refused_on_clusters_that_do_not_have_it(here: Orc) -> None:
    here.write_job("print('never')")
    with here.start("submit", "job.yaml", "--cluster", "local", "--local-contract") as process:
        _, said = process.communicate(timeout=150)
    assert process.returncode == 2
    assert "the cluster local is of kind local" in said
    assert '"jobs": []' in here("list", "--json").replace("\n", "")
