"""Programs written for submitit's `AutoExecutor`, on jobs of orc."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import submitit

from orc.launchers.backends.slurm.submitit_parameters import read_parameters
from orc.launchers.errors import SpecError
from orc.orchestrator.client import Client
from orc.orchestrator.submitit_executor import OrcExecutor


@pytest.fixture
def executor(orc_home: Path, tmp_path: Path) -> Iterator[OrcExecutor]:
    with Client() as client:
        yield OrcExecutor(tmp_path / "logs", client=client)


def test_calls_are_submitted_mapped_and_batched(executor: OrcExecutor) -> None:
    executor.update_parameters(timeout_min=5, tasks_per_node=1, slurm_partition="gpu", name="sums")

    def add(one: int, two: int) -> int:
        return one + two

    single = executor.submit(add, 1, 2)
    assert single.result() == 3
    assert single.job_id.startswith("sums-")
    assert [job.result() for job in executor.map_array(add, [1, 2], [10, 20])] == [11, 22]
    with executor.batch():
        batched = [executor.submit(add, number, number) for number in range(2)]
    assert [job.result() for job in batched] == [0, 2]
    resources = executor.client.job(single.job_id).spec["resources"]
    assert (resources["time"], resources["options"]["slurm"]["partition"]) == ("0:05:00", "gpu")


def test_a_checkpointable_callable_goes_on_where_it_was(executor: OrcExecutor, tmp_path: Path) -> None:
    up = tmp_path / "up"

    def training() -> type:
        class Training(submitit.helpers.Checkpointable):  # type: ignore[misc]
            runs = 0

            def __call__(self, path: str) -> int:
                import time

                self.runs += 1
                while self.runs == 1:
                    time.sleep(0.05)
                return self.runs

        return Training

    executor.update_parameters(timeout_min=0.2)
    assert executor.submit(training()(), str(up)).result() == 2


@pytest.mark.parametrize(
    ("given", "resources"),
    [
        ({"timeout_min": 90, "mem_gb": 1.5}, {"time": 5400, "memory": "1536M"}),
        ({"nodes": 2, "tasks_per_node": 4, "cpus_per_task": 3}, {"nodes": 2, "procs_per_node": 4, "cpus_per_proc": 3}),
        ({"gpus_per_node": 8, "slurm_mem": "32GB"}, {"gpus_per_node": 8, "memory": "32GB"}),
        (
            {"slurm_partition": "gpu", "slurm_signal_delay_s": 120},
            {"options": {"slurm": {"partition": "gpu", "signal_lead": 120}}},
        ),
        (
            {"slurm_additional_parameters": {"licenses": "matlab", "spread-job": True}},
            {"options": {"slurm": {"licenses": "matlab", "extra": {"spread-job": True}}}},
        ),
        ({"stderr_to_stdout": True, "slurm_use_srun": True, "slurm_qos": None}, {}),
    ],
)
def test_parameters_become_resources(given: dict[str, Any], resources: dict[str, Any]) -> None:
    assert read_parameters(given).resources == resources


def test_parameters_of_the_job_itself_are_told_apart() -> None:
    asked = read_parameters(
        {"slurm_job_name": "sweep", "slurm_setup": ["module load cuda"], "slurm_array_parallelism": 4}
    )
    assert (asked.name, asked.setup, asked.at_once, asked.resources) == ("sweep", ("module load cuda",), 4, {})


def test_a_parameter_that_cannot_be_carried_is_refused_when_it_is_given(executor: OrcExecutor) -> None:
    with pytest.raises(SpecError, match="'teardown' cannot be carried"):
        executor.update_parameters(slurm_teardown=["rm -rf scratch"])
    assert executor.parameters == {}
