"""Reports for `orc queue` and `orc prune`: nodes, attempts that wait, and what no live attempt needs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from orc.launchers.backends.base import Handle, Leftover, PartitionReport, QueuedJob, QueueReport
from orc.launchers.backends.kubernetes.manifests import ATTEMPT, GATE, MARKER
from orc.launchers.backends.kubernetes.verdict import has_ended, seconds, waiting_of

if TYPE_CHECKING:
    from orc.launchers.backends.kubernetes.api import Api


def report(api: Api, handles: Sequence[Handle], jobs: Mapping[str, Any], pods: Mapping[str, Any]) -> QueueReport:
    """Return the nodes, where the account may list them, and our attempts."""
    nodes = api.list_cluster("nodes")
    going = [
        pod for pod in (api.list_cluster("pods") if nodes else ()) if pod["status"]["phase"] in ("Pending", "Running")
    ]
    busy = {pod["spec"].get("nodeName") for pod in going if any("/" in device for device in _wanted(pod))}
    here = [h for h in handles if h.native_id in jobs and not has_ended(jobs[h.native_id])]
    queued = tuple(_queued(handle, jobs[handle.native_id], pods[handle.native_id]) for handle in here)
    return QueueReport((_partition(nodes, busy),) if nodes else (), queued)


def _wanted(pod: Mapping[str, Any]) -> set[str]:
    return {name for each in pod["spec"]["containers"] for name in (each.get("resources") or {}).get("limits") or ()}


def _queued(handle: Handle, job: Mapping[str, Any], pods: Sequence[Any]) -> QueuedJob:
    waits, total = [why for pod in pods for kind, why in [waiting_of(pod)] if kind], int(job["spec"]["completions"])
    queue = (job["metadata"].get("labels") or {}).get("kueue.x-k8s.io/queue-name", "")
    state = "Suspended" if job["spec"].get("suspend") else "Pending" if waits or len(pods) < total else "Running"
    return QueuedJob(handle.marker, handle.native_id, state, queue, total, waits[0] if waits else "")


def _partition(nodes: Sequence[Any], busy: Collection[str]) -> PartitionReport:
    """Return all nodes as one partition; a node is idle when no pod on it has a device."""
    able = [node["status"].get("allocatable") or {} for node in nodes]
    cpus = [int(each["cpu"].removesuffix("m")) // (1000 if each["cpu"].endswith("m") else 1) for each in able]
    usable = [not node["spec"].get("unschedulable") for node in nodes]
    idle = [ok and node["metadata"]["name"] not in busy for ok, node in zip(usable, nodes, strict=True)]
    found = Counter(f"{name}:{count}" for each in able for name, count in each.items() if "/" in name and count != "0")
    free = sum(count for count, ok in zip(cpus, idle, strict=True) if ok)
    state, gres = "up" if any(usable) else "drain", (tuple(found), tuple(found.values()))
    return PartitionReport("nodes", False, state, len(nodes), sum(idle), sum(cpus), free, None, *gres)


def leftovers(api: Api, live: Collection[str], over: Collection[str]) -> Iterator[Leftover]:
    """Yield what orc has made in the namespace and no attempt of *live* needs."""
    jobs = {job["metadata"]["name"]: job for job in api.items("jobs", ATTEMPT)}
    going = [("jobs", job) for job in jobs.values() if not has_ended(job)]  # Kubernetes deletes what has ended
    lone = [("secrets", each) for each in api.items("secrets", ATTEMPT) if each["metadata"]["name"] not in jobs]
    gates = [] if live else [("pods", pod) for pod in api.items("pods", GATE)]
    for resource, item in (*going, *lone, *gates):
        meta = item["metadata"]
        marker, at = str((meta.get("annotations") or {}).get(MARKER, "")), seconds(meta["creationTimestamp"])
        if marker not in live:
            why = "idle" if resource == "pods" else "over" if marker in over else "unknown"
            name = f"{resource}/{meta['name']}"
            yield Leftover(name, marker, f"{resource.removesuffix('s')} {meta['name']}", "there", why, at)  # type: ignore[arg-type]
