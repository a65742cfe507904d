"""Checks of a cluster and of a plan, and the description of a cluster that is not in clusters.yaml yet."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping

from orc.launchers.backends.base import DiscoveredCluster
from orc.launchers.backends.kubernetes.api import Api, group_of, needed, role
from orc.launchers.backends.kubernetes.options import Access, PodOptions
from orc.launchers.backends.kubernetes.queueing import devices
from orc.launchers.errors import LaunchError
from orc.launchers.findings import Finding


def preflight(api: Api, options: PodOptions, resource: str, job: str, cluster: str) -> list[Finding]:
    """Return what is wrong with a Job and the claims of the cluster."""
    try:
        found = list(_claims(api, options, cluster))
        api.request("POST", api.path(resource), {"dryRun": "All"}, job)
    except LaunchError as error:
        return [] if getattr(error, "code", 0) == 409 else [Finding.of(error, cluster)]
    return found


def check(api: Api, options: PodOptions, cluster: str) -> list[Finding]:
    """Return what is wrong with the namespace: what may not be done there, and claims that are missing."""
    try:
        wanted = [(kind, verb) for kind, verbs in needed(api.access).items() for verb in verbs]
        if missing := [f"{verb} {kind}" for kind, verb in wanted if not _allowed(api, kind, verb)]:
            hint = f"Bind this Role to it:\n{role(api.access, api.namespace)}"
            return [Finding("error", f"the account may not: {', '.join(missing)}", cluster, hint)]
        return list(_claims(api, options, cluster))
    except LaunchError as error:
        return [Finding.of(error, cluster)]


def _allowed(api: Api, kind: str, verb: str) -> bool:
    resource, _, sub = kind.partition("/")
    asked = {"resource": resource, "subresource": sub, "verb": verb, "namespace": api.namespace}
    review = {"apiVersion": "authorization.k8s.io/v1", "kind": "SelfSubjectAccessReview"}
    spec = {"resourceAttributes": {**asked, "group": group_of(resource)}}
    path = f"/apis/{review['apiVersion']}/selfsubjectaccessreviews"
    answer = api.request("POST", path, body={**review, "spec": spec})
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
    claims = {c["metadata"]["name"]: c["spec"].get("accessModes", ()) for c in api.items("persistentvolumeclaims")}
    shared = [claim for claim, modes in claims.items() if "ReadWriteMany" in modes]
    warning = Finding("warning", "no claim is ReadWriteMany: pods of several nodes have no volume to share")
    able, named = devices(api.list_cluster("nodes")), name or access.context or "kubernetes"
    gpus = {device.partition(":")[0] for device in able}
    gpu = next((device for device in sorted(gpus) if device.endswith("/gpu")), "nvidia.com/gpu")
    own = {**options, "namespace": api.namespace, **({"gpu": gpu} if gpu != "nvidia.com/gpu" else {})}
    lines = [f"{json.dumps(named)}:", "  kind: kubernetes", *(["  root: /shared/orc"] if claims else ()), "  options:"]
    lines += [f"    {key}: {json.dumps(value)}" for key, value in own.items()]
    lines.append("    image: pytorch/pytorch:latest  # one with Python and what the jobs need")
    volumes = [f"    volumes: [{{claim: {json.dumps(claim)}, path: /shared}}]" for claim in (*shared, *claims)]
    lines += volumes[:1] or ["    # store: s3://bucket/orc  # else, without a claim, records go with the pods"]
    facts = {"namespace": api.namespace, "claims": list(claims), "devices": dict(able)}
    return DiscoveredCluster(named, "\n".join(lines) + "\n", facts, () if shared else (warning,))
