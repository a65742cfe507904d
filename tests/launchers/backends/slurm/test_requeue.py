"""Preemption and lost nodes on the real cluster: the same attempt runs again, and never twice at once."""

from __future__ import annotations

import contextlib
import dataclasses

import psutil
import pytest
from slurm_testbed import eventually

from orc.launchers.backends.base import Cause, Phase
from orc.launchers.errors import BackendError

from .conftest import Run

# Counts its runs, checks that no other run is going on, saves when told to go, ends well in the second run.
RESUMES = """
import fcntl, os, signal, sys, time
job, rank = os.environ["ORC_JOB_DIR"], os.environ["RANK"]
lock = open(f"{job}/alone-{rank}", "w")
fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
with open(f"{job}/runs-{rank}", "a") as runs:
    runs.write(os.environ["ORC_RESTART"])
if os.path.exists(f"{job}/saved-{rank}"):
    print("resumed", flush=True)
    sys.exit(0)
def save(*_):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # Slurm and the agent send one each
    open(f"{job}/saved-{rank}", "w").close()
    print("saved", flush=True)
    os._exit(75)
def stay(seconds):
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        time.sleep(0.1)  # short: a signal that comes just before the call is handled after it
signal.signal(signal.SIGTERM, save)
print("up", flush=True)
stay(120)
"""
SLEEP = "import time; print('up', flush=True); time.sleep(120)"
PREEMPTED = {"retry": {"on": ["preempted"]}}
NODE_FAILURE = {"retry": {"on": ["node_failure"]}}


def spot(partition: str = "spot", **options: object) -> dict[str, object]:
    return {"nodes": 2, "options": {"slurm": {"partition": partition, **options}}}


def runs_of(run, rank: int) -> str:
    return (run.directory.parent / f"runs-{rank}").read_text()


@pytest.mark.slow
def test_a_job_with_a_range_of_nodes_may_run_again_on_fewer(runs) -> None:
    script = """
import os, sys, time
print(os.environ["ORC_RESTART"], os.environ["WORLD_SIZE"], flush=True)
while os.environ["ORC_RESTART"] == "0":
    if os.path.exists(os.environ["ORC_JOB_DIR"] + "/go"):
        os._exit(75)
    time.sleep(0.05)
"""
    resources = {"nodes": "1:2", "options": {"slurm": {"partition": "gpu"}}}
    run = runs.start(script, resources=resources, **PREEMPTED)
    run.until_said("0 2", rank=1)
    # It waits for a node of the first run, and gets it before the second run begins.
    runs.slurm.run(
        "sbatch", "--partition=gpu", "--nodelist=node4", "--exclusive", "--output=/dev/null", "--wrap=sleep 60"
    )
    (run.directory.parent / "go").touch()
    seen = run.ended()
    assert (seen.phase, seen.restarts, seen.hosts) == (Phase.SUCCEEDED, 1, ("node3",)), run.everything()
    assert seen.exit is not None
    assert sorted(seen.exit.ranks) == [0]
    assert run.log(0).splitlines() == ["0 2", "1 1"]


@pytest.mark.slow
def test_a_preempted_job_is_requeued_by_slurm_and_resumes_under_the_same_handle(runs) -> None:
    run = runs.start(RESUMES, resources=spot(), **PREEMPTED)
    handle = run.handle
    run.until_said("up", rank=0)
    run.until_said("up", rank=1)
    runs.slurm.preempt()
    waiting = run.awaited(Phase.PENDING)
    assert waiting.restarts == 1
    seen = run.ended()
    assert (seen.phase, seen.restarts) == (Phase.SUCCEEDED, 1), run.everything()
    for rank in (0, 1):
        assert runs_of(run, rank) == "01"
        assert run.log(rank).splitlines() == ["up", "saved", "resumed"]
    found = run.backend.find(handle.marker)
    assert found is not None
    assert found.native_id == handle.native_id


@pytest.mark.slow
def test_a_job_with_notice_saves_and_puts_itself_back_into_the_queue(runs) -> None:
    run = runs.start(RESUMES, resources=spot("spotgrace"), **PREEMPTED)
    run.until_said("up", rank=0)
    run.until_said("up", rank=1)
    runs.slurm.preempt()
    seen = run.ended(timeout_s=120)
    assert (seen.phase, seen.restarts) == (Phase.SUCCEEDED, 1), run.everything()
    assert [runs_of(run, rank) for rank in (0, 1)] == ["01", "01"]
    script = (run.directory / "logs" / "launcher.log").read_text()
    assert "the agents ended with status 75" in script
    assert "requeued" in script


@pytest.mark.slow
def test_a_rank_that_asks_to_run_again_does(runs) -> None:
    script = RESUMES.replace("stay(120)", "save() if rank == '0' else stay(120)")
    run = runs.start(script, resources={"nodes": 2}, **PREEMPTED)
    seen = run.ended()
    assert (seen.phase, seen.restarts) == (Phase.SUCCEEDED, 1), run.everything()
    assert runs_of(run, 0) == "01"


def test_a_rank_that_always_asks_to_run_again_does_not_run_for_ever(runs) -> None:
    run = runs.start("raise SystemExit(75)", resources={"options": {"slurm": {"max_requeues": 0}}}, **PREEMPTED)
    seen = run.ended()
    assert (seen.phase, seen.cause, seen.restarts) == (Phase.FAILED, Cause.PREEMPTED, 0)


def test_a_preempted_job_without_requeue_ends_as_preempted(runs) -> None:
    run = runs.start(RESUMES.replace('print("saved"', 'time.sleep(1.5)\n    print("saved"'), resources=spot())
    run.until_said("up", rank=0)
    run.until_said("up", rank=1)
    runs.slurm.preempt(seconds=1)
    seen = run.ended()
    assert (seen.phase, seen.cause) == (Phase.FAILED, Cause.PREEMPTED)
    assert run.log(0).splitlines() == ["up", "saved"]
    assert seen.exit is not None


@pytest.mark.parametrize("how", ["goes down", "loses its power"])
def test_a_node_that_is_lost_is_a_node_failure(runs, how: str) -> None:
    run = runs.start(SLEEP, resources={"nodes": 2})
    run.until_said("up", rank=1)
    lost = run.poll().hosts[1]
    lose, mend = runs.slurm.crash_node, runs.slurm.up
    if how == "goes down":
        lose, mend = runs.slurm.set_down, lambda: runs.slurm.resume(lost)
    lose(lost)
    try:
        seen = run.ended(timeout_s=120)
    finally:
        mend()
    assert (seen.phase, seen.cause) == (Phase.FAILED, Cause.NODE_FAILURE), run.everything()
    assert lost in seen.reason


@pytest.mark.slow
def test_a_job_whose_node_goes_down_runs_again_on_others(runs) -> None:
    run = runs.start(RESUMES.replace("stay(120)", "stay(0 if os.environ['ORC_RESTART'] == '1' else 120)"),
                     resources={"nodes": 2}, **NODE_FAILURE)  # fmt: skip
    run.until_said("up", rank=0)
    run.until_said("up", rank=1)
    lost = run.poll().hosts[1]
    runs.slurm.set_down(lost)
    try:
        seen = run.ended()
    finally:
        runs.slurm.resume(lost)
    assert (seen.phase, seen.restarts) == (Phase.SUCCEEDED, 1), run.everything()
    assert lost not in seen.hosts
    assert runs_of(run, 1) == "01"


@pytest.mark.slow
def test_a_job_cancelled_between_two_runs_does_not_run_again(runs) -> None:
    run = runs.start(RESUMES, resources=spot(), **PREEMPTED)
    run.until_said("up", rank=0)
    run.until_said("up", rank=1)
    runs.slurm.preempt(seconds=60)  # it is cancelled after the test
    run.awaited(Phase.PENDING)
    run.cancel(5)
    assert run.ended().phase is Phase.CANCELLED
    eventually(lambda: runs.slurm.jobs(run.plan.marker)[0][1] == "CANCELLED")
    assert runs_of(run, 0) == "0"


def test_a_refused_job_is_not_adopted_although_its_row_stays(runs) -> None:
    everything = {"nodes": 4, "options": {"slurm": {"exclude": "node1"}}}
    refused = runs.prepare("print('ran')", resources=everything)
    with pytest.raises(BackendError, match="node configuration is not available"):
        refused.submit()
    assert [state for _, state in runs.slurm.jobs(refused.plan.marker)] == ["FAILED"]
    assert refused.backend.find(refused.plan.marker) is None
    script = refused.directory / "job.sbatch"
    plain = dataclasses.replace(
        refused.plan,
        files=tuple(
            dataclasses.replace(file, content=file.content.replace("#SBATCH --exclude=node1\n", ""))
            if file.path == str(script)
            else file
            for file in refused.plan.files
        ),
    )
    seen = Run(refused.backend, plain, refused.view).submit().ended()
    assert seen.phase is Phase.SUCCEEDED


def test_a_killed_srun_puts_the_blame_on_no_node(runs) -> None:
    run = runs.start(SLEEP, resources={"nodes": 2})
    run.until_said("up", rank=0)
    run.until_said("up", rank=1)
    for process in psutil.process_iter(["name", "cmdline"]):
        if process.info["name"] == "srun" and f"{run.directory}/agent.json" in process.info["cmdline"]:
            with contextlib.suppress(psutil.NoSuchProcess):  # its other half ends with it
                process.kill()
    seen = run.ended()
    assert seen.phase is Phase.FAILED
    assert seen.failed_hosts == ()


def test_a_completed_job_that_is_requeued_by_hand_has_still_succeeded(runs) -> None:
    run = runs.start("print('ran')", **NODE_FAILURE)
    assert run.ended().phase is Phase.SUCCEEDED
    runs.slurm.run("scontrol", "requeue", run.handle.native_id)
    runs.slurm.await_state(run.handle.native_id, "COMPLETED")
    seen = run.poll()
    assert (seen.phase, seen.reason) == (Phase.SUCCEEDED, "")
    assert seen.exit is not None
    assert run.log(0) == "ran\n"
