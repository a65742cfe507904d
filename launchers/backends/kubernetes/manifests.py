"""The objects of an attempt, as they are sent. Pure."""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from orc.launchers.agent.config import AgentConfig
from orc.launchers.backends.kubernetes.api import GROUPS
from orc.launchers.backends.kubernetes.options import PodOptions, Toleration, Volume, root_volume
from orc.launchers.containers.template import merged
from orc.launchers.errors import RenderError
from orc.launchers.ids import AttemptId
from orc.launchers.spec import JobSpec

ATTEMPT = "orc-launch/attempt"  # label: the name of the Job
GATE = "orc-launch/gate"  # label of the gates
MARKER = "orc-launch/marker"  # annotation: the marker, whatever its length
WINDOW = "orc-launch/start-within"  # annotation, in seconds
OWNS = "orc-launch/owns"  # annotation: what goes with the Job
MANAGED = {"app.kubernetes.io/managed-by": "orc"}
# What an attempt may have beside its Job, under the same name.
OWNED = {"configmaps": "ConfigMap", "services": "Service", "secrets": "Secret"}
Words = Sequence[str]
MAIN = "main"
MARGIN_S = 30  # that the agents have after their grace, before Kubernetes kills them
_LONGEST = 45  # of a Job's name: its pods add their number and five letters, a JobSet ``-main-0``
_GATE_S = 12 * 3600
# Of the options, what a gate has too: it goes wherever there is room, and holds, or has made, no node with devices.
_GATES = ("image", "image_pull_secrets", "service_account", "tolerations")
PRIVATE, _SECRET = "/run/orc-private", "/run/orc-secret"
# Of pods that share no volume: their own directory, what they read, and what Kubernetes keeps of them.
HOME, INPUTS, REPORT, INDEX = "/run/orc", "/run/orc-inputs", "/run/orc-report.json", "JOB_COMPLETION_INDEX"
# What the container's Python does first: the secrets become a file that the agent can remove again.
_START = f"""\
import os, shutil, sys
os.umask(0o077)
if os.path.isdir("{_SECRET}"): shutil.copyfile("{_SECRET}/secrets.json", "{PRIVATE}/secrets.json")
if not os.path.isdir(sys.argv[1]): sys.exit("orc: " + sys.argv[1] + " is not there: do all pods share the volume?")
words = [sys.executable, "-I", "-S", *sys.argv[1:], "--node-rank", os.environ["{INDEX}"]]
os.execv(words[0], words)
"""
_QUEUE = "kueue.x-k8s.io/queue-name"
_SHM = "/dev/shm"  # noqa: S108 - the pod's own
_WAIT = "import signal, sys; signal.signal(signal.SIGTERM, lambda *_: sys.exit()); signal.pause()"
# A pod that is taken away ends the attempt: the next one is orc's to start, from the last checkpoint.
_POLICY = [{"action": "FailJob", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}]
# Lists whose items a template changes by one key; it adds to others.
_KEYS = {"containers": "name", "initContainers": "name", "volumes": "name", "env": "name", "volumeMounts": "mountPath"}


def job_name(attempt: AttemptId) -> str:
    """Return the name of an attempt's Job: its marker, or the beginning of one that is too long and a digest."""
    marker = attempt.marker
    if len(marker) <= _LONGEST:
        return marker
    return f"{marker[: _LONGEST - 11].rstrip('-')}-{hashlib.sha256(marker.encode()).hexdigest()[:10]}"


def pod_names(attempt: AttemptId, nodes: int, jobset: bool) -> list[str]:
    """Return the names by which the pods of an attempt reach each other, in node order."""
    name = job_name(attempt)
    return [f"{name}{'-main-0' if jobset else ''}-{node}.{name}" for node in range(nodes)]


def owned_manifest(resource: str, attempt: AttemptId) -> dict[str, Any]:
    """Return the Secret or ConfigMap of an attempt, without its content, or the Service that names its pods."""
    name = job_name(attempt)
    metadata = {"name": name, "labels": {**MANAGED, ATTEMPT: name}, "annotations": {MARKER: attempt.marker}}
    spec = {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": {ATTEMPT: name}}
    made = {"apiVersion": "v1", "kind": OWNED[resource], "metadata": metadata}
    return {**made, "spec": spec} if resource == "services" else made


def shared_command(config: AgentConfig, hosts: Sequence[str]) -> list[str]:
    """Return the command of pods that share a volume."""
    agent = [config.runtime_tree, "node", f"{config.attempt_dir}/agent.json", "--owner", f"kubernetes:{config.marker}"]
    agent += ["--master-host", hosts[0]] if len(hosts) > 1 else []
    return [config.python or "python3", "-I", "-S", "-c", _START, *agent]


def job_manifest(
    job: JobSpec, attempt: AttemptId, command: Words, options: PodOptions, avoid: Words, owns: Words
) -> dict[str, Any]:
    """Return the Job of an attempt. Raises `RenderError`."""
    name, nodes = job_name(attempt), job.resources.max_nodes
    labels = {**options.labels, **MANAGED, ATTEMPT: name}
    pod = _pod(options, job.name, command, _resources(job, options))
    pod["terminationGracePeriodSeconds"] = int(float(job.grace)) + MARGIN_S
    if "services" in owns:
        pod["subdomain"] = name
    if "configmaps" in owns:
        sources = [{"configMap": {"name": name}}, *([{"secret": {"name": name}}] if "secrets" in owns else ())]
        _mount(pod, "orc-inputs", {"projected": {"sources": sources}}, INPUTS, readOnly=True)
        _mount(pod, "orc-home", {"emptyDir": {}}, HOME)
        pod["containers"][0]["terminationMessagePath"] = REPORT
    elif "secrets" in owns:
        _mount(pod, "orc-secret", {"secret": {"secretName": name}}, _SECRET, readOnly=True)
    if {"configmaps", "secrets"} & {*owns}:
        _mount(pod, "orc-private", {"emptyDir": {"medium": "Memory"}}, PRIVATE)
    if avoid:
        _avoid(pod, avoid)
    queue = {_QUEUE: options.queue} if options.queue else {}
    annotations = {MARKER: attempt.marker, WINDOW: f"{options.start_within:g}", OWNS: " ".join(owns)}
    metadata = {"name": name, "labels": {**labels, **queue}, "annotations": annotations}
    spec = {"completionMode": "Indexed", "completions": nodes, "parallelism": nodes, "backoffLimit": 0}
    spec |= {"podFailurePolicy": {"rules": _POLICY}, "ttlSecondsAfterFinished": int(options.keep)}
    spec |= {"suspend": True} if options.queue else {}
    template = options.pod_template.model_dump()
    spec["template"] = merged({"metadata": {"labels": labels}, "spec": pod}, template, _KEYS, job.name)
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata, "spec": spec}


def jobset_manifest(job: dict[str, Any]) -> dict[str, Any]:
    """Return the JobSet of a Job; its controller makes the headless Service."""
    spec, meta = dict(job["spec"]), job["metadata"]
    own = {key: spec.pop(key) for key in ("ttlSecondsAfterFinished", "suspend") if key in spec}
    labels = {key: value for key, value in meta["labels"].items() if key != _QUEUE}
    template = {"metadata": {"labels": labels, "annotations": meta["annotations"]}, "spec": spec}
    own["replicatedJobs"] = [{"name": MAIN, "replicas": 1, "template": template}]
    own["failurePolicy"] = {"maxRestarts": 0}
    return {"apiVersion": GROUPS["jobsets"], "kind": "JobSet", "metadata": meta, "spec": own}


def gate_manifest(options: PodOptions, root: str, python: str, where: str) -> dict[str, Any]:
    """Return the pod through which files on the volume are reached, named by what it is made of."""
    volumes = [each for each in (root_volume(options, root),) if each]
    only = PodOptions.model_construct(**{name: getattr(options, name) for name in _GATES}, volumes=tuple(volumes))
    small = {"requests": {"cpu": "50m", "memory": "64Mi"}}
    spec = {**_pod(only, where, [python, "-I", "-S", "-c", _WAIT], small), "activeDeadlineSeconds": _GATE_S}
    base = {"metadata": {"labels": {**MANAGED, GATE: "true"}}, "spec": {**spec, "terminationGracePeriodSeconds": 1}}
    pod = merged(base, options.pod_template.model_dump(), _KEYS, where)
    digest = hashlib.sha256(json.dumps(pod, sort_keys=True).encode()).hexdigest()[:10]
    metadata = {**pod["metadata"], "name": f"orc-gate-{digest}"}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": pod["spec"]}


def _pod(options: PodOptions, where: str, command: Sequence[str], resources: Mapping[str, Any]) -> dict[str, Any]:
    """Return the specification of a pod with one container. Raises `RenderError` without an image."""
    if options.image is None:
        hint = "Name one under `options:` of the cluster, or as resources.options.kubernetes.image."
        raise RenderError("the pods have no image", where=where, hint=hint)
    words = [word.replace("$(", "$$(") for word in command]  # which Kubernetes would take for a variable
    main = {"name": MAIN, "image": options.image, "command": words, "resources": dict(resources), "volumeMounts": []}
    given = {
        "serviceAccountName": options.service_account,
        "nodeSelector": dict(options.node_selector),
        "priorityClassName": options.priority_class,
        "affinity": copy.deepcopy(options.affinity),
        "hostNetwork": options.host_network,
        "dnsPolicy": "ClusterFirstWithHostNet" if options.host_network else None,
        "imagePullSecrets": [{"name": name} for name in options.image_pull_secrets],
        "tolerations": [_toleration(each) for each in options.tolerations],
    }
    pod: dict[str, Any] = {
        "restartPolicy": "Never",
        "enableServiceLinks": False,
        "automountServiceAccountToken": options.service_account is not None,
        **{key: value for key, value in given.items() if value},
        "containers": [main],
        "volumes": [],
    }
    if not any(each.path == _SHM for each in options.volumes):
        size = {"sizeLimit": f"{options.shm_size}i"} if options.shm_size else {}
        _mount(pod, "orc-shm", {"emptyDir": {"medium": "Memory", **size}}, _SHM)
    for number, each in enumerate(options.volumes):
        _mount(pod, f"orc-{number}", _source(each), each.path, readOnly=each.read_only, subPath=each.sub_path)
    return pod


def _toleration(each: Toleration) -> dict[str, Any]:
    return {"operator": "Equal" if each.value else "Exists", **each.model_dump(exclude_none=True)}


def _mount(pod: dict[str, Any], name: str, source: Mapping[str, Any], path: str, **more: Any) -> None:
    mount = {"name": name, "mountPath": path, **{key: value for key, value in more.items() if value}}
    pod["volumes"].append({"name": name, **source})
    pod["containers"][0]["volumeMounts"].append(mount)


def _source(volume: Volume) -> dict[str, Any]:
    if volume.empty:
        medium = {"medium": "Memory"} if volume.empty == "memory" else {}
        return {"emptyDir": {**medium, **({"sizeLimit": f"{volume.size}i"} if volume.size else {})}}
    kinds = {
        "persistentVolumeClaim": ("claimName", volume.claim),
        "hostPath": ("path", volume.host_path),
        "configMap": ("name", volume.config_map),
        "secret": ("secretName", volume.secret),
    }
    return {kind: {key: value} for kind, (key, value) in kinds.items() if value}


def _resources(job: JobSpec, options: PodOptions) -> dict[str, Any]:
    wanted = job.resources
    limits = {name: str(count) for name, count in options.devices.items() if count}
    if wanted.gpus_per_node:
        limits[options.gpu] = str(wanted.gpus_per_node)
    if wanted.memory:
        limits["memory"] = f"{wanted.memory}i"
    requests = {**limits, **({"cpu": str(wanted.cpus_per_proc * wanted.nproc)} if wanted.cpus_per_proc else {})}
    return {key: value for key, value in (("requests", requests), ("limits", limits)) if value}


def _avoid(pod: dict[str, Any], hosts: Sequence[str]) -> None:
    """Keep the pods away from nodes, whatever else is said of affinity."""
    rules = pod.setdefault("affinity", {}).setdefault("nodeAffinity", {})
    required = rules.setdefault("requiredDuringSchedulingIgnoredDuringExecution", {"nodeSelectorTerms": [{}]})
    for term in required["nodeSelectorTerms"]:  # a field takes one value in each expression
        away = [{"key": "metadata.name", "operator": "NotIn", "values": [host]} for host in hosts]
        term["matchFields"] = [*term.get("matchFields", ()), *away]
