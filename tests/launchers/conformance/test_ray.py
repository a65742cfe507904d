"""Ray, really started: a head and a worker as two nodes of this machine, and a driver."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from orc.launchers.agent.procfs import marked_processes
from orc.launchers.backends.base import Backend, Cause, Phase

# One CPU for each node, so that two tasks at once need both.
RAY = {"kind": "ray", "options": {"num_cpus": 1, "object_store_memory": "80M", "resources": {"place": 1}}}


@pytest.fixture
def backend_under_test(local_backend: Backend) -> Backend:
    return local_backend


def name_of(pid: int) -> str:
    """The name of a process that runs."""
    return Path(f"/proc/{pid}/comm").read_text().strip()


@pytest.fixture(autouse=True)
def _nothing_of_ray_stays():
    before = set(Path("/tmp").glob("orc-ray.*"))
    yield
    assert set(Path("/tmp").glob("orc-ray.*")) <= before


def test_the_driver_runs_tasks_on_all_nodes_with_the_code_and_environment_of_the_job(run) -> None:
    job, seen = run(
        """
        import os, subprocess, sys
        import ray

        ray.init()
        stranger = subprocess.Popen(
            [sys.executable, "-c", "import ray; ray.init(logging_level='CRITICAL')"],
            env={**os.environ, "RAY_AUTH_TOKEN": "guessed"},
            stderr=subprocess.DEVNULL,
        )

        @ray.remote(num_cpus=1, resources={"place": 1})
        def where():
            return ray.get_runtime_context().get_node_id(), os.environ["MINE"], os.getcwd()

        group = ray.util.placement_group([{"CPU": 1, "place": 1}] * 2, strategy="STRICT_SPREAD")
        strategy = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy
        places = [strategy(group, placement_group_bundle_index=n) for n in range(2)]
        found = ray.get([where.options(scheduling_strategy=place).remote() for place in places])
        nodes, values, directories = (set(each) for each in zip(*found))
        print(len(nodes), values, directories == {os.getcwd()}, os.environ["RANK"], os.environ["WORLD_SIZE"])
        print("stranger", stranger.wait(60) != 0)
        """,
        nodes=2,
        launcher=RAY,
        env={"MINE": "a 'b"},
    )
    assert seen.phase is Phase.SUCCEEDED, job.all_logs()
    assert """2 {"a 'b"} True 0 1\nstranger True\n""" in job.log(0), job.all_logs()
    assert seen.exit is not None
    assert {rank: record["exit_code"] for rank, record in seen.exit.ranks.items()} == {0: 0}


def test_a_driver_that_fails_ends_the_attempt_with_its_status_and_its_last_words(run) -> None:
    job, seen = run("import sys; print('last words'); sys.exit(3)", launcher=RAY)
    assert (seen.phase, seen.cause) == (Phase.FAILED, Cause.CRASH), job.all_logs()
    assert seen.exit is not None
    assert seen.exit.first_failure is not None
    assert (seen.exit.exit_status, seen.exit.first_failure.rank) == (3, 0)
    assert seen.exit.first_failure.log_tail == "last words"


def test_a_worker_that_dies_is_a_failure_of_its_node(make_job) -> None:
    job = make_job("import time; print('up', flush=True); time.sleep(600)", nodes=2, launcher=RAY).submit()
    job.until_log(0, "up")
    (raylet,) = [pid for pid in marked_processes(str(job.directory), node=1) if name_of(pid) == "raylet"]
    os.kill(raylet, signal.SIGKILL)
    seen = job.wait()
    assert (seen.phase, seen.cause) == (Phase.LOST, Cause.NODE_FAILURE), job.all_logs()
    assert "the Ray worker of node 1 exited with 1 (node failure" in seen.reason
