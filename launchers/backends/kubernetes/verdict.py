"""Verdict over an attempt, from what Kubernetes says of its Job and pods and what the agents have recorded. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any

from orc.launchers.attempts.reader import AttemptRecords
from orc.launchers.backends.base import Cause, Observation, Phase
from orc.launchers.backends.kubernetes.manifests import MARGIN_S, WINDOW
from orc.launchers.backends.verdict import observe, with_cancellation, with_word

VISIBLE_S = 30.0  # a Job that was just created may not be seen yet
_OVER = ("Succeeded", "Failed")
_IMAGE = ("ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull")
# What a registry says, or the kubelet of a name, that will not be another answer later.
_NO_IMAGE = re.compile("not found|manifest unknown|denied|unauthorized|forbidden|InvalidImage|ErrImageNever", re.I)
_NO_START = ("StartError", "ContainerCannotRun", "RunContainerError", "CreateContainerError")
# Reasons of the condition DisruptionTarget that are the node's end; the rest is preemption.
_NODE_GONE = ("DeletionByTaintManager", "DeletionByPodGC")
_NO_PYTHON = (126, 127)

Item = Mapping[str, Any]
Items = Sequence[Item]
Judgement = tuple[Observation, bool]  # and whether the Job has to be deleted for it to be true


def seconds(stamp: str | None) -> float | None:
    """Return a time of Kubernetes in seconds since the epoch."""
    return datetime.fromisoformat(stamp).timestamp() if stamp else None


def _condition(owner: Item, *kinds: str) -> Item | None:
    found = (owner.get("status") or {}).get("conditions") or ()
    return next((each for each in found if each["type"] in kinds and each["status"] == "True"), None)


def _phase(pod: Item) -> str:
    return str((pod.get("status") or {}).get("phase") or "Pending")


def has_ended(job: Item) -> bool:
    """Return whether a Job is over, or about to be."""
    return _condition(job, "Complete", "Completed", "Failed", "FailureTarget", "SuccessCriteriaMet") is not None


def may_have_records(job: Item | None, pods: Items) -> bool:
    """Return whether agents may have begun."""
    if job is None or has_ended(job) or job["spec"].get("suspend"):  # Kueue suspends what it preempts
        return True
    return any(_phase(pod) != "Pending" for pod in pods)


def waiting_of(pod: Item) -> tuple[str, str]:
    """Return what a pod waits for (``image``, ``node``, ``start``; empty when it runs or has ended) and why."""
    status = pod.get("status") or {}
    if _phase(pod) != "Pending":
        return "", ""
    for each in (*(status.get("initContainerStatuses") or ()), *(status.get("containerStatuses") or ())):
        waiting = (each.get("state") or {}).get("waiting") or {}
        if (reason := str(waiting.get("reason") or "")) in _IMAGE:
            told = f"the image {each['image']} cannot be pulled: {waiting.get('message') or reason}"
            return "image" if _NO_IMAGE.search(f"{reason} {told}") else "start", told
        if reason not in ("", "ContainerCreating", "PodInitializing"):
            return "start", f"{reason}: {waiting.get('message') or ''}".rstrip(": ")
    for each in status.get("conditions") or ():
        if each["type"] == "PodScheduled" and each["status"] == "False":
            return "node", str(each.get("message") or each.get("reason") or "unschedulable")
    return "start", "the container is being made"


def judge(
    job: Item | None, pods: Items, records: AttemptRecords, now: float, submitted_at: float, complaint: str
) -> Judgement:
    """Return how an attempt is; *complaint* is what Kueue, or the Job's controller, says of pods that are not there."""
    alive = any(_phase(pod) not in _OVER for pod in pods)
    if records.complete:
        # Kueue takes the pods of what it preempts, and would start the Job once more.
        suspended = job is not None and bool(job["spec"].get("suspend"))
        return _with_pods(observe(records, alive=False), pods), suspended
    if job is None or "deletionTimestamp" in job["metadata"]:
        if not alive and job is None and now - submitted_at < VISIBLE_S and not (records.leases or records.cancel):
            return Observation(Phase.UNKNOWN, reason="the API server does not know the Job (yet)"), False
        return with_cancellation(observe(records, alive=alive, lost="the Job was deleted"), records), False
    if has_ended(job) and not alive:
        return with_cancellation(_ended(job, pods, records), records), False
    if has_ended(job) or len(records.leases) >= job["spec"]["completions"]:
        asked = records.cancel or {}
        until = float(asked.get("at", now)) + float(asked.get("grace_s", 0.0)) + MARGIN_S
        return observe(records, alive=True), now > until
    return _starting(job, pods, records, now, complaint)


def _starting(job: Item, pods: Items, records: AttemptRecords, now: float, complaint: str) -> Judgement:
    """Judge an attempt not all of whose agents have begun: all or nothing."""
    total = int(job["spec"]["completions"])
    waits = [(kind, why) for pod in pods for kind, why in [waiting_of(pod)] if kind]
    if image := next((why for kind, why in waits if kind == "image"), ""):
        return Observation(Phase.FAILED, Cause.LAUNCH, image), True
    if job["spec"].get("suspend"):
        return Observation(Phase.PENDING, reason=f"waiting for Kueue: {complaint or 'not admitted'}"), False
    missing = max(total - len(pods), 0)
    if not waits and not missing:
        return observe(records, alive=True), False
    nodes, others = ([why for kind, why in waits if (kind == "node") is is_node] for is_node in (True, False))
    why = next(filter(None, (*nodes, *others, complaint, "its pods are being made")))
    started = [seconds(pod["status"].get("startTime")) for pod in pods if pod["spec"].get("nodeName")]
    window = float((job["metadata"].get("annotations") or {}).get(WINDOW, "inf"))
    if started and now - max(at or now for at in started) > window:
        reason = f"{len(waits) + missing} of {total} pods did not start within {window:g} s: {why}"
        return Observation(Phase.FAILED, Cause.NODE_FAILURE, reason), True
    return Observation(Phase.PENDING, reason=why), False


def _with_pods(seen: Observation, pods: Items) -> Observation:
    """Return *seen*, with what Kubernetes knows of the pods where agents left no word."""
    return with_word(seen, [found for pod in pods if (found := _taken(pod)) is not None])


def _taken(pod: Item) -> tuple[Cause, str, str] | None:
    """Return why a pod was ended from outside or could not run: the cause, the reason, its node."""
    status, name, spec = pod.get("status") or {}, pod["metadata"]["name"], pod.get("spec") or {}
    node, reason = str(spec.get("nodeName") or "its node"), str(status.get("reason") or "")
    for each in status.get("containerStatuses") or ():
        ended = (each.get("state") or {}).get("terminated") or {}
        if ended.get("reason") == "OOMKilled":
            limit = ((spec["containers"][0].get("resources") or {}).get("limits") or {}).get("memory")
            most = f"its limit of {limit}" if limit else "its node had left"
            return Cause.CRASH, f"{name} took more memory than {most} (OOMKilled): ask for more `memory`", node
        if ended.get("reason") in _NO_START:
            return Cause.LAUNCH, f"{name} cannot be started: {ended.get('message') or ended['reason']}", node
    if told := _condition(pod, "DisruptionTarget"):
        cause = Cause.NODE_FAILURE if told.get("reason") in _NODE_GONE else Cause.PREEMPTED
        return cause, f"{name} was taken from {node}: {told.get('message') or told.get('reason')}", node
    if reason in ("Evicted", "Preempting", "Terminated", "NodeShutdown"):
        return Cause.PREEMPTED, f"{name} was evicted from {node}: {status.get('message') or reason}", node
    if reason == "NodeLost" or status.get("phase") == "Unknown":
        return Cause.NODE_FAILURE, f"{node} is gone, and {name} with it", node
    return None


def _ended(job: Item, pods: Items, records: AttemptRecords) -> Observation:
    """Judge an attempt whose Job is over, and not all of whose agents have left a record."""
    said = str((_condition(job, "Failed", "FailureTarget") or {}).get("message") or "its pods are gone")
    seen = _with_pods(observe(records, alive=False, lost=said), pods)
    statuses = [each for pod in pods for each in (pod.get("status") or {}).get("containerStatuses") or ()]
    ends = [(each.get("state") or {}).get("terminated") or {} for each in statuses]
    codes = [int(end.get("exitCode", 0)) for end in ends]
    if seen.phase is Phase.LOST and not seen.failed_hosts and "DisruptionTarget" in said:
        return replace(seen, cause=Cause.PREEMPTED)  # the pod is gone, and what it was taken for with it
    if records.leases or seen.phase is not Phase.LOST or seen.failed_hosts or not any(codes):
        return seen
    reason = f"the containers ended with {max(codes)} before the agents began; `kubectl logs` shows why"
    reason = next((str(end["message"]) for end in ends if end.get("message")), reason)
    if any(code in _NO_PYTHON for code in codes):
        reason = "the image has no Python that could run the agents"
    return replace(seen, phase=Phase.FAILED, cause=Cause.LAUNCH, reason=reason)
