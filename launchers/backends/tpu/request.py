"""Requests to the TPU API for one attempt, as JSON: shown in the plan, and sent as shown. Pure.

Everything is named after the attempt's marker, so that asking twice is asking once, and what was asked can be found.
"""

from __future__ import annotations

import hashlib
import json
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from orc.launchers.backends.tpu.settings import LABEL_PREFIX, Options

if TYPE_CHECKING:
    from orc.launchers.plan import Plan

API = "tpu.googleapis.com"
FILE = "tpu.json"  # of a plan: the requests, for the host `API`
MARKER = f"{LABEL_PREFIX}marker"
ON_FINISH = f"{LABEL_PREFIX}on-finish"
IDLE_TIMEOUT = f"{LABEL_PREFIX}idle-timeout"
IDLE_SINCE = f"{LABEL_PREFIX}idle-since"
QUEUED, NODES = "queuedResources", "nodes"
_LONGEST = 63  # of a node's id and of a label's value
_NAMESPACE = uuid.UUID("6f1c3c1e-5a0e-4b8e-9d36-7c1f0f6f2f5a")


def tpu_id(marker: str) -> str:
    """Return the id of an attempt's resources: its marker, which a hash shortens where it is too long."""
    if len(marker) <= _LONGEST:
        return marker
    return f"{marker[: _LONGEST - 13].rstrip('-')}-{hashlib.sha256(marker.encode()).hexdigest()[:12]}"


@dataclass(frozen=True)
class TpuLocation:
    """Location of an attempt's TPU, in one line of text: the native id of its handle."""

    project: str
    zones: tuple[str, ...]  # in the order in which they are tried
    collection: str  # QUEUED or NODES
    id: str

    def __str__(self) -> str:
        return f"projects/{self.project}/locations/{','.join(self.zones)}/{self.collection}/{self.id}"

    @classmethod
    def parse(cls, text: str) -> TpuLocation:
        """Return the location in *text*; the inverse of `str`. Raises `ValueError`."""
        projects, project, locations, zones, collection, name = text.split("/")
        if (projects, locations) != ("projects", "locations") or collection not in (QUEUED, NODES):
            raise ValueError(f"not a place of TPUs: {text!r}")
        return cls(project, tuple(zones.split(",")), collection, name)

    def is_made_for(self, marker: str) -> bool:
        """Return True when the TPU is this attempt's own; else it was there before and stays."""
        return self.id == tpu_id(marker)


def location_of(options: Options, marker: str) -> TpuLocation:
    """Return the location of an attempt's TPU."""
    if options.name is not None:
        return TpuLocation(options.project, options.zones, NODES, options.name)
    return TpuLocation(options.project, options.zones, QUEUED if options.queued else NODES, tpu_id(marker))


def render(options: Options, accelerator_type: str, marker: str, public_key: str | None) -> dict[str, Any]:
    """Return ``{"place": ..., "requests": [...]}``: one request for each zone, in the order in which they are tried.

    For a TPU that exists there is nothing to ask for, and no request.
    """
    location = location_of(options, marker)
    found: dict[str, Any] = {"place": str(location), "accelerator_type": accelerator_type}
    if options.name is None:
        make = _queued if options.queued else _node
        node = _node_spec(options, accelerator_type, marker, public_key)
        found["requests"] = [make(options, zone, location.id, node) for zone in options.zones]
    return found


def read_requests(plan: Plan) -> dict[str, Any]:
    """Return the requests of `render` in this plan."""
    found: dict[str, Any] = json.loads(next(f.content for f in plan.files if f.host == API))
    return found


def parent(project: str, zone: str) -> str:
    """Return ``projects/P/locations/ZONE``."""
    return f"projects/{project}/locations/{zone}"


def _queued(options: Options, zone: str, name: str, node: Mapping[str, Any]) -> dict[str, Any]:
    """Return a CreateQueuedResourceRequest."""
    where = parent(options.project, zone)
    if options.reserved:  # the tier has no word for it in this version of the API, the node has
        node = {**node, "scheduling_config": {"reserved": True}}
    resource: dict[str, Any] = {"tpu": {"node_spec": [{"parent": where, "node_id": name, "node": node}]}}
    if options.spot:
        resource["spot"] = {}
    if options.reserved or options.reservation:
        resource["guaranteed"] = {}
    if options.reservation:
        resource["reservation_name"] = options.reservation
    if options.valid_until is not None:
        resource["queueing_policy"] = {"valid_until_duration": f"{options.valid_until:.0f}s"}
    return {
        "parent": where,
        "queued_resource_id": name,
        "request_id": str(uuid.uuid5(_NAMESPACE, f"{where}/{name}")),
        "queued_resource": resource,
    }


def _node(options: Options, zone: str, name: str, node: Mapping[str, Any]) -> dict[str, Any]:
    """Return a CreateNodeRequest."""
    scheduling = {key: True for key in ("spot", "reserved") if getattr(options, key)}
    body = {**node, "scheduling_config": scheduling} if scheduling else dict(node)
    return {"parent": parent(options.project, zone), "node_id": name, "node": body}


def _node_spec(options: Options, accelerator_type: str, marker: str, public_key: str | None) -> dict[str, Any]:
    """Return the Node that both kinds of request describe."""
    metadata = {**options.metadata}
    if options.os_login:
        metadata["enable-oslogin"] = "TRUE"
    elif public_key is not None:
        metadata["ssh-keys"] = f"{options.user}:{public_key}"
    if options.startup_script is not None:
        metadata["startup-script"] = options.startup_script
    network = {"enable_external_ips": options.external_ips}
    account = options.service_account
    disks = [{"source_disk": disk.source, "mode": disk.mode.upper()} for disk in options.data_disks]
    return {
        "accelerator_type": accelerator_type,
        "runtime_version": options.runtime_version,
        "network_config": {
            **({"network": options.network} if options.network else {}),
            **({"subnetwork": options.subnetwork} if options.subnetwork else {}),
            **network,
        },
        "labels": {**dict(sorted(options.labels.items())), **attempt_labels(options, marker)},
        **({"metadata": dict(sorted(metadata.items()))} if metadata else {}),
        **({"tags": list(options.tags)} if options.tags else {}),
        **({"service_account": {"email": account.email, "scope": list(account.scopes)}} if account else {}),
        **({"data_disks": disks} if disks else {}),
    }


def attempt_labels(options: Options, marker: str) -> dict[str, str]:
    """Return the labels by which passes and cleanups recognise a TPU, and its fate."""
    idle = {IDLE_TIMEOUT: f"{options.idle_timeout:.0f}"} if options.on_finish == "idle" else {}
    return {MARKER: tpu_id(marker), ON_FINISH: options.on_finish, **idle}
