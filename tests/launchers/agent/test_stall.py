"""What the runtime's watchdog has reported becomes part of the verdict."""

from __future__ import annotations

import json

from orc.launchers.attempts.records import merge

REPORT = """
    import json, os, pathlib, sys, time
    rank, node = os.environ["RANK"], os.environ["ORC_NODE_RANK"]
    report = {"rank": int(rank), "restart": RESTART, "summary": f"stalled: rank {rank} is at train.py:3, S3CRET"}
    pathlib.Path(os.environ["ORC_ATTEMPT_DIR"], f"node-{node}", f"stall-{rank}.json").write_text(json.dumps(report))
    if rank == "1":
        time.sleep(600)
    sys.exit(79)
"""


def script(restart=0):
    return REPORT.replace("RESTART", str(restart))


def test_a_rank_that_stalled_and_ended_is_a_crash_whose_reason_says_where(attempt):
    job = attempt(script(), nproc=2, secrets=["KEY"])
    (job.directory / "secrets.json").write_text(json.dumps({"KEY": "S3CRET"}))
    assert job.run() == 79
    record = job.exit()
    assert record["outcome"] == "crash"
    assert record["reason"] == "rank 0 exited with 79; stalled: rank 0 is at train.py:3, ***"
    assert record["first_failure"]["stall"] == "stalled: rank 0 is at train.py:3, ***"
    verdict = merge([record], 1)
    assert verdict.cause.value == "crash"
    assert verdict.reason.endswith("exited with 79; stalled: rank 0 is at train.py:3, ***")


def test_a_report_of_an_earlier_restart_is_not_told(attempt):
    job = attempt(script(restart=3))
    assert job.run() == 79
    assert job.exit()["reason"] == "rank 0 exited with 79"


def test_a_time_limit_says_what_the_run_was_stuck_at(attempt):
    job = attempt("import time; time.sleep(600)", deadline_s=1.0)
    (job.directory / "node-0").mkdir()
    report = {"rank": 0, "restart": 0, "summary": "stalled: rank 0 is at train.py:3"}
    (job.directory / "node-0/stall-0.json").write_text(json.dumps(report))  # in time, however slow the start is
    assert job.run() == 124
    assert job.exit()["reason"] == "time limit of 1 s reached; stalled: rank 0 is at train.py:3"
