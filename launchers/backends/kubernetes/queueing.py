"""Reports for `orc queue` and `orc prune`: nodes, attempts that wait, and what no live attempt needs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from orc.launchers.backends.base import Handle, Leftover, PartitionReport, QueuedJob, QueueReport
from orc.launchers.backends.kubernetes.api import Api
from orc.launchers.backends.kubernetes.manifests import ATTEMPT, GATE, MARKER, OWNED
from orc.launchers.backends.kubernetes.verdict import has_ended, seconds, waiting_of
from orc.launchers.containers.http import unless_refused
from orc.launchers.errors import LaunchError

COMPLAINTS = 10  # attempts without pods that are asked about in one look


def report(api: Api, handles: Sequence[Handle], jobs: Mapping[str, Any], pods: Mapping[str, Any]) -> QueueReport:
    """Return the nodes, where the account may list them, and our attempts."""
    said, nodes = complaints(api, jobs, pods), api.list_cluster("nodes")
    every = api.list_cluster("pods") if nodes else ()
    going = [pod for pod in every if pod["status"]["phase"] in ("Pending", "Running")]
    busy = {pod["spec"].get("nodeName") for pod in going if any("/" in device for device in _wanted(pod))}
    here = [h for h in handles if h.native_id in jobs and not has_ended(jobs[h.native_id])]
    queued = tuple(_queued(h, jobs[h.native_id], pods[h.native_id], said.get(h.native_id, "")) for h in here)
    return QueueReport((_partition(nodes, busy),) if nodes else (), queued)


def _wanted(pod: Mapping[str, Any]) -> set[str]:
    return {name for each in pod["spec"]["containers"] for name in (each.get("resources") or {}).get("limits") or ()}


def _queued(handle: Handle, job: Mapping[str, Any], pods: Sequence[Any], said: str) -> QueuedJob:
    waits, total = [why for pod in pods for kind, why in [waiting_of(pod)] if kind], int(job["spec"]["completions"])
    queue = (job["metadata"].get("labels") or {}).get("kueue.x-k8s.io/queue-name", "")
    state = "Suspended" if job["spec"].get("suspend") else "Pending" if waits or len(pods) < total else "Running"
    return QueuedJob(handle.marker, handle.native_id, state, queue, total, waits[0] if waits else said)


def _partition(nodes: Sequence[Any], busy: Collection[str]) -> PartitionReport:
    """Return all nodes as one partition; a node is idle when no pod on it has a device."""
    able = [node["status"].get("allocatable") or {} for node in nodes]
    cpus = [int(each["cpu"].removesuffix("m")) // (1000 if each["cpu"].endswith("m") else 1) for each in able]
    usable = [not node["spec"].get("unschedulable") for node in nodes]
    idle = [ok and node["metadata"]["name"] not in busy for ok, node in zip(usable, nodes, strict=True)]
    free, most = sum(count for count, ok in zip(cpus, idle, strict=True) if ok), max(cpus, default=0)
    state, found = "up" if any(usable) else "drain", devices(nodes)
    gres = (tuple(found), tuple(found.values()))
    return PartitionReport("nodes", False, state, len(nodes), sum(idle), sum(cpus), free, None, *gres, most)


def devices(nodes: Sequence[Any]) -> Counter[str]:
    """Return how many nodes have how many of a device: ``nvidia.com/gpu:8``."""
    able = (item for node in nodes for item in (node["status"].get("allocatable") or {}).items())
    return Counter(f"{name}:{count}" for name, count in able if "/" in name and count != "0")


def complaints(api: Api, jobs: Mapping[str, Any], pods: Mapping[str, Any]) -> dict[str, str]:
    """Return why the pods of some Jobs are not there: what Kueue says, or the controller of the Job."""
    bare = [(n, j) for n, j in jobs.items() if len(pods[n]) < j["spec"]["completions"] and not has_ended(j)]
    return {n: (_of_kueue if job["spec"].get("suspend") else _of_controller)(api, job) for n, job in bare[:COMPLAINTS]}


def _of_kueue(api: Api, job: Mapping[str, Any]) -> str:
    owner = next(iter(job["metadata"].get("ownerReferences") or ()), job["metadata"])  # the JobSet, where there is one
    found: list[Any] = []
    with suppress(LaunchError):  # no Kueue, or the account may not see
        found = list(api.items("workloads", f"kueue.x-k8s.io/job-uid={owner['uid']}"))
    told = [each for one in found for each in (one.get("status") or {}).get("conditions") or ()]
    reasons = [str(c.get("message") or "") for c in told if (c["type"], c["status"]) == ("QuotaReserved", "False")]
    return reasons[0] if reasons else ""


def _of_controller(api: Api, job: Mapping[str, Any]) -> str:
    query = {"fieldSelector": f"involvedObject.name={job['metadata']['name']},type=Warning", "limit": 50}
    events = api.request("GET", api.path("events"), query)["items"]
    said = sorted((str(event.get("lastTimestamp") or ""), str(event.get("message") or "")) for event in events)
    return said[-1][1] if said else ""


def leftovers(api: Api, kinds: Sequence[str], live: Collection[str], over: Collection[str]) -> Iterator[Leftover]:
    """Yield what orc has made in the namespace and no attempt of *live* needs."""
    jobs = [(kinds[0], job) for job in api.items(kinds[0], ATTEMPT)]
    with unless_refused(403, 404):  # of the other kind there may be none
        jobs += [(kinds[1], job) for job in api.items(kinds[1], ATTEMPT)]
    jobs = [(kind, job) for kind, job in jobs if "ownerReferences" not in job["metadata"]]  # not those of a JobSet
    names = {job["metadata"]["name"] for _, job in jobs}
    going = [(kind, job) for kind, job in jobs if not has_ended(job)]  # Kubernetes deletes what has ended
    owned = [(kind, each) for kind in OWNED for each in api.items(kind, ATTEMPT)]
    lone = [(kind, each) for kind, each in owned if each["metadata"]["name"] not in names]
    gates = [] if live else [("pods", pod) for pod in api.items("pods", GATE)]
    for kind, item in (*going, *lone, *gates):
        meta = item["metadata"]
        marker, at = str((meta.get("annotations") or {}).get(MARKER, "")), seconds(meta["creationTimestamp"])
        if marker not in live:
            why: Any = "idle" if kind == "pods" else "over" if marker in over else "unknown"
            name = meta["name"]
            yield Leftover(f"{kind}/{name}", marker, f"{kind.removesuffix('s')} {name}", "there", why, at)
