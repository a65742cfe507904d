"""What SageMaker's states and failure reasons, and the agents' records, make of an attempt."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from orc.launchers.attempts.reader import AttemptRecords
from orc.launchers.backends.base import Cause, Phase
from orc.launchers.backends.sagemaker.backend import cost_text
from orc.launchers.backends.sagemaker.failures import exit_code, split_reason
from orc.launchers.backends.sagemaker.verdict import VISIBLE_AFTER_S, Job, judge


def job(status: str = "InProgress", secondary: str = "Training", reason: str = "", **more: Any) -> Job:
    return Job("orc-digits-k3f9a2-a1", status, secondary, reason=reason, **more)


def records(*exits: dict[str, Any], nnodes: int = 1, **more: Any) -> AttemptRecords:
    return AttemptRecords(
        directory="s3://b/x",
        config={"nnodes": nnodes},
        leases={n: {"host": f"algo-{n + 1}", "restart": 0, "at": 5.0} for n in range(nnodes)},
        exits={n: {"node": n, "ended_at": 9.0, "host": f"algo-{n + 1}", **each} for n, each in enumerate(exits)},
        **more,
    )


CRASH = {
    "outcome": "crash",
    "exit_status": 42,
    "first_failure": {"rank": 1, "node": 0, "host": "algo-1", "exit_code": 42, "at": 8.0},
}
GOING_ON = {
    ("InProgress", "Starting"): (Phase.PENDING, "starting"),
    ("InProgress", "Pending"): (Phase.PENDING, "waiting for instances"),
    ("InProgress", "Downloading"): (Phase.PENDING, "downloading the data"),
    ("InProgress", "DownloadingTrainingImage"): (Phase.PENDING, "downloading the image"),
    ("InProgress", "Training"): (Phase.RUNNING, ""),
    ("InProgress", "Uploading"): (Phase.RUNNING, "uploading the model"),
    ("InProgress", "Interrupted"): (Phase.PENDING, "interrupted"),
    ("InProgress", "Restarting"): (Phase.PENDING, "restarting"),
    ("InProgress", "SomethingNew"): (Phase.RUNNING, ""),
    ("Stopping", "Stopping"): (Phase.RUNNING, "stopping"),
}


@pytest.mark.parametrize("states", GOING_ON)
def test_a_job_that_goes_on_says_where_it_is(states) -> None:
    phase, reason = GOING_ON[states]
    seen = judge(job(*states), None, age_s=1.0)
    assert seen.phase is phase
    assert seen.reason.startswith(reason)
    assert seen.cause is None


def failed(reason: str) -> Job:
    return job("Failed", "Failed", reason)


CRASHED = "rank 1 on algo-1 exited with 42"
CAPACITY = "CapacityError: Unable to provision requested ML compute capacity"
INTERNAL = "InternalServerError: We encountered an internal error. Please try again."
LIMIT = "ResourceLimitExceeded: the account-level service limit is 0"
TRACEBACK = "AlgorithmError: rank 1 exited with 42\nTraceback, exit code: 42"
NO_CAPACITY = "AlgorithmError: RuntimeError: the replay buffer has no capacity left, exit code: 42"
DISK_QUOTA = "AlgorithmError: OSError: [Errno 122] Disk quota exceeded, exit code: 1"
SAVED, OWN_LIMIT = (
    records({"outcome": "preempted", "exit_status": 75}),
    records({"outcome": "timeout", "exit_status": 124, "reason": "time limit of 60 s"}),
)
ENDS: dict[str, tuple[Job, AttemptRecords | None, Cause | None, str]] = {
    "completed": (job("Completed", "Completed"), None, None, ""),
    "stopped": (job("Stopped", "Stopped"), None, Cause.CANCELLED, "stopped"),
    "stopped while the ranks saved": (job("Stopped", "Stopped"), SAVED, Cause.CANCELLED, "stopped"),
    "crashed before it was stopped": (job("Stopped", "Stopped"), records(CRASH), Cause.CRASH, CRASHED),
    "time limit": (job("Stopped", "MaxRuntimeExceeded"), None, Cause.TIMEOUT, "time limit"),
    "waited too long": (job("Stopped", "MaxWaitTimeExceeded"), None, Cause.TIMEOUT, "max_wait"),
    "spot": (job("Stopped", "Interrupted"), None, Cause.PREEMPTED, "spot capacity"),
    "no capacity": (failed(CAPACITY), None, Cause.NODE_FAILURE, "Unable to provision"),
    "SageMaker's fault": (
        failed(INTERNAL),
        records(CRASH),
        Cause.NODE_FAILURE,
        "an error of SageMaker: We encountered",
    ),
    "image": (failed("ClientError: Cannot pull the image"), None, Cause.LAUNCH, "Cannot pull"),
    "quota": (failed(LIMIT), None, Cause.LAUNCH, "the account-level service limit"),
    "crash with records": (failed(TRACEBACK), records(CRASH), Cause.CRASH, CRASHED),
    "crash whose text names capacity, with records": (failed(NO_CAPACITY), records(CRASH), Cause.CRASH, CRASHED),
    "crash whose text names a quota, without records": (failed(DISK_QUOTA), None, Cause.CRASH, "Disk quota exceeded"),
    "crash without records": (failed(TRACEBACK), None, Cause.CRASH, "rank 1 exited with 42"),
    "asks to run again": (failed("AlgorithmError: , exit code: 75"), None, Cause.PREEMPTED, "run again"),
    "the job's own limit": (failed("AlgorithmError: x, exit code: 124"), OWN_LIMIT, Cause.TIMEOUT, "limit of 60 s"),
    "cut off": (failed("InstanceError: host went away"), records(), Cause.NODE_FAILURE, "host went away"),
}


@pytest.mark.parametrize("why", ENDS)
def test_an_end_has_its_cause(why) -> None:
    ended, found, cause, reason = ENDS[why]
    seen = judge(ended, found, age_s=1.0)
    phase = {None: Phase.SUCCEEDED, Cause.CANCELLED: Phase.CANCELLED}.get(cause, Phase.FAILED)
    assert (seen.phase, seen.cause) == (phase, cause)
    assert reason in seen.reason


def test_a_job_that_is_not_there_is_lost_only_after_a_while() -> None:
    assert judge(None, None, age_s=1.0).phase is Phase.UNKNOWN
    assert judge(None, None, age_s=VISIBLE_AFTER_S + 1).phase is Phase.LOST


def test_a_success_says_where_the_model_is_and_what_it_cost() -> None:
    made = job("Completed", "Completed", model="s3://b/model.tar.gz", billable_s=331)
    seen = judge(made, None, age_s=1.0, cost="331 billable seconds on ml.p3.16xlarge")
    assert seen.reason == "model: s3://b/model.tar.gz; 331 billable seconds on ml.p3.16xlarge"


def test_a_description_is_read_with_its_interruptions() -> None:
    at = datetime(2026, 1, 2, tzinfo=UTC)
    made = Job.of(
        {
            "TrainingJobName": "x",
            "TrainingJobStatus": "InProgress",
            "SecondaryStatus": "Starting",
            "TrainingStartTime": at,
            "SecondaryStatusTransitions": [
                {"Status": "Starting"},
                {"Status": "Training"},
                {"Status": "Interrupted"},
                {"Status": "Starting", "StatusMessage": "Launching requested ML instances"},
            ],
        }
    )
    seen = judge(made, records(heartbeats={0: {"progress": {"step": 7}}}), age_s=1.0)
    assert (seen.phase, seen.reason, seen.restarts) == (Phase.PENDING, "Launching requested ML instances", 1)
    assert (seen.hosts, seen.progress) == (("algo-1",), {"step": 7})
    assert made.started_at == at.timestamp()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("AlgorithmError: boom\n  more", ("AlgorithmError", "boom")),
        ("AlgorithmError: , exit code: 1", ("AlgorithmError", "")),
        ("something else", ("", "something else")),
        ("", ("", "")),
    ],
)
def test_failure_reasons_are_taken_apart(text, expected) -> None:
    assert split_reason(text) == expected


def test_the_exit_code_is_the_last_one_that_is_spoken_of() -> None:
    assert exit_code("AlgorithmError: exit code: 3 was seen, exit code: 42") == 42
    assert exit_code("AlgorithmError: boom") is None


def test_cost_is_billable_time_times_the_users_price() -> None:
    request = {"ResourceConfig": {"InstanceType": "ml.g5.xlarge", "InstanceCount": 2}}
    assert cost_text(1800, request, {"ml.g5.xlarge": 1.5}) == "1800 billable seconds on 2 × ml.g5.xlarge: 1.50"
    assert cost_text(1800, request, {}) == "1800 billable seconds on 2 × ml.g5.xlarge"
    assert cost_text(None, request, {"ml.g5.xlarge": 1.5}) == ""
