"""What Kubernetes says of Jobs and pods, and what it means for an attempt. No cluster."""

from __future__ import annotations

from typing import Any

import pytest

from orc.launchers.attempts.reader import AttemptRecords
from orc.launchers.backends.base import Cause, Observation, Phase
from orc.launchers.backends.kubernetes.verdict import judge, may_have_records

NOW = 1_800_000_000.0
LEASES = {0: {"host": "pod-0", "at": NOW - 100}, 1: {"host": "pod-1", "at": NOW - 100}}
BEGUN = AttemptRecords("/a", {"nnodes": 2}, leases=LEASES)


def job(*conditions: str, suspend: bool = False, message: str = "") -> dict[str, Any]:
    status = [{"type": each, "status": "True", "message": message} for each in conditions]
    meta = {"name": "j", "annotations": {"orc-launch/start-within": "600"}}
    return {"metadata": meta, "spec": {"completions": 2, "suspend": suspend}, "status": {"conditions": status}}


def pod(number: int, phase: str = "Running", *, state: Any = None, why: Any = None, **status: Any) -> dict[str, Any]:
    each = [{"image": "img", "state": state}] if state else []
    spec = {"nodeName": f"node-{number}", "containers": [{"resources": {"limits": {"memory": "4Gi"}}}]}
    found = {"phase": phase, "containerStatuses": each, "conditions": [why] if why else [], **status}
    return {"metadata": {"name": f"j-{number}"}, "spec": spec, "status": found}


def disruption(reason: str) -> dict[str, str]:
    return {"type": "DisruptionTarget", "status": "True", "reason": reason, "message": f"because of {reason}"}


def look(
    job: Any, pods: list[Any], records: AttemptRecords = BEGUN, *, age: float = 500, complaint: str = ""
) -> tuple[Observation, bool]:
    return judge(job, pods, records, NOW, NOW - age, complaint)


NONE = AttemptRecords("/a")
OUT_OF_MEMORY = {"terminated": {"exitCode": 137, "reason": "OOMKilled"}}
NO_PYTHON = {"terminated": {"exitCode": 128, "reason": "StartError", "message": 'exec: "python3": not found'}}
UNSCHEDULABLE = {
    "type": "PodScheduled",
    "status": "False",
    "message": "0/8 nodes are available: 8 Insufficient nvidia.com/gpu.",
}


def unplaced(number: int) -> dict[str, Any]:
    made = pod(number, "Pending", why=UNSCHEDULABLE)
    del made["spec"]["nodeName"]
    return made


@pytest.mark.parametrize(
    ("pods", "phase", "cause", "reason"),
    [
        ([pod(0, "Failed", state=OUT_OF_MEMORY)], Phase.FAILED, Cause.CRASH, "more memory than its limit of 4Gi"),
        ([pod(0, "Failed", state=NO_PYTHON)], Phase.FAILED, Cause.LAUNCH, '"python3": not found'),
        ([pod(0, "Failed", reason="Evicted", message="low on memory")], Phase.FAILED, Cause.PREEMPTED, "low on memory"),
        (
            [pod(0, "Failed", why=disruption("PreemptionByScheduler"))],
            Phase.FAILED,
            Cause.PREEMPTED,
            "taken from node-0",
        ),
        (
            [pod(0, "Failed", why=disruption("EvictionByEvictionAPI"))],
            Phase.FAILED,
            Cause.PREEMPTED,
            "taken from node-0",
        ),
        ([pod(0, "Failed", why=disruption("DeletionByPodGC"))], Phase.LOST, Cause.NODE_FAILURE, "taken from node-0"),
        ([pod(0, "Failed", why=disruption("DeletionByTaintManager"))], Phase.LOST, Cause.NODE_FAILURE, "node-0"),
        ([pod(0, "Failed", reason="NodeLost")], Phase.LOST, Cause.NODE_FAILURE, "node-0 is gone"),
        ([], Phase.LOST, Cause.PREEMPTED, "Pod x has condition DisruptionTarget"),
    ],
)
def test_an_attempt_whose_agents_left_no_word_ended_as_kubernetes_says(pods, phase, cause, reason) -> None:
    seen, end = look(job("Failed", message="Pod x has condition DisruptionTarget"), pods)
    assert (seen.phase, seen.cause, end) == (phase, cause, False)
    assert reason in seen.reason
    assert seen.failed_hosts == (("node-0",) if cause is Cause.NODE_FAILURE and pods else ())


def test_what_the_agents_have_recorded_goes_before_what_became_of_the_pods() -> None:
    exits = {n: {"node": n, "outcome": "crash", "exit_status": 42, "reason": "rank 1 exited with 42"} for n in (0, 1)}
    records = AttemptRecords("/a", {"nnodes": 2}, leases=LEASES, exits=exits)
    seen, end = look(job("Failed"), [pod(0, "Failed", why=disruption("EvictionByEvictionAPI"))], records)
    assert (seen.phase, seen.cause, end) == (Phase.FAILED, Cause.CRASH, False)
    preempted = job(suspend=True)
    assert may_have_records(preempted, [])
    _, end = look(preempted, [], records)
    assert end  # Kueue would start it once more
    assert not may_have_records(job(), [pod(0, "Pending")])


def test_pods_that_were_told_to_end_because_another_failed_were_not_preempted() -> None:
    records = AttemptRecords("/a", {"nnodes": 2}, leases=LEASES, exits={1: {"node": 1, "outcome": "preempted"}})
    seen, _ = look(job("Failed"), [pod(0, "Failed", state=OUT_OF_MEMORY), pod(1, "Failed")], records)
    assert (seen.phase, seen.cause) == (Phase.FAILED, Cause.CRASH)
    seen, _ = look(job("Failed"), [pod(0, "Failed", why=disruption("DeletionByPodGC"))], records)
    assert (seen.phase, seen.cause, seen.failed_hosts) == (Phase.LOST, Cause.NODE_FAILURE, ("node-0",))


def test_pods_that_no_node_can_take_wait_with_the_schedulers_own_words() -> None:
    seen, end = look(job(), [unplaced(0), unplaced(1)], NONE, age=86400)
    assert (seen.phase, end) == (Phase.PENDING, False)
    assert seen.reason == "0/8 nodes are available: 8 Insufficient nvidia.com/gpu."


@pytest.mark.parametrize(
    ("since", "phase"), [("2027-01-15T07:55:00Z", Phase.PENDING), ("2027-01-15T07:45:00Z", Phase.FAILED)]
)
def test_a_part_that_does_not_start_ends_the_attempt_after_its_window(since, phase) -> None:
    seen, end = look(job(), [pod(0, startTime=since), unplaced(1)], NONE, age=900)
    assert (seen.phase, end) == (phase, phase is Phase.FAILED)
    assert "Insufficient nvidia.com/gpu" in seen.reason
    if end:
        assert seen.cause is Cause.NODE_FAILURE
        assert seen.reason.startswith("1 of 2 pods did not start within 600 s: 0/8 nodes")


@pytest.mark.parametrize("reason", ["ErrImagePull", "ImagePullBackOff", "InvalidImageName"])
def test_an_image_that_cannot_be_pulled_ends_the_attempt_at_once(reason) -> None:
    later = {"waiting": {"reason": "ErrImagePull", "message": "connection reset by peer"}}
    seen, end = look(job(), [pod(0), pod(1, "Pending", state=later)], NONE)
    assert (seen.phase, end) == (Phase.PENDING, False)  # it may come
    waiting = {"waiting": {"reason": reason, "message": "manifest unknown"}}
    seen, end = look(job(), [pod(0), pod(1, "Pending", state=waiting)], NONE)
    assert (seen.phase, seen.cause, end) == (Phase.FAILED, Cause.LAUNCH, True)
    assert seen.reason == "the image img cannot be pulled: manifest unknown"


def test_pods_that_cannot_be_created_wait_with_what_the_controller_says() -> None:
    seen, _ = look(job(), [], NONE, complaint="exceeded quota: compute")
    assert (seen.phase, seen.reason) == (Phase.PENDING, "exceeded quota: compute")
    seen, _ = look(job(suspend=True), [], NONE)
    assert (seen.phase, seen.reason) == (Phase.PENDING, "waiting for Kueue: not admitted")


def test_a_job_that_is_gone_is_not_believed_at_once_and_was_cancelled_if_that_was_asked() -> None:
    assert look(None, [], NONE, age=3)[0].phase is Phase.UNKNOWN
    seen, _ = look(None, [], NONE, age=300)
    assert (seen.phase, seen.reason) == (Phase.LOST, "the Job was deleted")
    asked = AttemptRecords("/a", {"nnodes": 2}, cancel={"at": NOW, "grace_s": 5.0})
    assert look(None, [], asked, age=3)[0].phase is Phase.CANCELLED
    assert look(None, [pod(0)], asked)[0].phase is not Phase.CANCELLED  # one still saves


@pytest.mark.parametrize(("at", "end"), [(NOW - 10, False), (NOW - 40, True)])
def test_agents_that_do_not_end_after_the_grace_are_ended_with_their_job(at, end) -> None:
    records = AttemptRecords("/a", {"nnodes": 2}, leases=LEASES, cancel={"at": at, "grace_s": 5.0})
    seen, ends = look(job(), [pod(0), pod(1)], records)
    assert (seen.phase, ends) == (Phase.RUNNING, end)


def test_containers_that_end_before_their_agents_begin_are_a_failed_launch() -> None:
    ended = {"terminated": {"exitCode": 1, "reason": "Error"}}
    seen, _ = look(job("Failed"), [pod(0, "Failed", state=ended)], NONE)
    assert (seen.phase, seen.cause) == (Phase.FAILED, Cause.LAUNCH)
    assert "ended with 1 before the agents began" in seen.reason
