"""Checks of a cluster and of a plan, and the description of a cluster that is not in clusters.yaml yet."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping

from orc.launchers.backends.base import DiscoveredCluster
from orc.launchers.backends.kubernetes.api import NEEDED, ROLE, Api, ApiRefusal
from orc.launchers.backends.kubernetes.options import Access, PodOptions
from orc.launchers.errors import BackendUnreachable, LaunchError, SpecError
from orc.launchers.findings import Finding


def preflight(api: Api, options: PodOptions, job: str, cluster: str) -> list[Finding]:
    """Return what is wrong with a Job and the claims of the cluster."""
    try:
        found = list(_claims(api, options, cluster))
        api.request("POST", api.path("jobs"), {"dryRun": "All"}, job)
    except ApiRefusal as error:
        return [] if error.code == 409 else [Finding("error", error.what, cluster, error.hint)]
    except LaunchError as error:
        return [_finding(error, cluster)]
    return found


def check(api: Api, options: PodOptions, cluster: str) -> list[Finding]:
    """Return what is wrong with the namespace: what may not be done there, and claims that are missing."""
    try:
        if missing := [f"{verb} {kind}" for kind, verbs in NEEDED for verb in verbs if not _allowed(api, kind, verb)]:
            hint = f"Bind this Role to it:\n{ROLE % api.namespace}"
            return [Finding("error", f"the account may not: {', '.join(missing)}", cluster, hint)]
        return list(_claims(api, options, cluster))
    except LaunchError as error:
        return [_finding(error, cluster)]


def _finding(error: LaunchError, cluster: str) -> Finding:
    return Finding("error", error.what, cluster, error.hint, unreachable=isinstance(error, BackendUnreachable))


def _allowed(api: Api, kind: str, verb: str) -> bool:
    resource, _, sub = kind.partition("/")
    group = "batch" if kind == "jobs" else ""
    asked = {"namespace": api.namespace, "group": group, "resource": resource, "subresource": sub, "verb": verb}
    review = {"apiVersion": "authorization.k8s.io/v1", "kind": "SelfSubjectAccessReview"}
    path = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"
    answer = api.request("POST", path, body={**review, "spec": {"resourceAttributes": asked}})
    return bool(answer["status"].get("allowed"))


def _claims(api: Api, options: PodOptions, cluster: str) -> Iterator[Finding]:
    for name in dict.fromkeys(volume.claim for volume in options.volumes if volume.claim):
        claim = api.get("persistentvolumeclaims", name)
        modes = (claim or {}).get("spec", {}).get("accessModes", ())
        if claim is None:
            hint = "Correct `volumes` under `options:`, or create the claim."
            yield Finding("error", f"there is no claim {name} in the namespace {api.namespace}", cluster, hint)
        elif "ReadWriteMany" not in modes:
            hint = "Jobs of several nodes need a claim with ReadWriteMany (NFS, Filestore, EFS, CephFS)."
            what = f"the claim {name} is {', '.join(modes)}: only pods on one node share it"
            yield Finding("warning", what, cluster, hint)


def discover(options: Mapping[str, str], name: str | None) -> DiscoveredCluster:
    """Describe the namespace of a context. Raises `LaunchError`."""
    access = Access.model_validate(dict(options))
    api = Api(access, "kubernetes")
    claims = {
        claim["metadata"]["name"]: claim["spec"].get("accessModes", ()) for claim in api.items("persistentvolumeclaims")
    }
    shared = [claim for claim, modes in claims.items() if "ReadWriteMany" in modes]
    if not claims:
        raise SpecError(
            f"there is no claim in the namespace {api.namespace}, and orc needs one that its pods share",
            where="kubernetes",
            hint="Create a PersistentVolumeClaim with ReadWriteMany, or choose another namespace.",
        )
    warning = Finding("warning", "no claim is ReadWriteMany: only pods on one node share the others")
    devices = Counter(
        f"{device}:{count}"
        for node in api.list_cluster("nodes")
        for device, count in (node["status"].get("allocatable") or {}).items()
        if "/" in device and count != "0"
    )
    named, gpus = name or access.context or "kubernetes", {device.partition(":")[0] for device in devices}
    gpu = next((device for device in sorted(gpus) if device.endswith("/gpu")), "nvidia.com/gpu")
    own = {**options, "namespace": api.namespace, **({"gpu": gpu} if gpu != "nvidia.com/gpu" else {})}
    lines = [f"{json.dumps(named)}:", "  kind: kubernetes", "  root: /shared/orc", "  options:"]
    lines += [f"    {key}: {json.dumps(value)}" for key, value in own.items()]
    lines.append("    image: pytorch/pytorch:latest  # one with Python and what the jobs need")
    lines.append(f"    volumes: [{{claim: {json.dumps([*shared, *claims][0])}, path: /shared}}]")
    facts = {"namespace": api.namespace, "claims": list(claims), "devices": dict(devices)}
    return DiscoveredCluster(named, "\n".join(lines) + "\n", facts, () if shared else (warning,))
