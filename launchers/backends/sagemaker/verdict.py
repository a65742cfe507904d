"""Verdict over an attempt, from two witnesses: SageMaker's view of the training job and the agents' records.

Pure. The agents know which rank failed first and why; SageMaker knows what happens to instances. Records reach S3 with
a delay, so while the job goes on they only add what the runtime tells; when it has ended, they are whole.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any

from orc.launchers.backends.base import Cause, Observation, Phase
from orc.launchers.backends.sagemaker.failures import exit_code, split_reason

if TYPE_CHECKING:
    from orc.launchers.attempts.reader import AttemptRecords

PREEMPT_EXIT = 75
# A training job that was just created may not be seen yet, in seconds.
VISIBLE_AFTER_S = 60.0

_WAITING = {
    "Starting": "starting",
    "Pending": "waiting for instances",
    "LaunchingMLInstances": "launching instances",
    "PreparingTrainingStack": "preparing the instances",
    "Downloading": "downloading the data",
    "DownloadingTrainingImage": "downloading the image",
    "Interrupted": "interrupted: the spot capacity was taken away; waiting for more",
    "Restarting": "restarting after an error of SageMaker",
}
_LIMITS = {
    "MaxRuntimeExceeded": "SageMaker's time limit (MaxRuntimeInSeconds) was reached",
    "MaxWaitTimeExceeded": "the longest wait for spot capacity (max_wait) was reached",
    "MaxPendingTimeExceeded": "the longest wait for instances (max_pending) was reached",
}
_NO_CAPACITY = ("capacityerror", "insufficient capacity", "insufficientinstancecapacity", "no capacity")
_QUOTA = ("resourcelimitexceeded", "resource limit", "quota", "service limit")
_SPOT = ("spot interruption", "interrupted by spot", "spot instance interruption")


@dataclass(frozen=True)
class Job:
    """A training job: its row in a list, and what only a description has."""

    name: str
    status: str  # InProgress, Completed, Failed, Stopping, Stopped
    secondary: str
    started_at: float | None = None
    ended_at: float | None = None
    reason: str = ""  # FailureReason
    message: str = ""  # of the newest transition
    interruptions: int = 0
    billable_s: int | None = None
    model: str = ""  # where the model is in S3

    @property
    def ended(self) -> bool:
        """True for a status that does not change any more."""
        return self.status in ("Completed", "Failed", "Stopped")

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> Job:
        """From an answer to ListTrainingJobs or DescribeTrainingJob."""
        transitions = data.get("SecondaryStatusTransitions") or []
        names = [str(each.get("Status")) for each in transitions]
        return cls(
            str(data["TrainingJobName"]),
            str(data["TrainingJobStatus"]),
            str(data.get("SecondaryStatus") or ""),
            _seconds(data.get("TrainingStartTime")),
            _seconds(data.get("TrainingEndTime")),
            str(data.get("FailureReason") or ""),
            str(transitions[-1].get("StatusMessage") or "") if transitions else "",
            sum(name in ("Interrupted", "Restarting") for name in names),
            data.get("BillableTimeInSeconds"),
            str((data.get("ModelArtifacts") or {}).get("S3ModelArtifacts") or ""),
        )


def _seconds(value: Any) -> float | None:
    return value.timestamp() if isinstance(value, datetime) else None


def judge(job: Job | None, records: AttemptRecords | None, *, age_s: float, cost: str = "") -> Observation:
    """Return the observation of an attempt, *age_s* seconds after its submission; *cost* is added to its reason."""
    if job is None:
        if age_s < VISIBLE_AFTER_S:
            return Observation(Phase.UNKNOWN, reason="SageMaker does not know the training job (yet)")
        return Observation(Phase.LOST, Cause.NODE_FAILURE, "SageMaker does not know the training job any more")
    if not job.ended:
        return _going_on(job, records)
    phase, cause, reason = _end(job, records)
    if cost:
        reason = f"{reason}; {cost}" if reason else cost
    verdict = records.verdict if records else None
    return Observation(
        phase,
        cause,
        reason,
        exit=verdict,
        ended_at=job.ended_at or (verdict.ended_at if verdict else None),
        **_common(job, records),
    )


def _common(job: Job, records: AttemptRecords | None) -> dict[str, Any]:
    return {
        "hosts": records.hosts if records else (),
        "started_at": (records.started_at if records else None) or job.started_at,
        "restarts": max(job.interruptions, records.restart if records else 0),
        "progress": records.progress if records else {},
    }


def _going_on(job: Job, records: AttemptRecords | None) -> Observation:
    common = _common(job, records)
    if job.status == "Stopping":
        return Observation(Phase.RUNNING, reason="stopping", **common)
    if job.secondary in _WAITING:
        message = job.message if job.secondary in ("Starting", "Pending") else ""
        return Observation(Phase.PENDING, reason=message or _WAITING[job.secondary], **common)
    words = {"Uploading": "uploading the model", "MaxRuntimeExceeded": _LIMITS["MaxRuntimeExceeded"]}
    return Observation(Phase.RUNNING, reason=words.get(job.secondary, ""), **common)


def _end(job: Job, records: AttemptRecords | None) -> tuple[Phase, Cause | None, str]:
    verdict = records.verdict if records else None
    if job.status == "Completed":
        return Phase.SUCCEEDED, None, f"model: {job.model}" if job.model else ""
    if job.status == "Stopped":
        if job.secondary in _LIMITS:
            return Phase.FAILED, Cause.TIMEOUT, _LIMITS[job.secondary]
        if job.secondary == "Interrupted":
            return Phase.FAILED, Cause.PREEMPTED, "the spot capacity was taken away"
        if verdict is not None and verdict.complete and verdict.cause in (Cause.CRASH, Cause.LAUNCH):
            return Phase.FAILED, verdict.cause, verdict.reason  # it was over before it was stopped
        return Phase.CANCELLED, Cause.CANCELLED, "stopped at SageMaker"
    return _failure(job, records)


def _failure(job: Job, records: AttemptRecords | None) -> tuple[Phase, Cause, str]:
    verdict = records.verdict if records else None
    kind, line = split_reason(job.reason)
    # Of an `AlgorithmError` the text is that of the training: its capacity or quota is none of SageMaker.
    low = job.reason.lower() if kind != "AlgorithmError" else ""
    if any(word in low for word in _NO_CAPACITY):
        return Phase.FAILED, Cause.NODE_FAILURE, line or "there is no capacity of this instance type now"
    if any(word in low for word in _SPOT):
        return Phase.FAILED, Cause.PREEMPTED, line or "the spot capacity was taken away"
    if kind == "InternalServerError":
        return Phase.FAILED, Cause.NODE_FAILURE, f"an error of SageMaker: {line}"
    if verdict is not None and not verdict.succeeded and verdict.cause is not None:
        phase = Phase.CANCELLED if verdict.cause is Cause.CANCELLED else Phase.FAILED
        return phase, verdict.cause, verdict.reason
    if any(word in low for word in _QUOTA) or kind == "ClientError":
        return Phase.FAILED, Cause.LAUNCH, line or job.reason
    code = exit_code(job.reason)
    if code == PREEMPT_EXIT:
        return Phase.FAILED, Cause.PREEMPTED, line or "the ranks have saved and ask to be run again"
    if records is not None and records.leases and verdict is None and kind != "AlgorithmError":
        return Phase.FAILED, Cause.NODE_FAILURE, line or "the agents were cut off"
    return Phase.FAILED, Cause.CRASH, line or (f"exit code {code}" if code is not None else "failed")
