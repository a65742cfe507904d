"""Exactly one copy of a node's agent reaches user code."""

from __future__ import annotations

import json
import multiprocessing
import os
from pathlib import Path

from orc.launchers.agent.procfs import identity, is_running
from orc.launchers.agent.records import create_json

COUNT = """
import os
fd = os.open("../ran", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
os.write(fd, (os.environ["ORC_RESTART"] + " ").encode())
"""
# The same, and asks to be run again.
AGAIN = COUNT + "raise SystemExit(75)\n"


def test_of_many_copies_one_runs_and_the_others_say_who_holds_the_lease(attempt):
    job = attempt(COUNT)
    copies = [job.start(owner=f"copy:{i}") for i in range(6)]
    said = [copy.communicate(timeout=60)[1] for copy in copies]
    codes = sorted(copy.returncode for copy in copies)
    assert codes == [0, *[76] * 5]
    assert (job.root / "jobs/job-1/ran").read_text() == "0 "
    winner = job.record("lease.json")["owner"]
    assert all(f"held by {winner}" in text for copy, text in zip(copies, said, strict=True) if copy.returncode == 76)


def test_a_later_restart_by_the_same_owner_takes_over_and_keeps_the_earlier_record(attempt):
    job = attempt(AGAIN)
    assert job.run(owner="slurm:7") == 75
    assert job.run(owner="slurm:7", restart=2) == 75
    assert (job.root / "jobs/job-1/ran").read_text() == "0 2 "
    assert job.exit()["restart"] == 2
    assert job.record("exit-r0.json")["restart"] == 0
    assert job.record("lease.json")["restart"] == 2


def test_an_earlier_restart_and_another_owner_are_refused(attempt):
    job = attempt(COUNT)
    assert job.run(owner="slurm:7", restart=2) == 0
    assert job.run(owner="slurm:7", restart=1) == 76
    assert job.run(owner="slurm:8", restart=3) == 76
    assert (job.root / "jobs/job-1/ran").read_text() == "2 "


def test_what_has_succeeded_is_not_run_again_by_a_scheduler_that_forgot(attempt):
    job = attempt(COUNT)
    assert job.run(owner="slurm:7") == 0
    before = job.exit()
    assert job.run(owner="slurm:7", restart=1) == 0
    assert job.run(owner="slurm:8", restart=1) == 76
    assert (job.root / "jobs/job-1/ran").read_text() == "0 "
    assert job.exit() == before


def test_of_many_copies_of_the_same_restart_one_runs(attempt):
    job = attempt(AGAIN)
    assert job.run(owner="slurm:7") == 75
    copies = [job.start(owner="slurm:7", restart=1) for _ in range(5)]
    for copy in copies:
        copy.communicate(timeout=60)
    assert sorted(copy.returncode for copy in copies) == [75, *[76] * 4]
    assert (job.root / "jobs/job-1/ran").read_text() == "0 1 "


def test_one_of_many_creators_wins_and_readers_never_see_a_part(tmp_path: Path):
    path = str(tmp_path / "lease.json")
    barrier = multiprocessing.get_context("fork").Barrier(8)
    wins = multiprocessing.get_context("fork").Value("i", 0)

    def create(number: int) -> None:
        barrier.wait()
        if create_json(path, {"owner": number, "padding": "x" * 100_000}):
            with wins.get_lock():
                wins.value += 1

    creators = [multiprocessing.get_context("fork").Process(target=create, args=(i,)) for i in range(8)]
    for creator in creators:
        creator.start()
    while any(creator.is_alive() for creator in creators):
        assert not os.path.exists(path) or len(json.loads(Path(path).read_text())["padding"]) == 100_000
    for creator in creators:
        creator.join()
        assert creator.exitcode == 0
    assert wins.value == 1
    assert os.listdir(tmp_path) == ["lease.json"]


def test_a_lease_tells_a_process_from_a_later_one_with_its_number():
    me = identity()
    assert is_running(me["pid"], me["pid_start"], me["boot_id"])
    assert not is_running(me["pid"], "1", me["boot_id"])
    assert not is_running(me["pid"], me["pid_start"], "another boot")
