"""Objects of the API server: resource versions, labels, owners, and the published schemas."""

from __future__ import annotations

import base64
import copy
import json
import re
import threading
import uuid
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jsonschema

KINDS = {
    "jobs": "Job",
    "pods": "Pod",
    "secrets": "Secret",
    "configmaps": "ConfigMap",
    "persistentvolumeclaims": "PersistentVolumeClaim",
    "events": "Event",
    "nodes": "Node",
    "namespaces": "Namespace",
    "services": "Service",
    "jobsets": "JobSet",
    "workloads": "Workload",
}
GROUPS = {"jobs": "batch/v1", "jobsets": "jobset.x-k8s.io/v1alpha2", "workloads": "kueue.x-k8s.io/v1beta1"}
# Of the specification of a JobSet, as far as it is imitated; its Jobs are checked by their own schema.
JOBSET = {"replicatedJobs", "failurePolicy", "successPolicy", "network", "suspend", "ttlSecondsAfterFinished"}
CLUSTER_WIDE = ("nodes", "namespaces")
VERSION = "1.34"


class ApiError(Exception):
    """An answer that is no: status, reason, message."""

    def __init__(self, code: int, reason: str, message: str, kind: str = "") -> None:
        super().__init__(message)
        self.code, self.reason, self.message, self.kind = code, reason, message, kind

    def to_dict(self) -> dict[str, Any]:
        status = {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure", "code": self.code}
        return {**status, "message": self.message, "reason": self.reason, "details": {"kind": self.kind}}


@cache
def schema(kind: str, version: str) -> Any:
    """Return the validator of *kind* by the schema that is published with a version of Kubernetes."""
    place = Path(str(find_spec("kubernetes_validate").origin)).parent / "kubernetes-json-schema"  # type: ignore[union-attr]
    text = (place / f"v{version}.0-local-strict" / "_definitions.json").read_text()
    definitions = json.loads(re.sub(r'"[^"]*_definitions.json#', '"#', text))["$defs"]
    name = next(n for n in definitions if n.endswith((f".core.v1.{kind}", f".batch.v1.{kind}")))
    return jsonschema.Draft202012Validator({"$ref": f"#/$defs/{name}", "$defs": definitions})


def violations(body: Mapping[str, Any], version: str = VERSION) -> list[str]:
    """Return what is wrong with an object by the published schema, or by what is known here of one without."""
    if body["kind"] == "Workload":
        return []
    if body["kind"] == "JobSet":
        jobs = [{"apiVersion": "batch/v1", "kind": "Job", **j["template"]} for j in body["spec"]["replicatedJobs"]]
        unknown = [f"spec: {key} is not expected" for key in sorted(body["spec"].keys() - JOBSET)]
        return unknown + [wrong for job in jobs for wrong in violations(job, version)]
    found = schema(str(body["kind"]), version).iter_errors(dict(body))
    return [f"{'.'.join(map(str, error.path))}: {error.message[:300]}" for error in found]


def now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def matches(labels: Mapping[str, str], selector: str) -> bool:
    """Return whether *labels* are what a selector asks for: ``a=b``, ``a in (b,c)``, ``a``, ``!a``."""
    rest = selector
    while rest:
        head, _, tail = rest.partition(",")
        if " in (" in head:
            head, _, tail = rest.partition(")")
            key, _, values = head.partition(" in (")
            ok, tail = labels.get(key) in values.split(","), tail.removeprefix(",")
        elif "!=" in head:
            key, _, value = head.partition("!=")
            ok = labels.get(key) != value
        elif "=" in head:
            key, _, value = head.replace("==", "=").partition("=")
            ok = labels.get(key) == value
        else:
            ok = (head.removeprefix("!") in labels) != head.startswith("!")
        if not ok:
            return False
        rest = tail
    return True


def field(item: Mapping[str, Any], path: str) -> str:
    value: Any = item
    for part in path.split("."):
        value = (value or {}).get(part)
    return str(value or "")


class Store:
    """All objects."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.changed = threading.Condition(self.lock)
        self.objects: dict[tuple[str, str, str], dict[str, Any]] = {}
        self.version = 100

    def _note(self, item: dict[str, Any]) -> None:
        self.version += 1
        item["metadata"]["resourceVersion"] = str(self.version)
        self.changed.notify_all()

    def create(self, resource: str, namespace: str, body: Mapping[str, Any], *, dry: bool = False) -> dict[str, Any]:
        wrong = violations(body)
        if wrong:
            raise ApiError(422, "Invalid", f'{KINDS[resource]} "" is invalid: {wrong[0]}')
        item = copy.deepcopy(dict(body))
        meta = item["metadata"]
        if len(meta["name"]) > 63 and resource in ("jobs", "pods"):
            raise ApiError(422, "Invalid", f"metadata.name: must be no more than 63 characters: {meta['name']}")
        with self.lock:
            namespace = "" if resource in CLUSTER_WIDE else namespace
            if namespace and ("namespaces", "", namespace) not in self.objects:
                raise ApiError(404, "NotFound", f'namespaces "{namespace}" not found', "namespaces")
            if (key := (resource, namespace, meta["name"])) in self.objects:
                raise ApiError(409, "AlreadyExists", f'{resource} "{meta["name"]}" already exists')
            meta.update(uid=str(uuid.uuid4()), creationTimestamp=now())
            if namespace:
                meta["namespace"] = namespace
            for name, text in item.pop("stringData", {}).items():
                item.setdefault("data", {})[name] = base64.b64encode(text.encode()).decode()
            if not dry:
                self.objects[key] = item
                self._note(item)
            return copy.deepcopy(item)

    def get(self, resource: str, namespace: str, name: str) -> dict[str, Any]:
        with self.lock:
            key = (resource, "" if resource in CLUSTER_WIDE else namespace, name)
            if key not in self.objects:
                raise ApiError(404, "NotFound", f'{resource} "{name}" not found', resource)
            return copy.deepcopy(self.objects[key])

    def list(self, resource: str, namespace: str = "", labels: str = "", fields: str = "") -> list[dict[str, Any]]:
        with self.lock:
            return [
                copy.deepcopy(i)
                for (kind, space, _), i in self.objects.items()
                if kind == resource and (not namespace or space in ("", namespace)) and self.fits(i, labels, fields)
            ]

    @staticmethod
    def fits(item: Mapping[str, Any], labels: str, fields: str) -> bool:
        if not matches(item["metadata"].get("labels") or {}, labels):
            return False
        pairs = [part.replace("==", "=").partition("=") for part in fields.split(",") if part]
        return all((field(item, p.rstrip("!")) != v) if p.endswith("!") else field(item, p) == v for p, _, v in pairs)

    def update(
        self, resource: str, namespace: str, name: str, change: Callable[[dict[str, Any]], Any]
    ) -> dict[str, Any]:
        """Apply *change* to an object; a version follows only where it changed something."""
        with self.lock:
            key = (resource, "" if resource in CLUSTER_WIDE else namespace, name)
            if key not in self.objects:
                raise ApiError(404, "NotFound", f'{resource} "{name}" not found', resource)
            item = self.objects[key]
            before = json.dumps(item, sort_keys=True)
            change(item)
            if json.dumps(item, sort_keys=True) != before:
                self._note(item)
            return copy.deepcopy(item)

    def patch(self, resource: str, namespace: str, name: str, patch: Mapping[str, Any]) -> dict[str, Any]:
        def change(item: dict[str, Any]) -> None:
            more = dict(patch)
            for key, text in more.pop("stringData", {}).items():
                item.setdefault("data", {})[key] = base64.b64encode(text.encode()).decode()
            merge(item, more)

        return self.update(resource, namespace, name, change)

    def delete(self, resource: str, namespace: str, name: str, grace: float | None = None) -> dict[str, Any]:
        """Delete an object; a pod with a process goes when that has ended."""
        with self.lock:
            item = self.get(resource, namespace, name)
            begun = item.get("status", {}).get("phase") in ("Running", "Pending") and item["spec"].get("nodeName")
            if resource == "pods" and begun and grace != 0:
                meta = {"deletionTimestamp": item["metadata"].get("deletionTimestamp", now())}
                own = item["spec"].get("terminationGracePeriodSeconds", 30)
                meta["deletionGracePeriodSeconds"] = own if grace is None else grace
                return self.update(resource, namespace, name, lambda i: i["metadata"].update(meta))
            gone = self.objects.pop((resource, "" if resource in CLUSTER_WIDE else namespace, name))
            self._note(gone)
            for (kind, space, other), each in list(self.objects.items()):
                owners = [owner["uid"] for owner in each["metadata"].get("ownerReferences", ())]
                if gone["metadata"]["uid"] in owners and (kind, space, other) in self.objects:
                    self.delete(kind, space, other)
            return copy.deepcopy(gone)


def merge(base: dict[str, Any], patch: Mapping[str, Any]) -> None:
    for key, value in patch.items():
        if value is None:
            base.pop(key, None)
        elif isinstance(value, Mapping) and isinstance(base.get(key), dict):
            merge(base[key], value)
        else:
            base[key] = copy.deepcopy(value)
