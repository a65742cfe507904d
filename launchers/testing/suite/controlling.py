"""Submitting, finding, cancelling: from the same process, from another, twice, with the first one gone."""

from __future__ import annotations

import signal
import time

from orc.launchers.backends.base import Backend, Cause, Handle, Phase
from orc.launchers.testing.jobs import MakeJob, RunJob

ONCE = """
import os, time
fd = os.open(os.path.join(os.environ["ORC_JOB_DIR"], "ran"), os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
os.write(fd, b"x")
print("started", flush=True)
time.sleep(1)
"""


def test_nothing_is_found_before_the_submission_and_the_attempt_after_it(
    make_job: MakeJob, backend_under_test: Backend
) -> None:
    job = make_job("import time; time.sleep(600)")
    assert backend_under_test.find(job.plan.marker) is None
    job.submit()
    found = backend_under_test.find(job.plan.marker)
    assert found is not None
    assert (found.marker, found.native_id) == (job.handle.marker, job.handle.native_id)
    assert backend_under_test.find(make_job("pass").plan.marker) is None
    assert Handle.from_dict(found.to_dict()) == found
    backend_under_test.poll([found])
    job.cancel(0)
    job.wait()
    again = backend_under_test.find(job.plan.marker)
    assert again is not None
    assert again.native_id == job.handle.native_id


def test_submitting_twice_runs_the_job_once(make_job: MakeJob) -> None:
    job = make_job(ONCE, procs=1)
    first = job.submit().handle
    second = job.submit().handle
    assert first.native_id == second.native_id
    assert job.wait().phase is Phase.SUCCEEDED
    job.submit()  # and once more when it is over
    assert job.wait().phase is Phase.SUCCEEDED
    assert job.read("ran") == b"x"


def test_two_submissions_at_the_same_time_run_the_job_once(make_job: MakeJob) -> None:
    job = make_job(ONCE, nodes=2, secrets={"TOKEN": "geheim"})
    others = [job.submit_from_another_process() for _ in range(3)]
    job.submit()
    assert [other.wait(150) for other in others] == [0, 0, 0]
    assert job.wait().phase is Phase.SUCCEEDED
    assert job.read("ran") == b"xx"  # one rank on each of two nodes


def test_the_job_outlives_the_process_that_submitted_it(make_job: MakeJob, backend_under_test: Backend) -> None:
    job = make_job(ONCE)
    assert job.submit_from_another_process(then_die=True).wait(150) == -signal.SIGKILL
    found = backend_under_test.find(job.plan.marker)
    assert found is not None
    job.handle = found
    assert job.wait().phase is Phase.SUCCEEDED


def test_cancelling_lets_the_ranks_save(make_job: MakeJob, launcher: str) -> None:
    job = make_job(
        """
        import signal, sys, time
        def save(*_):
            time.sleep(0.5)
            print("saved", flush=True)
            sys.exit(0)
        signal.signal(signal.SIGTERM, save)
        print("ready", flush=True)
        while True:
            time.sleep(0.1)
        """,
        nodes=2,
        procs=2,
        launcher=launcher,
    ).submit()
    for rank in range(4):
        job.until_log(rank, "ready")
    job.cancel(20)
    job.cancel(20)  # idempotent
    seen = job.wait()
    assert (seen.phase, seen.cause) == (Phase.CANCELLED, Cause.CANCELLED)
    assert ["saved" in job.log(rank) for rank in range(4)] == [True] * 4


def test_cancelling_kills_what_ignores_the_signal_when_the_grace_is_over(make_job: MakeJob, launcher: str) -> None:
    job = make_job(
        """
        import signal, subprocess, sys, time
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
        print("ready", flush=True)
        while True:
            time.sleep(0.1)
        """,
        procs=2,
        launcher=launcher,
    ).submit()
    for rank in range(2):
        job.until_log(rank, "ready")
    began = time.monotonic()
    job.cancel(1.5)
    seen = job.wait()
    assert (seen.phase, seen.cause) == (Phase.CANCELLED, Cause.CANCELLED)
    assert time.monotonic() - began >= 1.5


def test_a_second_cancel_can_shorten_the_grace(make_job: MakeJob) -> None:
    job = make_job(
        """
        import signal, time
        signal.signal(signal.SIGTERM, lambda *_: print("told", flush=True))
        print("ready", flush=True)
        while True:
            time.sleep(0.1)
        """
    ).submit()
    job.until_log(0, "ready")
    job.cancel(300)  # it returns at once
    job.until_log(0, "told")
    job.cancel(0)
    assert job.wait().phase is Phase.CANCELLED


def test_cancelling_what_has_ended_changes_nothing(run: RunJob) -> None:
    job, _seen = run("pass")
    job.cancel(1)
    assert job.poll().phase is Phase.SUCCEEDED


def test_a_job_can_be_cancelled_during_its_setup(make_job: MakeJob) -> None:
    job = make_job("print('never')", setup=["echo in setup; sleep 600"]).submit()
    job.until(lambda _: "in setup" in job.log(node=0))
    job.cancel(1)
    assert job.wait().phase is Phase.CANCELLED
    assert "never" not in job.log(0)


def test_the_next_attempt_finds_the_files_of_the_one_before(make_job: MakeJob, backend_under_test: Backend) -> None:
    script = """
    import os, pathlib
    marker = pathlib.Path("state.txt")
    print(marker.read_text() if marker.exists() else "fresh")
    marker.write_text("written by attempt " + os.environ["ORC_ATTEMPT"])
    raise SystemExit(1 if os.environ["ORC_ATTEMPT"] == "1" else 0)
    """
    first = make_job(script).submit()
    assert first.wait().phase is Phase.FAILED
    second = make_job(script, number=2, job_id=first.plan.attempt.job).submit()
    assert second.wait().phase is Phase.SUCCEEDED
    kept = "written by attempt 1\n" if backend_under_test.keeps_work else "fresh\n"
    assert (first.log(0), second.log(0)) == ("fresh\n", kept)
