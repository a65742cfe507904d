"""The objects of an attempt, as they are sent. Pure."""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from orc.launchers.backends.kubernetes.options import PodOptions, PodTemplate, Volume, root_volume
from orc.launchers.errors import RenderError

if TYPE_CHECKING:
    from orc.launchers.agent.config import AgentConfig
    from orc.launchers.ids import AttemptId
    from orc.launchers.spec import JobSpec

ATTEMPT = "orc-launch/attempt"  # label: the name of the Job
GATE = "orc-launch/gate"  # label of the gates
MARKER = "orc-launch/marker"  # annotation: the marker, whatever its length
WINDOW = "orc-launch/start-within"  # annotation, in seconds
MANAGED = {"app.kubernetes.io/managed-by": "orc"}
MAIN = "main"
MARGIN_S = 30  # that the agents have after their grace, before Kubernetes kills them
_LONGEST = 52  # of a Job's name: its pods add their number and five letters
_GATE_S = 12 * 3600
PRIVATE, _SECRET = "/run/orc-private", "/run/orc-secret"
# What the container's Python does first: the secrets become a file that the agent can remove again.
_START = f"""\
import os, shutil, sys
os.umask(0o077)
if os.path.isdir("{_SECRET}"): shutil.copyfile("{_SECRET}/secrets.json", "{PRIVATE}/secrets.json")
if not os.path.isdir(sys.argv[1]): sys.exit("orc: " + sys.argv[1] + " is not there: do all pods share the volume?")
words = [sys.executable, "-I", "-S", *sys.argv[1:], "--node-rank", os.environ["JOB_COMPLETION_INDEX"]]
os.execv(words[0], words)
"""
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


def secret_manifest(attempt: AttemptId) -> dict[str, Any]:
    """Return the Secret of an attempt, without its values."""
    name = job_name(attempt)
    metadata = {"name": name, "labels": {**MANAGED, ATTEMPT: name}, "annotations": {MARKER: attempt.marker}}
    return {"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "type": "Opaque"}


def job_manifest(
    job: JobSpec, attempt: AttemptId, config: AgentConfig, path: str, options: PodOptions, avoid: Sequence[str]
) -> dict[str, Any]:
    """Return the Job of an attempt, whose ``agent.json`` is at *path*. Raises `RenderError`."""
    name, nodes = job_name(attempt), job.resources.max_nodes
    labels = {**options.labels, **MANAGED, ATTEMPT: name}
    agent = [config.runtime_tree, "node", path, "--owner", f"kubernetes:{attempt.marker}"]
    pod = _pod(
        options, job.name, [config.python or "python3", "-I", "-S", "-c", _START, *agent], _resources(job, options)
    )
    pod["terminationGracePeriodSeconds"] = int(float(job.grace)) + MARGIN_S
    if job.secrets:
        _mount(pod, "orc-secret", {"secret": {"secretName": name, "defaultMode": 0o400}}, _SECRET, readOnly=True)
        _mount(pod, "orc-private", {"emptyDir": {"medium": "Memory"}}, PRIVATE)
    if avoid:
        _avoid(pod, avoid)
    queue = {"kueue.x-k8s.io/queue-name": options.queue} if options.queue else {}
    about = {"labels": labels, **({"annotations": dict(options.annotations)} if options.annotations else {})}
    annotations = {MARKER: attempt.marker, WINDOW: f"{options.start_within:g}"}
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": name, "labels": {**labels, **queue}, "annotations": annotations},
        "spec": {
            "completionMode": "Indexed",
            "completions": nodes,
            "parallelism": nodes,
            "backoffLimit": 0,
            "podFailurePolicy": {"rules": _POLICY},
            "ttlSecondsAfterFinished": int(options.keep),
            **({"suspend": True} if options.queue else {}),
            "template": _merged({"metadata": about, "spec": pod}, options.pod_template, job.name),
        },
    }


def gate_manifest(options: PodOptions, root: str, python: str, where: str) -> dict[str, Any]:
    """Return the pod through which files on the volume are reached, named by what it is made of."""
    volume = root_volume(options, root)
    # Wherever there is room: it must not hold, or have made, a node with devices.
    anywhere: dict[str, Any] = {
        "host_network": False,
        "shm_size": None,
        "node_selector": {},
        "affinity": None,
        "priority_class": None,
    }
    only = options.model_copy(update={"volumes": (volume,), **anywhere})
    small = {"requests": {"cpu": "50m", "memory": "64Mi"}}
    spec = {**_pod(only, where, [python, "-I", "-S", "-c", _WAIT], small), "activeDeadlineSeconds": _GATE_S}
    base = {"metadata": {"labels": {**MANAGED, GATE: "true"}}, "spec": {**spec, "terminationGracePeriodSeconds": 1}}
    pod = _merged(base, options.pod_template, where)
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
    if options.image_pull_policy:
        main["imagePullPolicy"] = options.image_pull_policy
    tolerations = [
        {"operator": "Equal" if each.value else "Exists", **each.model_dump(exclude_none=True)}
        for each in options.tolerations
    ]
    given = {
        "serviceAccountName": options.service_account,
        "nodeSelector": dict(options.node_selector),
        "priorityClassName": options.priority_class,
        "affinity": copy.deepcopy(options.affinity),
        "hostNetwork": options.host_network,
        "dnsPolicy": "ClusterFirstWithHostNet" if options.host_network else None,
        "imagePullSecrets": [{"name": name} for name in options.image_pull_secrets],
        "tolerations": tolerations,
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


def _merged(base: dict[str, Any], template: PodTemplate | None, where: str) -> dict[str, Any]:
    """Return *base* with a strategic merge of *template*. Raises `RenderError` where that changes what *base* says."""
    patch = {"metadata": template.metadata, "spec": template.spec} if template else {}
    made: dict[str, Any] = _merge(base, patch, "")
    if changed := _changed(base, made, ""):
        raise RenderError(f"pod_template: {changed} is orc's own", where=where, hint="The options have a key for it.")
    return made


def _merge(base: Any, patch: Any, name: str) -> Any:
    if isinstance(base, dict) and isinstance(patch, Mapping):
        made = {**base, **{key: _merge(base.get(key), value, key) for key, value in patch.items()}}
        return {key: value for key, value in made.items() if value is not None}
    if not isinstance(base, list) or not isinstance(patch, list):
        return copy.deepcopy(patch)
    if (key := _KEYS.get(name)) is None:
        return [*base, *patch]
    items = {item.get(key): item for item in base}
    items.update({item.get(key): _merge(items.get(item.get(key)), item, "") for item in patch})
    return list(items.values())


def _changed(base: Any, made: Any, path: str) -> str:
    """Return the path of the first value of *base* that is another one in *made*; empty when there is none."""
    if isinstance(base, dict) and isinstance(made, dict):
        found = (_changed(value, made.get(key), f"{path}.{key}") for key, value in base.items())
    elif isinstance(base, list) and isinstance(made, list) and len(made) >= len(base):
        found = (_changed(*pair, f"{path}[{number}]") for number, pair in enumerate(zip(base, made, strict=False)))
    else:
        return "" if base == made else path.removeprefix(".")
    return next(filter(None, found), "")
