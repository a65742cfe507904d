"""Of all runs of a job only the newest trains: cut off, frozen or robbed of its file system, an older one ends."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator

import pytest
from polling import until

from orc.launchers.agent.procfs import descendants, process_start, process_stat
from orc.launchers.agent.records import read_json, write_json

from .conftest import Attempt, guard_of

# A run of a job trains one sample after the other and notes each, with the time and the run, where every run does.
TRAIN = """
import os, time
fd = os.open("../samples", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
run = os.environ["ORC_ATTEMPT"] + "." + os.environ["ORC_RESTART"]
print("ready", flush=True)
for sample in range(LENGTH):
    os.write(fd, f"{run} {time.monotonic()}\\n".encode())
    time.sleep(0.02)
"""
ENDLESS = TRAIN.replace("LENGTH", "1_000_000")
SHORT = TRAIN.replace("LENGTH", "10")
TIMEOUT_S = 3.0
FENCE_S = 1.5 * TIMEOUT_S


def samples(job: Attempt) -> dict[str, list[float]]:
    """When each run trained its samples, by run."""
    found: dict[str, list[float]] = {}
    for line in (job.root / "jobs/job-1/samples").read_text().splitlines():
        run, at = line.split()
        found.setdefault(run, []).append(float(at))
    return found


def assert_one_after_the_other(job: Attempt, older: str, newer: str) -> None:
    """No sample of the older run is trained once the newer one trains."""
    seen = samples(job)
    assert seen[newer], seen.keys()
    assert max(seen[older]) < min(seen[newer])


def elsewhere(job: Attempt, node: int = 0) -> None:
    """Have the lease say that its holder runs on another machine, where nobody can look."""
    path = job.directory / f"node-{node}" / "lease.json"
    write_json(str(path), {**(read_json(str(path)) or {}), "boot_id": "of another machine"})


def successor(job: Attempt, source: str) -> Attempt:
    """The next attempt of the same job."""
    (job.root / "jobs/job-1/work/train.py").write_text(source)
    return next_attempt(job)


def children_of(pid: int) -> list[int]:
    return [p for p in descendants(pid) if process_start(p)]


@contextlib.contextmanager
def hung_file_system(job: Attempt, pid: int) -> Iterator[None]:
    """A write of the heartbeat does not return: the agent waits in open(2), as for a server that is away."""
    path = job.directory / "node-0" / f"heartbeat.json.{os.uname().nodename}.{pid}.tmp"
    while True:
        try:
            os.mkfifo(path)
            break
        except FileExistsError:
            time.sleep(0.001)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)


def test_a_run_ends_at_once_when_a_later_restart_owns_the_job(attempt) -> None:
    job = attempt(ENDLESS)
    first = job.started(owner="slurm:7")
    elsewhere(job)
    (job.root / "jobs/job-1/work/train.py").write_text(SHORT)
    second = job.start(owner="slurm:7", restart=1)
    said = first.communicate(timeout=30)[1]
    assert first.returncode == 0, said
    assert second.wait(60) == 0, second.communicate()
    assert_one_after_the_other(job, "1.0", "1.1")
    assert job.exit()["restart"] == 1
    assert job.exit()["outcome"] == "succeeded"
    gone = job.record("exit-r0.json")
    assert (gone["outcome"], gone["peer_lost"]) == ("peer", True)
    assert "attempt 1, restart 1" in gone["reason"]


def test_a_run_ends_when_the_next_attempt_owns_the_job(attempt) -> None:
    job = attempt(ENDLESS)
    first = job.started()
    elsewhere(job)
    second = successor(job, SHORT)
    assert second.run(owner="slurm:8") == 0
    assert first.wait(30) == 0
    assert_one_after_the_other(job, "1.0", "2.0")
    assert "attempt 2, restart 0" in job.exit()["reason"]


def test_an_attempt_that_comes_late_does_not_start_beside_its_successor(attempt) -> None:
    job = attempt(SHORT)
    second = next_attempt(job)
    assert second.run() == 0
    late = job.start()
    assert late.wait(30) == 0
    assert "attempt 2, restart 0" in late.communicate()[1]
    assert list(samples(job)) == ["2.0"]


def next_attempt(job: Attempt) -> Attempt:
    changes = {"attempt": 2, "marker": "orc-job-1-a2", "attempt_dir": str(job.directory.parent / "a2")}
    return Attempt(job.root, {**job.config, **changes}).write()


@pytest.mark.parametrize("asleep", ["the agent", "everything"])
def test_a_frozen_run_on_another_machine_trains_nothing_beside_its_successor(attempt, asleep: str) -> None:
    job = attempt(ENDLESS, peer_timeout_s=TIMEOUT_S)
    first = job.started(owner="slurm:7")
    elsewhere(job)
    stopped = [first.pid, *(children_of(first.pid) if asleep == "everything" else ())]
    for pid in stopped:
        os.kill(pid, signal.SIGSTOP)
    (job.root / "jobs/job-1/work/train.py").write_text(ENDLESS)
    second = job.start(owner="slurm:7", restart=1)
    until(lambda: "1.1" in samples(job), what="the first sample of the second run")
    for pid in stopped:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
    first.wait(30)  # frozen alone it had lost its ranks, and wakes up to find that the job is another's
    until(lambda: len(samples(job)["1.1"]) > 50)
    second.terminate()
    second.wait(30)
    seen = samples(job)
    late = [at for at in seen["1.0"] if at > min(seen["1.1"])]
    # Whoever was frozen with everything below it wakes with everything below it: nobody is earlier than the others.
    assert late == [] if asleep == "the agent" else len(late) <= 25, late
    assert not job.remains()


def test_a_run_whose_file_system_hangs_ends_before_its_successor_begins(attempt) -> None:
    job = attempt(ENDLESS, peer_timeout_s=TIMEOUT_S, stay_stopped=True)
    first = job.started(owner="slurm:7")
    elsewhere(job)
    (job.root / "jobs/job-1/work/train.py").write_text(SHORT)
    with hung_file_system(job, first.pid):
        until(lambda: time.time() - job.record("heartbeat.json")["at"] > 0.5 * TIMEOUT_S, what="a heartbeat that hangs")
        second = job.start(owner="slurm:7", restart=1)
        assert second.wait(60) == 0, second.communicate()
        assert process_stat(first.pid)[0] == "T", "its end would be the end of the newer run's step"
    assert_one_after_the_other(job, "1.0", "1.1")


def test_a_run_that_cannot_write_its_heartbeat_ends_although_nobody_follows_it(attempt) -> None:
    job = attempt(ENDLESS, peer_timeout_s=TIMEOUT_S)
    first = job.started()
    began = time.monotonic()
    with hung_file_system(job, first.pid):
        assert first.wait(30) == -signal.SIGKILL
    assert max(samples(job)["1.0"]) < began + FENCE_S
    until(lambda: not job.remains())


def test_a_frozen_agent_s_ranks_end_and_its_exit_record_says_why(attempt) -> None:
    job = attempt(ENDLESS, peer_timeout_s=TIMEOUT_S)
    first = job.started()
    os.kill(first.pid, signal.SIGSTOP)
    assert first.wait(30) == -signal.SIGKILL
    record = job.exit()
    assert (record["outcome"], record["peer_lost"], record["lost_node"]) == ("peer", True, 0)
    assert "has not renewed its heartbeat for 3 s" in record["reason"]
    assert not job.remains()


def test_what_was_suspended_with_everything_below_it_goes_on(attempt) -> None:
    """As a scheduler does that suspends a job, or a laptop that sleeps."""
    job = attempt(SHORT.replace("0.02", "0.3"), peer_timeout_s=TIMEOUT_S)
    first = job.started()
    everything = [first.pid, *children_of(first.pid)]
    for pid in everything:
        os.kill(pid, signal.SIGSTOP)
    deadline = time.monotonic() + FENCE_S
    until(lambda: time.monotonic() > deadline)
    for pid in everything:
        os.kill(pid, signal.SIGCONT)
    assert first.wait(60) == 0, job.node_log()


def test_a_predecessor_on_this_machine_is_ended_at_once(attempt) -> None:
    job = attempt(ENDLESS)
    first = job.started(owner="slurm:7")
    os.kill(first.pid, signal.SIGSTOP)
    (job.root / "jobs/job-1/work/train.py").write_text(SHORT)
    began = time.monotonic()
    assert job.run(owner="slurm:7", restart=1) == 0
    assert time.monotonic() - began < 30  # its peer timeout is 60 s
    assert first.wait(30) == -signal.SIGKILL
    assert_one_after_the_other(job, "1.0", "1.1")


def test_a_run_whose_guard_was_killed_gets_another(attempt) -> None:
    job = attempt(ENDLESS, peer_timeout_s=TIMEOUT_S)
    first = job.started()
    guard = until(lambda: guard_of(first.pid))
    os.kill(guard, signal.SIGKILL)
    until(lambda: guard_of(first.pid) not in (0, guard))
    os.kill(first.pid, signal.SIGSTOP)
    assert first.wait(30) == -signal.SIGKILL
    until(lambda: not job.remains())


def test_what_has_ended_needs_no_waiting(attempt) -> None:
    job = attempt("raise SystemExit(75)", peer_timeout_s=600.0)
    assert job.run(owner="slurm:7") == 75
    elsewhere(job)
    assert job.run(owner="slurm:7", restart=1) == 75
