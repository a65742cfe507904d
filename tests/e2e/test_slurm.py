"""The main job, end to end through the command line, on a real Slurm cluster: 2 nodes, 2 processes each."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
from command_line import EPOCH, Orc
from exact_training import JOB, Training, undisturbed
from slurm_testbed import SlurmTestbed

from orc.launchers.spec.clusters import Cluster

SIZE = ("--set", "resources.nodes=2", "--set", "resources.procs_per_node=2")


@pytest.fixture
def orc(slurm: SlurmTestbed, slurm_cluster: Cluster, tmp_path: Path) -> Orc:
    directory = tmp_path / "job"
    directory.mkdir()
    return Orc(directory, slurm_cluster)


@pytest.fixture
def digits(orc: Orc) -> Orc:
    orc.init_digits()
    return orc


@pytest.mark.slow
def test_digits_trains_on_two_nodes_and_everything_can_be_seen(digits: Orc) -> None:
    shown = digits("submit", "job.yaml", "--cluster", "testbed", *SIZE, "--follow")
    accuracy = re.search(r"test accuracy (0\.\d+)", shown)
    assert accuracy, shown
    assert float(accuracy[1]) >= 0.9

    view = digits.job("@last")
    (attempt,) = view["attempts"]
    assert (view["state"], view["backend"], attempt["state"]) == ("SUCCEEDED", "slurm", "SUCCEEDED")
    assert attempt["hosts"] == ["node1", "node2"]
    assert sorted(attempt["exit"]["ranks"]) == ["0", "1", "2", "3"]
    assert EPOCH.findall(digits.log("@last", 0)) == [str(epoch) for epoch in range(1, 5)]
    for rank in (1, 3):
        assert not EPOCH.findall(digits.log("@last", rank))  # only one process per node prints
    assert "succeeded" in digits("logs", "@last", "--node", "1")
    saved = sorted((Path(str(digits.cluster.root)) / "jobs" / view["id"] / "checkpoints").iterdir())
    assert len(saved) == 2  # keep: 2
    text = digits("status", "@last")
    assert "node1, node2" in text
    assert json.loads(digits("list", "--json"))["jobs"][0]["id"] == view["id"]


@pytest.mark.parametrize(
    ("options", "said", "hint"),
    [
        ({"partition": "nope"}, "no partition 'nope'", "cpu, gpu, short, spot, spotgrace"),
        ({"account": "closed"}, "AssocMaxSubmitJobLimit", "choose another `account`"),
    ],
)
def test_what_slurm_would_refuse_is_one_clear_error(
    orc: Orc, slurm: SlurmTestbed, options: dict[str, str], said: str, hint: str
) -> None:
    orc.write_job("print(1)", name="refused", resources={"options": {"slurm": options}})
    with orc.start("submit", "job.yaml", "--cluster", "testbed") as process:
        _, err = process.communicate(timeout=150)
    assert process.returncode not in (0, 70)
    assert said in err
    assert hint in err
    assert "Traceback" not in err
    assert "orc-refused-" not in slurm.run("squeue", "--noheader", "--states=all", "--format=%j")
    for job in json.loads(orc("list", "--json"))["jobs"]:
        assert job["state"] == "FAILED"


def test_a_misspelt_option_is_found_before_anything_is_sent(orc: Orc) -> None:
    orc.write_job("print(1)", resources={"options": {"slurm": {"partitoin": "cpu"}}})
    with orc.start("render", "job.yaml", "--cluster", "testbed") as process:
        _, err = process.communicate(timeout=150)
    assert process.returncode == 2
    assert "did you mean 'partition'?" in err


@pytest.mark.slow
def test_a_training_that_loses_a_node_goes_on_exactly_in_a_new_attempt(
    orc: Orc, slurm: SlurmTestbed, tmp_path: Path
) -> None:
    """For one that Slurm preempts and requeues: test_trainer.py."""
    (tmp_path / "undisturbed").mkdir()
    expected = undisturbed(tmp_path / "undisturbed")
    training = Training(orc, resources={**JOB["resources"], "options": {"slurm": {"requeue": False}}})
    training.until_it_holds()
    lost = training.attempts[0]["hosts"][1]
    slurm.set_down(lost)
    try:
        orc("wait", training.job)
    finally:
        slurm.resume(lost)
    training.check(expected, attempts=2)
    first, second = training.attempts
    assert (first["cause"], second["state"]) == ("node_failure", "SUCCEEDED")
    assert lost in first["reason"]
    assert lost not in second["hosts"]


def test_a_launch_below_srun_is_one_process_of_its_step(slurm: SlurmTestbed, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import torch\nfrom orc.runtime import Accelerator\n"
        "it = Accelerator(cpu=True)\ntotal = it.reduce(torch.tensor([1.0 + it.process_index])).item()\n"
        "print(f'rank {it.process_index} of {it.num_processes}: {total}', flush=True)\n"
    )
    launch = (sys.executable, "-m", "orc.launch", "--mixed_precision", "no", str(script))
    shown = slurm.run("srun", "-N", "2", "-n", "2", *launch, timeout_s=150)
    assert sorted(shown.splitlines()) == ["rank 0 of 2: 3.0", "rank 1 of 2: 3.0"]
