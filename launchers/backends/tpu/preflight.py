"""Preflight: access to the API, and the availability of types in the zones."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any

from orc.launchers.backends.tpu import request
from orc.launchers.backends.tpu.client import in_zones
from orc.launchers.backends.tpu.request import TpuLocation
from orc.launchers.findings import Finding
from orc.launchers.oldest_python import brings_python, python_problem

if TYPE_CHECKING:
    from orc.launchers.backends.tpu.client import TpuApi
    from orc.launchers.plan import Plan

_UBUNTU_20 = ("tpu-vm-base", "tpu-vm-pt-", "tpu-vm-tf-", "tpu-vm-v4-")  # made on Ubuntu 20.04, with Python 3.8


def check(api: TpuApi, plan: Plan) -> list[Finding]:
    """Return findings about types and runtime versions that zones lack.

    Raises `BackendError` for credentials, rights and zones that the API refuses, `BackendUnreachable`.
    """
    asked = request.read_requests(plan)
    location = TpuLocation.parse(asked["place"])
    if "requests" not in asked:
        return []  # submit looks at the TPU that is there
    body = asked["requests"][0]
    node = body["node"] if "node" in body else body["queued_resource"]["tpu"]["node_spec"][0]["node"]
    wanted = {"accelerator type": node["accelerator_type"], "runtime version": node["runtime_version"]}
    types, versions = in_zones(location.zones, api.accelerator_types), in_zones(location.zones, api.runtime_versions)
    found = [*_lost_checkpoints(plan, node), *_old_python(plan, node["runtime_version"])]
    for what, has in (("accelerator type", types), ("runtime version", versions)):
        value = wanted[what]
        without = [zone for zone in location.zones if value not in has[zone]]
        if not without:
            continue
        known = sorted({one for zone in location.zones for one in has[zone]})
        level = "error" if len(without) == len(location.zones) else "warning"
        text = f"{', '.join(without)} {'has' if len(without) == 1 else 'have'} no {what} {value}"
        found.append(Finding("error" if level == "error" else "warning", text, hint=_choices(value, known)))
    return found


def _old_python(plan: Plan, runtime_version: str) -> Iterator[Finding]:
    """Yield a finding for software of Ubuntu 20.04, whose own Python is too old, where nothing names another one."""
    agent = json.loads(next(file for file in plan.files if file.host != request.API).content)
    if agent.get("python") or brings_python(agent.get("environment")):
        return
    if runtime_version.startswith(_UBUNTU_20) and (problem := python_problem((3, 8))):
        hint = "Choose runtime_version: tpu-ubuntu2204-base, or set `python:` of the cluster to one of the image."
        yield Finding("error", f"the runtime version {runtime_version} has {problem}", hint=hint)


def _lost_checkpoints(plan: Plan, node: Mapping[str, Any]) -> Iterator[Finding]:
    """Yield a finding for checkpoints in the job's directory, on the TPU's own disks."""
    agent = next(file for file in plan.files if file.host != request.API)
    directory = json.loads(agent.content)["env"]["ORC_CHECKPOINT_DIR"]
    job = PurePosixPath(agent.path).parent.parent
    if node["labels"][request.ON_FINISH] == "keep" or not PurePosixPath(directory).is_relative_to(job):
        return
    yield Finding(
        "warning",
        f"checkpoints go to {directory} on the TPU's own disks: they are deleted with it, after the job and before "
        "another attempt",
        hint="Set checkpoint.dir to an object store (gs://bucket/run), or to what the startup script mounts.",
    )


def _choices(value: str, known: list[str]) -> str:
    from orc.launchers.spec.problems import nearest

    return f"There are {', '.join(known)}{nearest(value, known)}" if known else ""
