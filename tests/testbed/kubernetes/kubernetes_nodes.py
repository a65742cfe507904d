"""Nodes of this machine: a scheduler, a controller of Jobs, and pods as process trees with volumes of their own."""

from __future__ import annotations

import base64
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

from kubernetes_store import ApiError, Store, now

NAMESPACES = ("--user", "--map-root-user", "--mount", "--pid", "--uts", "--fork", "--mount-proc", "--kill-child")
# A container sees an empty /mnt and /run, and what is mounted. Words: host name; kind, source, path of each volume.
ENTER = """\
mount -t tmpfs tmpfs /mnt && mount -t tmpfs tmpfs /run && hostname "$1" || exit 99
shift
while [ "$1" != -- ]; do
  mkdir -p "$3" && mount --bind "$2" "$3" || exit 99
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
        self.missing_images = ("missing/",)
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
            for each in (self.jobs, self.schedule, self.kubelets):
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
        over = {c["type"] for c in job.get("status", {}).get("conditions", ()) if c["status"] == "True"}
        if over & {"Complete", "Failed"}:
            return
        failed = [p for p in pods if p["status"]["phase"] == "Failed"]
        done = sum(p["status"]["phase"] == "Succeeded" for p in pods)
        made: list[dict[str, Any]] = []
        if spec.get("suspend"):
            made.append(condition("Suspended", message="Job suspended"))
        elif failed or "FailureTarget" in over:
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
        if spec.get("suspend") or failed or "FailureTarget" in over:
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
        done = {"exitCode": code, "reason": reason, "finishedAt": now()}
        with suppress(ApiError):
            self.tell(process.pod, {"terminated": done}, phase="Failed" if code else "Succeeded", **process.status)
            if "deletionTimestamp" in self.store.get("pods", meta["namespace"], meta["name"])["metadata"]:
                for job in self.store.list("jobs", meta["namespace"]):
                    self.job(job)  # it counts the pod before that is gone
                self.store.delete("pods", meta["namespace"], meta["name"], 0)


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
        self.address, self.reason, self.told = "127.0.0.1", "", False
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
                kind = "secrets" if "secret" in volume else "configmaps"
                if given := volume.get("secret") or volume.get("configMap"):
                    name = given.get("secretName") or given.get("name")
                    try:
                        data = store.get(kind, space, name).get("data", {})
                    except ApiError as error:
                        raise FileNotFoundError(error.message) from None
                    for key, text in data.items():
                        (source / key).write_bytes(base64.b64decode(text) if kind == "secrets" else text.encode())
            sources[volume["name"]] = source
        for mount in self.pod["spec"]["containers"][0].get("volumeMounts", ()):
            source = sources[mount["name"]] / mount.get("subPath", "")
            source.mkdir(parents=True, exist_ok=True)
            fixed = mount.get("readOnly") or any(
                v["name"] == mount["name"] and ("secret" in v or "configMap" in v) for v in self.pod["spec"]["volumes"]
            )
            words += ["ro" if fixed else "rw", str(source), mount["mountPath"]]
        return words

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
