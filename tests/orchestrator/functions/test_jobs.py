"""Python functions as jobs: the same on this machine and on a real Slurm cluster."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from slurm_testbed import SlurmTestbed, eventually

from orc.launchers.errors import BackendError, LaunchError
from orc.launchers.spec.clusters import Cluster
from orc.orchestrator.client import Client
from orc.orchestrator.clients.function_jobs import FunctionFailed, FunctionJob, FunctionTimeout
from orc.orchestrator.functions import node

SLURM = pytest.param("testbed", marks=[pytest.mark.slurm, pytest.mark.xdist_group("slurm")])
WHERE = ["local", SLURM]


@pytest.fixture
def client(orc_home: Path, request: pytest.FixtureRequest) -> Iterator[Client]:
    """Knows the testbed where the test asks for it."""
    entries: dict[str, Any] = {
        "bare": {"kind": "ssh", "root": "~/orc", "options": {"hosts": ["nowhere.invalid"]}},
    }
    if request.node.callspec.params.get("where") == "testbed" if hasattr(request.node, "callspec") else False:
        cluster: Cluster = request.getfixturevalue("slurm_cluster")
        entries["testbed"] = {k: v for k, v in cluster.model_dump(mode="json").items() if k != "name" and v}
    clusters = orc_home / "config" / "clusters.yaml"
    clusters.parent.mkdir(parents=True, exist_ok=True)
    clusters.write_text(yaml.safe_dump(entries))
    with Client() as made:
        yield made


def power() -> Callable[..., Any]:
    """Functions made here travel as they are, not by the name of a module that the nodes would need."""

    def compute(base: int, exponent: int = 2, *, offset: int = 0) -> dict[str, Any]:
        print("computing", flush=True)
        return {"value": base**exponent + offset, "pid": os.getpid()}

    return compute


def reject() -> Callable[..., Any]:
    class OutOfCheese(ValueError):
        pass

    def inner(reason: str) -> None:
        raise OutOfCheese(reason)

    def fails(reason: str) -> None:
        inner(reason)

    return fails


def sleeper() -> Callable[..., Any]:
    def sleep(path: str) -> str:
        with open(path, "a") as file:
            file.write("x")
        while not os.path.exists(path + ".go"):
            time.sleep(0.05)
        return "woken"

    return sleep


@pytest.mark.parametrize("where", WHERE)
def test_a_function_gets_its_arguments_and_returns_its_result(client: Client, where: str) -> None:
    job = client.submit_function(power(), 3, cluster=where, exponent=4, offset=1, name="Power of 3")
    result = job.result(timeout_s=90)
    assert result["value"] == 82
    assert result["pid"] != os.getpid()
    assert job.state == "SUCCEEDED"
    assert job.done()
    assert job.exception() is None
    assert "computing" in job.stdout()
    assert job.id.startswith("power-of-3-")
    assert client.job(job.id).cluster == where  # a job like any other
    (again,) = client.function_jobs(job.id)
    assert again.result(timeout_s=1) == result


@pytest.mark.parametrize("where", WHERE)
def test_an_exception_comes_back_with_its_traceback(client: Client, where: str) -> None:
    job = client.submit_function(reject(), "no cheddar", cluster=where)
    with pytest.raises(FunctionFailed, match="OutOfCheese: no cheddar") as caught:
        job.result(timeout_s=90)
    assert "in fails" in caught.value.traceback
    assert "in inner" in caught.value.traceback
    assert "raise OutOfCheese(reason)" in str(caught.value) or "in inner" in str(caught.value)
    assert caught.value.where == job.id
    assert job.state == "FAILED"


@pytest.mark.parametrize("where", WHERE)
def test_a_function_is_mapped_over_arguments_so_many_at_once(client: Client, where: str, tmp_path: Path) -> None:
    running = tmp_path / "running"
    running.mkdir()

    def crowd(number: int, factor: int) -> tuple[int, int]:
        own = running / str(number)
        own.touch()
        seen = 0
        until = time.monotonic() + 1.0
        while time.monotonic() < until:
            seen = max(seen, len(list(running.iterdir())))
            time.sleep(0.02)
        own.unlink()
        return number * factor, seen

    jobs = client.map_functions(crowd, range(4), [10, 20, 30, 40], cluster=where, at_once=2)
    results = [job.result(timeout_s=120) for job in jobs]
    assert [value for value, _ in results] == [0, 20, 60, 120]
    assert max(seen for _, seen in results) <= 2
    group = jobs[0].view.tags["map"]
    assert [job.id for job in client.function_jobs(group)] == [job.id for job in jobs]
    if where != "local":
        assert len({client.at_backend(job.id, None)[1].group for job in jobs}) == 1  # type: ignore[union-attr]
    (third,) = client.function_jobs(f"{group}.2")
    assert third.result() == results[2]


@pytest.mark.parametrize("where", ["local"])
def test_every_process_of_a_call_has_a_result_of_its_own(
    client: Client, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def rank() -> int:
        import submitit

        return int(submitit.JobEnvironment().global_rank)

    job = client.submit_function(rank, cluster=where, resources={"procs_per_node": 2})
    assert job.results(timeout_s=90) == [0, 1]
    assert job.result() == 0

    view = client.job(job.id)
    up_to_four = replace(view, spec={**view.spec, "resources": {**view.spec["resources"], "nodes": "1:4"}})
    monkeypatch.setattr(FunctionJob, "view", up_to_four)
    assert job.results() == [0, 1], "those that ran"


def test_a_call_is_cancelled_and_says_so(client: Client, tmp_path: Path) -> None:
    path = tmp_path / "ran"
    job = client.submit_function(sleeper(), str(path))
    with pytest.raises(FunctionTimeout, match="has no result after 0 s"):
        job.result(timeout_s=0)
    eventually(path.exists, timeout_s=60)
    assert job.state == "RUNNING"
    job.cancel()
    with pytest.raises(FunctionFailed, match=r"ended without a result \(CANCELLED: on request\)"):
        job.result(timeout_s=60)
    assert job.done()
    job.cancel()  # again does no harm


@pytest.mark.parametrize("where", [SLURM])
def test_a_call_that_waits_in_slurm_is_cancelled_and_says_so(client: Client, where: str) -> None:
    jobs = client.map_functions(
        power(), [1, 2], cluster=where, resources={"options": {"slurm": {"begin": "now+1hour"}}}
    )  # fmt: skip
    assert [job.state for job in jobs] == ["PENDING"] * 2
    jobs[1].cancel()
    with pytest.raises(FunctionFailed, match=r"ended without a result \(CANCELLED: "):
        jobs[1].result(timeout_s=60)
    assert jobs[0].state == "PENDING"
    jobs[0].cancel()


def counter() -> type:
    class Counter:
        """Counts until told to stop; saved, it goes on where it was."""

        def __init__(self) -> None:
            self.reached = 0
            self.runs = 0

        def __call__(self, goal: int, started: str) -> tuple[int, int]:
            self.runs += 1
            while self.reached < goal:
                self.reached += 1
                open(started, "w").close()
                while self.runs == 1:  # for the time limit, or for who plays it
                    time.sleep(0.02)
            return self.reached, self.runs

        def checkpoint(self, goal: int, started: str) -> Any:
            import submitit

            return submitit.helpers.DelayedSubmission(self, goal, started)

    return Counter


def test_before_its_time_limit_a_function_saves_and_goes_on_in_the_next_attempt(client: Client, tmp_path: Path) -> None:
    job = client.submit_function(counter()(), 3, str(tmp_path / "up"), resources={"time": 10})
    assert job.result(timeout_s=120) == (3, 2)
    assert (job.view.attempts[0].cause, job.view.attempts[0].state) == ("timeout", "FAILED")


def test_a_function_that_needs_too_many_time_limits_is_given_up(client: Client, tmp_path: Path) -> None:
    job = client.submit_function(
        counter()(), 3, str(tmp_path / "up"), resources={"time": 10}, max_timeouts=0
    )  # fmt: skip
    with pytest.raises(FunctionFailed, match="its time limit was reached 1 times, and max_timeouts is 0"):
        job.result(timeout_s=120)
    assert len(job.view.attempts) == 2


@pytest.mark.parametrize("where", [SLURM])
def test_a_preempted_function_saves_and_goes_on_in_the_same_slurm_job(
    client: Client, slurm: SlurmTestbed, where: str, tmp_path: Path
) -> None:
    up = tmp_path / "up"
    spot = {"options": {"slurm": {"partition": "spotgrace"}}}
    job = client.submit_function(counter()(), 3, str(up), cluster=where, resources=spot)
    eventually(up.exists, timeout_s=60)
    slurm.preempt()
    assert job.result(timeout_s=150) == (3, 2)
    assert len(job.view.attempts) == 1


def test_a_function_is_tried_again_as_its_job_says(client: Client, tmp_path: Path) -> None:
    mark = tmp_path / "mark"

    def flaky() -> str:
        if mark.exists():
            return "well"
        mark.touch()
        raise OSError("not yet")

    job = client.submit_function(flaky, job={"retry": {"on": "crash", "max_attempts": 2, "backoff": 0}})
    assert job.result(timeout_s=90) == "well"
    assert len(job.view.attempts) == 2
    again = client.resubmit(job.id)
    (new,) = client.function_jobs(again.id)
    assert new.result(timeout_s=90) == "well"


def test_a_result_that_the_job_has_not_signed_is_not_unpickled(client: Client) -> None:
    job = client.submit_function(power(), 3)
    job.result(timeout_s=90)
    (result,) = (client.workspace.state_dir / "jobs" / job.id / "results").iterdir()
    data = result.read_bytes()
    key = next((client.workspace.state_dir / "functions").glob("*.key")).read_text()
    for forged in (b"\0" * 32 + data[32:], node.signed(key, "results/a1-rank-1.pkl", data[32:])):
        result.write_bytes(forged)
        with pytest.raises(FunctionFailed, match="was not written by this job"):
            job.result()


@pytest.mark.parametrize("where", [SLURM])
def test_what_slurm_refuses_is_refused_in_its_words(client: Client, where: str) -> None:
    resources = {"options": {"slurm": {"partition": "nope"}}}
    with pytest.raises(BackendError, match="no partition 'nope'"):
        client.submit_function(power(), 1, cluster=where, resources=resources)
    assert [row.state for row in client.jobs()] == ["FAILED"]


@pytest.mark.parametrize("where", [SLURM])
def test_resources_and_options_are_those_of_any_job(client: Client, slurm: SlurmTestbed, where: str) -> None:
    def devices() -> tuple[str | None, str | None]:
        return os.environ.get("CUDA_VISIBLE_DEVICES"), os.environ.get("LEAK")

    resources = {
        "gpus_per_node": 2,
        "procs_per_node": 1,
        "cpus_per_proc": 2,
        "memory": "1G",
        "options": {"slurm": {"partition": "gpu", "gpu_type": "a100", "nodelist": "node4", "comment": "mine"}},
    }
    os.environ["LEAK"] = "of the shell"
    try:
        job = client.submit_function(devices, cluster=where, resources=resources)
    finally:
        del os.environ["LEAK"]
    shown = slurm.run("scontrol", "show", "job", str(job.native_id))
    assert job.result(timeout_s=90) == ("0,1", None)
    for part in ("Partition=gpu", "NodeList=node4", "mem=1G", "CPUs/Task=2", f"JobName=orc-{job.id}-a1"):
        assert part in shown


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"cluster": "nowhere"}, "unknown cluster 'nowhere'"),
        ({"resources": {"tiem": 2}}, "did you mean 'time'"),
        ({"job": {"retyr": {}}}, "did you mean 'retry'"),
    ],
)
def test_what_cannot_be_done_is_one_clear_error(client: Client, given: dict[str, Any], said: str) -> None:
    with pytest.raises(LaunchError, match=said):
        client.submit_function(power(), 1, **given)


def test_what_cannot_travel_is_refused_and_leaves_nothing(client: Client) -> None:
    with pytest.raises(LaunchError, match=r"the call cannot be sent: TypeError: .*pickle"):
        client.submit_function(power(), sys.stdout)
    with pytest.raises(LaunchError, match="expected a function"):
        client.submit_function(3)  # type: ignore[arg-type]
    assert client.jobs() == []


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"at_once": 0}, "at least one call runs at a time"),
        ({"at_once": 1, "resources": {"time": 60}}, "uses up its time limit"),
        ({"at_once": 1, "cluster": "bare"}, "at_once needs a cluster with arrays"),
    ],
)
def test_a_limit_that_cannot_be_kept_is_refused(client: Client, given: dict[str, Any], said: str) -> None:
    with pytest.raises(LaunchError, match=said):
        client.map_functions(power(), [1, 2], **given)


@pytest.mark.parametrize(("columns", "said"), [(((),), "nothing to map"), (([1], [1, 2]), "different number: 1, 2")])
def test_a_map_needs_as_many_of_each_argument(client: Client, columns: Any, said: str) -> None:
    with pytest.raises(LaunchError, match=said):
        client.map_functions(power(), *columns)


@pytest.mark.parametrize("id", ["nothing-000000", "nothing-000000.3"])
def test_unknown_functions_are_said_to_be_unknown(client: Client, id: str) -> None:
    with pytest.raises(LaunchError, match="no such job"):
        client.function_jobs(id)


def test_a_function_that_dies_without_a_word_is_a_failure(client: Client) -> None:
    def die() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(FunctionFailed, match="ended without a result"):
        client.submit_function(die).result(timeout_s=60)
