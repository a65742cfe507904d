"""Jobs that fail: every backend says why, and leaves nothing behind."""

from __future__ import annotations

import pytest

from orc.launchers.backends.base import Cause, Phase
from orc.launchers.testing.jobs import MakeJob, RunJob


def test_the_first_failing_rank_is_named_with_its_status_and_traceback(run: RunJob, launcher: str) -> None:
    _job, seen = run(
        """
        import os, sys, time
        if os.environ["RANK"] == "3":
            def inner():
                raise ValueError("the loss is not a number")
            try:
                inner()
            except ValueError:
                import traceback
                traceback.print_exc()
                sys.exit(42)
        time.sleep(600)
        """,
        nodes=2,
        procs=2,
        launcher=launcher,
    )
    assert (seen.phase, seen.cause) == (Phase.FAILED, Cause.CRASH)
    assert seen.exit is not None
    first = seen.exit.first_failure
    assert first is not None
    assert (first.rank, first.node, first.exit_code, first.signal) == (3, 1, 42, None)
    assert first.host == seen.hosts[1]
    assert "ValueError: the loss is not a number" in first.log_tail
    assert "Traceback (most recent call last)" in first.log_tail
    assert seen.exit.exit_status == 42
    assert "rank 3" in seen.reason
    assert "42" in seen.reason
    assert seen.exit.ranks[3]["exit_code"] == 42


def test_a_rank_killed_by_a_signal_is_named_with_the_signal(run: RunJob, launcher: str) -> None:
    _job, seen = run(
        """
        import os, signal, time
        if os.environ["RANK"] == "1":
            print("about to die", flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(600)
        """,
        procs=2,
        launcher=launcher,
    )
    assert (seen.phase, seen.cause) == (Phase.FAILED, Cause.CRASH)
    assert seen.exit is not None
    first = seen.exit.first_failure
    assert first is not None
    assert (first.rank, first.exit_code, first.signal) == (1, None, "SIGKILL")
    assert first.log_tail == "about to die"
    assert seen.exit.exit_status == 128 + 9
    assert "SIGKILL" in seen.reason


def test_ranks_that_ignore_the_signal_to_end_are_killed_after_a_failure(make_job: MakeJob) -> None:
    job = make_job(
        """
        import os, pathlib, signal, time
        if os.environ["RANK"] == "1":
            while not pathlib.Path(os.environ["ORC_JOB_DIR"], "go").exists():
                time.sleep(0.02)
            raise SystemExit(5)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        print("deaf", flush=True)
        time.sleep(600)
        """,
        nodes=2,
        procs=1,
        grace=1,
    ).submit()
    job.until_log(0, "deaf")
    job.go()
    seen = job.wait()
    assert seen.phase is Phase.FAILED
    assert seen.exit is not None
    assert seen.exit.exit_status == 5
    assert seen.exit.ranks[0]["signal"] == "SIGKILL"


def test_a_program_that_does_not_exist_is_a_failed_launch_or_crash_that_names_it(run: RunJob, launcher: str) -> None:
    _job, seen = run("", script=None, command=["no-such-program", "x"], launcher=launcher)
    assert seen.phase is Phase.FAILED
    assert seen.cause in (Cause.LAUNCH, Cause.CRASH)
    said = seen.reason + (seen.exit.first_failure.log_tail if seen.exit and seen.exit.first_failure else "")
    assert "no-such-program" in said


def test_a_failing_setup_is_a_failed_launch_and_the_script_never_runs(run: RunJob) -> None:
    job, seen = run("print('never')", nodes=2, setup=["echo fine", "echo no disk here >&2; exit 3", "echo never"])
    assert (seen.phase, seen.cause) == (Phase.FAILED, Cause.LAUNCH)
    assert "exited with 3" in seen.reason
    assert "no disk here" in seen.reason
    assert not any("never" in job.log(s.rank) for s in job.backend.log_selectors(job.handle) if s.rank is not None)


def test_the_time_limit_ends_the_attempt(run: RunJob) -> None:
    _job, seen = run("import time; print('here', flush=True); time.sleep(600)", procs=2, resources={"time": 2})
    assert (seen.phase, seen.cause) == (Phase.FAILED, Cause.TIMEOUT)
    assert "time limit" in seen.reason


def test_ranks_that_exit_75_were_preempted_and_want_to_run_again(run: RunJob, launcher: str) -> None:
    _job, seen = run("raise SystemExit(75)", nodes=2, procs=2, launcher=launcher)
    assert (seen.phase, seen.cause) == (Phase.FAILED, Cause.PREEMPTED)
    assert seen.exit is not None
    assert seen.exit.exit_status == 75


@pytest.mark.distributed
def test_the_rank_that_failed_is_named_not_the_ones_that_lost_their_connection_to_it(
    run: RunJob, launcher: str
) -> None:
    _job, seen = run(
        """
        import torch, torch.distributed as dist
        dist.init_process_group("gloo")
        dist.barrier()
        if dist.get_rank() == 1:
            raise RuntimeError("out of luck")
        dist.all_reduce(torch.ones(1))
        """,
        procs=2,
        launcher=launcher,
    )
    assert (seen.phase, seen.cause) == (Phase.FAILED, Cause.CRASH)
    assert seen.exit is not None
    assert seen.exit.first_failure is not None
    assert seen.exit.first_failure.rank == 1
    assert "RuntimeError: out of luck" in seen.exit.first_failure.log_tail
