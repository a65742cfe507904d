"""Nodes of this machine: a scheduler, a controller of Jobs, and pods as process trees with volumes of their own."""

from __future__ import annotations

import base64
import copy
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from kubernetes_store import GROUPS, KINDS, ApiError, Store, now

NAMESPACES = ("--user", "--map-root-user", "--mount", "--pid", "--uts", "--fork", "--mount-proc", "--kill-child")
# A container sees an empty /mnt and /run, and what is mounted. Words: host name; kind, source, path of each volume.
ENTER = """\
mount -t tmpfs tmpfs /mnt && mount -t tmpfs tmpfs /run && hostname "$1" || exit 99
shift
while [ "$1" != -- ]; do
  if [ -d "$2" ]; then mkdir -p "$3"; elif [ ! -e "$3" ]; then mkdir -p "${3%/*}" && : >"$3"; fi
  mount --bind "$2" "$3" || exit 99
  [ "$1" != ro ] || mount -o remount,bind,ro "$3" || exit 99
  shift 3
done
shift
cd / && exec "$@"
"""
ENDED = ("Succeeded", "Failed")


def condition(kind: str, status: str = "True", reason: str = "", message: str = "") -> dict[str, Any]:
    return {"type": kind, "status": status, "reason": reason, "message": message, "lastTransitionTime": now()}


def put_condition(item: dict[str, Any], made: dict[str, Any]) -> None:
    old = item.setdefault("status", {}).setdefault("conditions", [])
    same = [c for c in old if c["type"] == made["type"]]
    if same and (same[0]["status"], same[0]["message"]) == (made["status"], made["message"]):
        return
    item["status"]["conditions"] = [*(c for c in old if c["type"] != made["type"]), made]


def quantity(text: str) -> float:
    units = {"m": 1e-3, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40, "k": 1e3, "M": 1e6, "G": 1e9}
    unit = next((u for u in sorted(units, key=len, reverse=True) if text.endswith(u)), "")
    return float(text.removesuffix(unit)) * units.get(unit, 1.0)


class Cluster:
    """Controllers over a store: one thread that looks whenever something has changed."""

    def __init__(self, store: Store, home: Path) -> None:
        self.store, self.home = store, home
        self.processes: dict[str, Process] = {}
        self.dead_nodes: set[str] = set()
        self.queues: dict[str, dict[str, float]] = {}  # quotas of the LocalQueues of Kueue
        self.missing_images = ("missing/",)
        self.names: list[str] = []  # lines of /etc/hosts: what the DNS would answer for headless Services
        self.addresses = 0
        self.stopped = threading.Event()
        self.thread = threading.Thread(target=self.run, daemon=True)
        self.thread.start()

    def run(self) -> None:
        seen = 0
        while not self.stopped.is_set():
            with self.store.changed:
                if self.store.version == seen:
                    self.store.changed.wait(0.1)
                seen = self.store.version
            for each in (self.kueue, self.jobsets, self.jobs, self.schedule, self.kubelets):
                with suppress(ApiError):  # it has gone meanwhile
                    each()

    def stop(self) -> None:
        self.stopped.set()
        self.thread.join()
        for process in self.processes.values():
            process.kill()

    def event(self, item: Mapping[str, Any], reason: str, message: str) -> None:
        """Note a warning about an object, once."""
        meta = item["metadata"]
        about = {
            "kind": item.get("kind", "Pod"),
            "namespace": meta["namespace"],
            "name": meta["name"],
            "uid": meta["uid"],
        }
        body = {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {"name": f"{meta['name']}.{reason.lower()}"},
            "count": 1,
            "involvedObject": about,
            "reason": reason,
            "message": message,
            "type": "Warning",
            "lastTimestamp": now(),
        }
        with suppress(ApiError):
            self.store.create("events", meta["namespace"], body)

    # -- Kueue: all pods of a suspended Job, or none

    def kueue(self) -> None:
        """Admit suspended Jobs and JobSets of queues, in their order, as far as their quotas go."""
        for resource in ("jobs", "jobsets"):
            for item in self.store.list(resource):
                meta = item["metadata"]
                if (queue := meta.get("labels", {}).get("kueue.x-k8s.io/queue-name")) is None:
                    continue
                name = f"{resource[:-1]}-{meta['name']}"
                if name not in [w["metadata"]["name"] for w in self.store.list("workloads", meta["namespace"])]:
                    owner = {"apiVersion": "v1", "kind": KINDS[resource], "name": meta["name"], "uid": meta["uid"]}
                    about = {
                        "name": name,
                        "labels": {"kueue.x-k8s.io/job-uid": meta["uid"]},
                        "ownerReferences": [owner],
                    }
                    body = {"apiVersion": "kueue.x-k8s.io/v1beta1", "kind": "Workload", "metadata": about}
                    self.store.create("workloads", meta["namespace"], {**body, "spec": {"queueName": queue}})
                if item["spec"].get("suspend"):
                    self.admit(resource, item, queue, name)

    def admit(self, resource: str, item: dict[str, Any], queue: str, workload: str) -> None:
        space, why = item["metadata"]["namespace"], f"LocalQueue {queue} doesn't exist"
        if queue in self.queues:
            why = ""
            for what, most in self.queues[queue].items():
                short = total(item, what) + self.used(queue, what) - most
                if short > 0:
                    flavor = f"insufficient unused quota for {what} in flavor default, {short:g} more needed"
                    why = f"couldn't assign flavors to pod set main: {flavor}"
        state = ("False", "Pending", why) if why else ("True", "QuotaReserved", "Quota reserved")
        self.store.update("workloads", space, workload, lambda i: put_condition(i, condition("QuotaReserved", *state)))
        if not why:
            self.store.update(resource, space, item["metadata"]["name"], lambda i: i["spec"].update(suspend=False))

    def used(self, queue: str, what: str) -> float:
        every = [item for resource in ("jobs", "jobsets") for item in self.store.list(resource)]
        own = [i for i in every if i["metadata"].get("labels", {}).get("kueue.x-k8s.io/queue-name") == queue]
        return sum(total(i, what) for i in own if not i["spec"].get("suspend") and not over(i))

    # -- the controller of JobSets

    def jobsets(self) -> None:
        """Make the Service and the Jobs of each JobSet, and end it as they end."""
        for each in self.store.list("jobsets"):
            meta, spec = each["metadata"], each["spec"]
            space, name = meta["namespace"], meta["name"]
            owner = {"apiVersion": GROUPS["jobsets"], "kind": "JobSet", "name": name, "uid": meta["uid"]}
            mark = {"jobset.sigs.k8s.io/jobset-name": name}
            if over(each):
                continue
            if name not in [s["metadata"]["name"] for s in self.store.list("services", space)]:
                body = {"apiVersion": "v1", "kind": "Service", "metadata": {"name": name, "ownerReferences": [owner]}}
                self.store.create("services", space, {**body, "spec": {"clusterIP": "None", "selector": mark}})
            jobs = {j["metadata"]["name"]: j for j in self.store.list("jobs", space)}
            for part in spec["replicatedJobs"]:
                child, given = f"{name}-{part['name']}-0", copy.deepcopy(part["template"])
                template, suspend = given["spec"]["template"], bool(spec.get("suspend"))
                if child not in jobs:
                    template["spec"]["subdomain"] = name
                    template.setdefault("metadata", {}).setdefault("labels", {}).update(mark)
                    about = {**given.get("metadata", {}), "name": child, "ownerReferences": [owner]}
                    about["labels"] = {**about.get("labels", {}), **mark}
                    body = {"apiVersion": "batch/v1", "kind": "Job", "metadata": about}
                    self.store.create("jobs", space, {**body, "spec": {**given["spec"], "suspend": suspend}})
                elif jobs[child]["spec"].get("suspend", False) != suspend:
                    self.store.update("jobs", space, child, lambda i, s=suspend: i["spec"].update(suspend=s))
                elif ends := over(jobs[child]):
                    made = condition("Completed" if "Complete" in ends else "Failed", message="a job has ended")
                    self.store.update("jobsets", space, name, lambda i, m=made: put_condition(i, m))

    # -- the controller of Jobs

    def jobs(self) -> None:
        for job in self.store.list("jobs"):
            self.job(job)

    def job(self, job: dict[str, Any]) -> None:
        meta, spec = job["metadata"], job["spec"]
        space, name = meta["namespace"], meta["name"]
        pods = [
            p
            for p in self.store.list("pods", space)
            if meta["uid"] in [o["uid"] for o in p["metadata"].get("ownerReferences", ())]
        ]
        active = [p for p in pods if p["status"]["phase"] not in ENDED]
        if over(job):
            return
        said = {c["type"] for c in job.get("status", {}).get("conditions", ()) if c["status"] == "True"}
        failed = [p for p in pods if p["status"]["phase"] == "Failed"]
        done = sum(p["status"]["phase"] == "Succeeded" for p in pods)
        made: list[dict[str, Any]] = []
        if spec.get("suspend"):
            made.append(condition("Suspended", message="Job suspended"))
        elif failed or "FailureTarget" in said:
            reason, message = why_failed(spec, failed[0], space) if failed else ("", "")
            made.append(condition("FailureTarget", reason=reason, message=message))
            if not active:
                made.append(condition("Failed", reason=reason, message=message))
        elif done == spec["completions"]:
            made.append(condition("Complete"))
        else:
            have = {p["metadata"]["labels"]["batch.kubernetes.io/job-completion-index"] for p in pods}
            for index in range(spec["completions"]):
                if str(index) not in have:
                    self.make_pod(job, index)
        if spec.get("suspend") or failed or "FailureTarget" in said:
            for pod in active:
                if "deletionTimestamp" not in pod["metadata"]:
                    self.store.delete("pods", space, pod["metadata"]["name"])

        def change(item: dict[str, Any]) -> None:
            item.setdefault("status", {}).update(active=len(active), succeeded=done, failed=len(failed))
            for each in made:
                put_condition(item, each)

        self.store.update("jobs", space, name, change)

    def make_pod(self, job: dict[str, Any], index: int) -> None:
        meta, template = job["metadata"], job["spec"]["template"]
        name = f"{meta['name']}-{index}"
        labels = {
            **template["metadata"].get("labels", {}),
            "batch.kubernetes.io/job-name": meta["name"],
            "job-name": meta["name"],
            "batch.kubernetes.io/job-completion-index": str(index),
        }
        owner = {"apiVersion": "batch/v1", "kind": "Job", "name": meta["name"], "uid": meta["uid"], "controller": True}
        containers = [
            {**c, "env": [*c.get("env", ()), {"name": "JOB_COMPLETION_INDEX", "value": str(index)}]}
            for c in template["spec"]["containers"]
        ]
        letters = base64.b32encode(os.urandom(4)).decode().lower()[:5]
        body = {
            "apiVersion": "v1",
            "kind": "Pod",
            "status": {"phase": "Pending"},
            "metadata": {
                "name": f"{name}-{letters}",
                "labels": labels,
                "ownerReferences": [owner],
                "annotations": template["metadata"].get("annotations", {}),
            },
            "spec": {**template["spec"], "containers": containers, "hostname": name},
        }
        try:
            self.store.create("pods", meta["namespace"], body)
        except ApiError as error:
            self.event({**job, "kind": "Job"}, "FailedCreate", f"Error creating: {error.message}")

    # -- the scheduler

    def schedule(self) -> None:
        pods = self.store.list("pods")
        for pod in pods:
            if pod["spec"].get("nodeName") or pod["status"]["phase"] != "Pending":
                continue
            reasons: dict[str, int] = {}
            nodes = self.store.list("nodes")
            for node in nodes:
                why = self.unfit(pod, node)
                if not why:
                    place = node["metadata"]["name"]
                    self.store.update(
                        "pods",
                        pod["metadata"]["namespace"],
                        pod["metadata"]["name"],
                        lambda i, place=place: (
                            i["spec"].update(nodeName=place),
                            put_condition(i, condition("PodScheduled")),
                        ),
                    )
                    break
                reasons[why] = reasons.get(why, 0) + 1
            else:
                told = ", ".join(f"{count} {why}" for why, count in sorted(reasons.items()))
                message = f"0/{len(nodes)} nodes are available: {told}."
                self.store.update(
                    "pods",
                    pod["metadata"]["namespace"],
                    pod["metadata"]["name"],
                    lambda i, m=message: put_condition(i, condition("PodScheduled", "False", "Unschedulable", m)),
                )

    def unfit(self, pod: Mapping[str, Any], node: Mapping[str, Any]) -> str:
        spec, name = pod["spec"], node["metadata"]["name"]
        if node["spec"].get("unschedulable") or name in self.dead_nodes:
            return "node(s) were unschedulable"
        labels = node["metadata"].get("labels", {})
        if any(labels.get(k) != v for k, v in spec.get("nodeSelector", {}).items()):
            return "node(s) didn't match Pod's node affinity/selector"
        rules = (
            spec.get("affinity", {}).get("nodeAffinity", {}).get("requiredDuringSchedulingIgnoredDuringExecution", {})
        )
        for term in rules.get("nodeSelectorTerms", ()):
            if any(name in each["values"] for each in term.get("matchFields", ())):
                return "node(s) didn't match Pod's node affinity/selector"
        borne = [t.get("key") for t in spec.get("tolerations", ())]
        for taint in node["spec"].get("taints", ()):
            if taint["key"] not in borne and None not in borne:
                return f"node(s) had untolerated taint {{{taint['key']}: {taint.get('value', '')}}}"
        for resource, most in node["status"]["allocatable"].items():
            used = sum(
                wanted(p, resource)
                for p in self.store.list("pods")
                if p["spec"].get("nodeName") == name and p["status"]["phase"] not in ENDED
            )
            if (own := wanted(pod, resource)) and used + own > quantity(most):
                return f"Insufficient {resource}"
        known = node["status"]["allocatable"]
        for resource in requests(pod):
            if resource not in known:
                return f"Insufficient {resource}"
        return ""

    # -- names and addresses

    def name(self, pod: Mapping[str, Any], hosts: Path) -> str:
        """Give a pod an address of its own, and its names to all pods whom its Service lets know them."""
        self.addresses += 1
        address = f"127.0.{1 + self.addresses // 250}.{1 + self.addresses % 250}"
        meta, spec = pod["metadata"], pod["spec"]
        host = spec.get("hostname", meta["name"])
        hosts.write_text(f"127.0.0.1 localhost\n{address} {host}\n" + "".join(self.names))
        for service in self.store.list("services", meta["namespace"]):
            chosen = service["spec"].get("selector", {}).items() <= meta.get("labels", {}).items()
            headless = service["spec"].get("clusterIP") == "None"
            if headless and chosen and spec.get("subdomain") == service["metadata"]["name"]:
                self.names.append(f"{address} {host}.{spec['subdomain']}\n")
                for each in (hosts, *(process.home / "hosts" for process in self.processes.values())):
                    with each.open("a") as file:  # in place: it is mounted
                        file.write(self.names[-1])
        return address

    # -- the kubelets

    def kubelets(self) -> None:
        for pod in self.store.list("pods"):
            meta = pod["metadata"]
            node = pod["spec"].get("nodeName")
            if not node or node in self.dead_nodes:
                continue
            process = self.processes.get(meta["uid"])
            if process is None and pod["status"]["phase"] == "Pending":
                if "deletionTimestamp" in meta:
                    self.store.delete("pods", meta["namespace"], meta["name"], 0)
                else:
                    self.start(pod)
            elif process is not None and "deletionTimestamp" in meta:
                process.terminate(float(meta["deletionGracePeriodSeconds"]))
        for uid, process in list(self.processes.items()):
            if process.popen.poll() is not None and not process.told:
                process.told = True
                self.ended(uid, process)

    def start(self, pod: dict[str, Any]) -> None:
        main = pod["spec"]["containers"][0]
        if main["image"].startswith(self.missing_images):
            message = f'failed to pull image "{main["image"]}": not found'
            self.tell(pod, {"waiting": {"reason": "ErrImagePull", "message": message}})
            return
        try:
            process = Process(self, pod)
        except FileNotFoundError as error:
            self.tell(pod, {"waiting": {"reason": "ContainerCreating"}})
            self.event(pod, "FailedMount", f"MountVolume.SetUp failed: {error}")
            return
        python = process.image_path()
        if shutil.which(main["command"][0], path=python) is None:
            message = f'exec: "{main["command"][0]}": executable file not found in $PATH: unknown'
            ended = {"exitCode": 128, "reason": "StartError", "message": message, "finishedAt": now()}
            self.tell(pod, {"terminated": ended}, phase="Failed")
            return
        process.start()
        self.processes[pod["metadata"]["uid"]] = process
        self.tell(pod, {"running": {"startedAt": now()}}, phase="Running", podIP=process.address)

    def tell(self, pod: Mapping[str, Any], state: dict[str, Any], **status: Any) -> None:
        main = pod["spec"]["containers"][0]
        each = {
            "name": main["name"],
            "image": main["image"],
            "imageID": "",
            "restartCount": 0,
            "ready": "running" in state,
            "state": state,
        }

        def change(item: dict[str, Any]) -> None:
            item["status"].update(
                {"startTime": item["status"].get("startTime", now()), "containerStatuses": [each], **status}
            )

        self.store.update("pods", pod["metadata"]["namespace"], pod["metadata"]["name"], change)

    def ended(self, uid: str, process: Process) -> None:
        status = process.popen.returncode
        code = 128 - status if status < 0 else status
        meta = process.pod["metadata"]
        reason = process.reason or ("Completed" if code == 0 else "Error")
        said = (process.home / "termination").read_bytes()[:4096].decode(errors="replace")
        done = {"exitCode": code, "reason": reason, "finishedAt": now(), **({"message": said} if said else {})}
        with suppress(ApiError):
            self.tell(process.pod, {"terminated": done}, phase="Failed" if code else "Succeeded", **process.status)
            if "deletionTimestamp" in self.store.get("pods", meta["namespace"], meta["name"])["metadata"]:
                for job in self.store.list("jobs", meta["namespace"]):
                    self.job(job)  # it counts the pod before that is gone
                self.store.delete("pods", meta["namespace"], meta["name"], 0)


def over(item: Mapping[str, Any]) -> set[str]:
    """Return how a Job or a JobSet has ended; empty while it has not."""
    said = {c["type"] for c in item.get("status", {}).get("conditions", ()) if c["status"] == "True"}
    return said & {"Complete", "Completed", "Failed"}


def total(item: Mapping[str, Any], resource: str) -> float:
    """Return what all pods of a Job or a JobSet ask for."""
    parts = [part["template"] for part in item["spec"].get("replicatedJobs", ())] or [item]
    return sum(wanted(p["spec"]["template"], resource) * p["spec"]["completions"] for p in parts)


def requests(pod: Mapping[str, Any]) -> dict[str, str]:
    found: dict[str, str] = {}
    for each in pod["spec"]["containers"]:
        found |= {**each.get("resources", {}).get("limits", {}), **each.get("resources", {}).get("requests", {})}
    return found


def wanted(pod: Mapping[str, Any], resource: str) -> float:
    return quantity(requests(pod).get(resource, "0"))


def why_failed(spec: Mapping[str, Any], pod: Mapping[str, Any], space: str) -> tuple[str, str]:
    """Return what the first rule of the pod failure policy that fits says."""
    name = f"{space}/{pod['metadata']['name']}"
    held = [c["type"] for c in pod["status"].get("conditions", ()) if c["status"] == "True"]
    for number, rule in enumerate(spec.get("podFailurePolicy", {}).get("rules", ())):
        for each in rule.get("onPodConditions", ()):
            if each["type"] in held:
                return (
                    "PodFailurePolicy",
                    f"Pod {name} has condition {each['type']} matching FailJob rule at index {number}",
                )
    return "BackoffLimitExceeded", "Job has reached the specified backoff limit"


class Process:
    """A pod's process tree."""

    def __init__(self, cluster: Cluster, pod: dict[str, Any]) -> None:
        self.cluster, self.pod = cluster, pod
        self.home = cluster.home / "pods" / pod["metadata"]["uid"]
        self.home.mkdir(parents=True, exist_ok=True)
        (self.home / "termination").touch()
        self.address, self.reason, self.told = cluster.name(pod, self.home / "hosts"), "", False
        self.status: dict[str, Any] = {}
        self.kill_at: threading.Timer | None = None
        self.mounts = self.volumes()

    def image_path(self) -> str:
        """Return the PATH of the image: one whose name begins with ``bare/`` has no Python."""
        path = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
        bare = self.pod["spec"]["containers"][0]["image"].startswith("bare/")
        return "/nonexistent" if bare else f"{Path(sys.executable).parent}:{path}"

    def volumes(self) -> list[str]:
        """Return kind, source, path of each mount. Raises `FileNotFoundError` for what is not there (yet)."""
        sources, words = {}, []
        space, store = self.pod["metadata"]["namespace"], self.cluster.store
        for volume in self.pod["spec"].get("volumes", ()):
            if claim := volume.get("persistentVolumeClaim"):
                source = self.cluster.home / "claims" / space / claim["claimName"]
                if not source.is_dir():
                    raise FileNotFoundError(f'persistentvolumeclaim "{claim["claimName"]}" not found')
            elif "hostPath" in volume:
                source = Path(volume["hostPath"]["path"])
            else:
                source = self.home / "volumes" / volume["name"]
                source.mkdir(parents=True, exist_ok=True)
                for part in volume.get("projected", {}).get("sources", [volume]):
                    if not (given := part.get("secret") or part.get("configMap")):
                        continue
                    kind, name = (
                        "secrets" if "secret" in part else "configmaps",
                        given.get("secretName") or given["name"],
                    )
                    try:
                        held = store.get(kind, space, name)
                    except ApiError as error:
                        raise FileNotFoundError(error.message) from None
                    coded = held.get("data", {}) if kind == "secrets" else held.get("binaryData", {})
                    for key, text in coded.items():
                        (source / key).write_bytes(base64.b64decode(text))
                    for key, text in held.get("data", {}).items() if kind == "configmaps" else ():
                        (source / key).write_text(text)
            sources[volume["name"]] = source
        for mount in self.pod["spec"]["containers"][0].get("volumeMounts", ()):
            source = sources[mount["name"]] / mount.get("subPath", "")
            source.mkdir(parents=True, exist_ok=True)
            fixed = mount.get("readOnly") or any(
                v["name"] == mount["name"] and {"secret", "configMap", "projected"} & {*v}
                for v in self.pod["spec"]["volumes"]
            )
            words += ["ro" if fixed else "rw", str(source), mount["mountPath"]]
        told = self.pod["spec"]["containers"][0].get("terminationMessagePath", "/run/termination-log")
        return [*words, "rw", f"{self.home}/termination", told, "rw", f"{self.home}/hosts", "/etc/hosts"]

    @property
    def env(self) -> dict[str, str]:
        names = ("LANG", "OMP_NUM_THREADS", "MKL_NUM_THREADS")
        own = {e["name"]: e.get("value", "") for e in self.pod["spec"]["containers"][0].get("env", ())}
        basic = {"PATH": self.image_path(), "HOME": "/root", "KUBERNETES_SERVICE_HOST": "10.96.0.1"}
        return {**{n: os.environ[n] for n in names if n in os.environ}, **basic, **own}

    def start(self) -> None:
        main, host = self.pod["spec"]["containers"][0], self.pod["spec"].get("hostname", self.pod["metadata"]["name"])
        argv = ["unshare", *NAMESPACES, "sh", "-c", ENTER, "sh", host[:63], *self.mounts, "--", *main["command"]]
        with (self.home / "main.log").open("ab") as log:
            self.popen = subprocess.Popen(
                argv, env=self.env, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )

    @property
    def first(self) -> int:
        """The container's first process, as this machine numbers it; 0 when there is none."""
        with suppress(OSError):
            if children := Path(f"/proc/{self.popen.pid}/task/{self.popen.pid}/children").read_text().split():
                return int(children[0])
        return 0

    def terminate(self, grace: float) -> None:
        if self.kill_at is None:
            self.signal(signal.SIGTERM)
        if self.kill_at is None or grace < self.kill_at.interval:
            if self.kill_at:
                self.kill_at.cancel()
            self.kill_at = threading.Timer(grace, self.kill)
            self.kill_at.daemon = True
            self.kill_at.start()

    def signal(self, number: int) -> None:
        with suppress(ProcessLookupError):
            if self.first:
                os.kill(self.first, number)

    def kill(self) -> None:
        if self.popen.poll() is None:
            self.popen.kill()
            self.popen.wait()

    def enter(self, command: Sequence[str]) -> list[str]:
        """Return the command line that runs *command* in the container. Raises `FileNotFoundError`."""
        deadline = time.monotonic() + 5
        while not self.first and time.monotonic() < deadline and self.popen.poll() is None:
            time.sleep(0.01)
        if shutil.which(command[0], path=self.image_path()) is None:
            raise FileNotFoundError(f'exec: "{command[0]}": executable file not found in $PATH')
        where = ("--user", "--mount", "--pid", "--uts", "--preserve-credentials")
        return ["nsenter", "--target", str(self.first), *where, "--", *command]
