"""What a simulated TPU cloud is made of: slices, settings, faults, records of what exists."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from google.api_core.future.polling import DEFAULT_POLLING
from google.cloud.tpu_v2.types import cloud_tpu as t
from google.protobuf import any_pb2, timestamp_pb2
from google.rpc import code_pb2, status_pb2

# Type checkers read the members of proto-plus enums as plain ints.
NodeState: Any = t.Node.State
NodeHealth: Any = t.Node.Health
QrState: Any = t.QueuedResourceState.State
Initiator: Any = t.QueuedResourceState.StateInitiator

RUNTIME_VERSIONS = (
    "tpu-ubuntu2204-base",
    "tpu-vm-base",
    "tpu-vm-v4-base",
    "v2-alpha-tpuv5",
    "v2-alpha-tpuv5-lite",
    "v2-alpha-tpuv6e",
)

#: family -> (units of the accelerator type per chip, chips per VM of a multi-host slice)
FAMILIES: dict[str, tuple[int, int]] = {
    "v2": (2, 4),
    "v3": (2, 4),
    "v4": (2, 4),
    "v5p": (2, 4),
    "v5litepod": (1, 4),
    "v6e": (1, 4),
}
LISTED_ACCELERATORS = (
    *("v2-8", "v2-32", "v3-8", "v3-32", "v4-8", "v4-16", "v4-32", "v5p-8", "v5p-16"),
    *("v5litepod-1", "v5litepod-4", "v5litepod-8", "v5litepod-16", "v5litepod-32"),
    *("v6e-1", "v6e-4", "v6e-8", "v6e-16", "v6e-32"),
)

#: Quick polling of long-running operations: ``operation.result(timeout=10, polling=FAST_POLLING)``.
#: The library default starts at 1 s, backs off to 20 s and gives up after 900 s.
FAST_POLLING = DEFAULT_POLLING.with_delay(initial=0.02, maximum=0.1, multiplier=1.3).with_timeout(30.0)


# --------------------------------------------------------------------------- accelerators


@dataclass(frozen=True)
class Slice:
    """The shape of one TPU slice."""

    accelerator_type: str
    chips: int
    hosts: int


def parse_accelerator(accelerator_type: str) -> Slice:
    """Return chips and worker VMs of an accelerator type such as ``v4-16``.

    v2, v3, v4 and v5p count TensorCores (two a chip); v5litepod and v6e count chips.
    Slices of up to eight v5e or v6e chips fit one VM; larger ones have four chips a VM.
    """
    match = re.fullmatch(r"(v\d+[a-z]*)-(\d+)", accelerator_type)
    if not match or match[1] not in FAMILIES:
        raise ValueError(f"unknown accelerator type {accelerator_type!r}")
    units_per_chip, chips_per_vm = FAMILIES[match[1]]
    units = int(match[2])
    if units < 1 or (units & (units - 1) and units % 8):
        raise ValueError(f"unsupported size in accelerator type {accelerator_type!r}")
    if units_per_chip == 2:
        if units < 8:
            raise ValueError(f"unsupported size in accelerator type {accelerator_type!r}")
        chips = units // 2
        return Slice(accelerator_type, chips, max(1, chips // chips_per_vm))
    if units <= 8:
        return Slice(accelerator_type, units, 1)
    return Slice(accelerator_type, units, units // chips_per_vm)


# --------------------------------------------------------------------------- settings and faults


@dataclass
class Settings:
    """How the simulated cloud behaves. Delays are seconds; ``None`` switches a limit off."""

    provision_delay: float = 0.5
    #: CREATING -> ACCEPTED -> WAITING_FOR_RESOURCES of a queued resource, each step
    accept_delay: float = 0.05
    #: WAITING_FOR_RESOURCES -> PROVISIONING, when there is capacity
    queue_delay: float = 0.2
    delete_delay: float = 0.1
    #: SUSPENDING -> SUSPENDED
    suspend_delay: float = 0.1
    #: how long after its creation a node is listed; until then only its operation shows it
    listing_delay: float = 0.0
    #: worker VMs of a node; None derives it from the accelerator type
    endpoints_per_node: int | None = None
    #: first address handed to a worker; the following ones are counted up and reused
    ip_base: str = "127.0.64.1"
    external_ips: bool = False
    #: chips allowed in a zone; above it create calls answer RESOURCE_EXHAUSTED at once
    quota_chips: int | None = None
    #: chips that exist in a zone; above it a create operation fails and a queue waits
    capacity_chips: int | None = None
    #: worker machines that exist in all zones; those that are still being taken down are not free
    machines: int | None = None


@dataclass
class Fault:
    """Fail the next ``times`` matching calls (after letting ``skip`` pass) with ``code``.

    ``target`` is a method name (``CreateNode``, ``GetOperation``) for an error of the call
    itself, or ``op:create-node``, ``op:delete-node``, ``op:provision-qr`` for a call that is
    accepted and whose long-running work then fails.
    """

    target: str
    code: int
    times: int = 1
    skip: int = 0
    message: str = ""

    @classmethod
    def parse(cls, text: str) -> Fault:
        """Read ``TARGET=CODE[:TIMES[:SKIP]]``, as in ``CreateNode=UNAVAILABLE:2``."""
        target, eq, rest = text.partition("=")
        code_name, *numbers = rest.split(":")
        if not target or not eq or len(numbers) > 2 or code_name.upper() not in code_pb2.Code.keys():  # noqa: SIM118 (an enum wrapper, not a mapping)
            raise ValueError(f"not a fault: {text!r} (want TARGET=CODE[:TIMES[:SKIP]])")
        times = int(numbers[0]) if numbers else 1
        skip = int(numbers[1]) if len(numbers) > 1 else 0
        return cls(target, code_pb2.Code.Value(code_name.upper()), times, skip)


class ApiError(Exception):
    """An error answer: a google.rpc code, a message and optional typed details."""

    def __init__(self, code: int, message: str, details: Sequence[Any] = ()) -> None:
        super().__init__(message)
        self.code, self.message, self.details = code, message, details

    def status(self) -> status_pb2.Status:
        packed = []
        for detail in self.details:
            item = any_pb2.Any()
            item.Pack(detail)
            packed.append(item)
        return status_pb2.Status(code=self.code, message=self.message, details=packed)


def invalid(message: str) -> ApiError:
    return ApiError(code_pb2.INVALID_ARGUMENT, message)


def not_found(name: str) -> ApiError:
    return ApiError(code_pb2.NOT_FOUND, f"Resource '{name}' was not found")


def precondition(message: str) -> ApiError:
    return ApiError(code_pb2.FAILED_PRECONDITION, message)


# --------------------------------------------------------------------------- records


@dataclass(frozen=True)
class WorkerEvent:
    """One worker VM coming up or going down; what a worker hook is told."""

    action: str  # "up" or "down"
    node_name: str
    accelerator_type: str
    worker_id: int
    ip_address: str
    metadata: dict[str, str]


#: Told about each worker; may return guest attributes as ``{"namespace/key": value}``.
WorkerHook = Callable[[WorkerEvent], Mapping[str, str] | None]


@dataclass
class NodeRecord:
    node: t.Node
    shape: Slice
    parent: str
    ips: list[str]
    on_ready: Callable[[], None]
    on_fail: Callable[[ApiError], None]
    hook_thread: threading.Thread | None = None
    guest_attributes: dict[int, dict[str, str]] = field(default_factory=dict)


@dataclass
class QueuedRecord:
    resource: t.QueuedResource
    parent: str
    specs: list[tuple[str, t.Node]]
    expires_at: float | None
    nodes: list[str] = field(default_factory=list)
    generation: int = 0

    @property
    def state(self) -> int:
        return int(self.resource.state.state)

    @property
    def state_name(self) -> str:
        return str(self.resource.state.state.name)


@dataclass
class CallRecord:
    """One request as it arrived, for assertions in tests."""

    method: str
    request: dict[str, Any]
    code: str = "OK"


NODE_ID = re.compile(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?")
QUEUED_ID = re.compile(r"[A-Za-z0-9_.~+%-]{1,128}")
LABEL_KEY = re.compile(r"[a-z][-_a-z0-9]{0,62}")
LABEL_VALUE = re.compile(r"[-_a-z0-9]{0,63}")
PARENT_NAME = re.compile(r"projects/([^/]+)/locations/([^/]+)")
METADATA_VALUE_LIMIT = 256 * 1024
STATE_DATA = {
    QrState.CREATING: "creating_data",
    QrState.ACCEPTED: "accepted_data",
    QrState.PROVISIONING: "provisioning_data",
    QrState.FAILED: "failed_data",
    QrState.DELETING: "deleting_data",
    QrState.ACTIVE: "active_data",
    QrState.SUSPENDING: "suspending_data",
    QrState.SUSPENDED: "suspended_data",
}


def copy_of(message: Any) -> Any:
    kind = type(message)
    return kind.deserialize(kind.serialize(message))


def timestamp() -> timestamp_pb2.Timestamp:
    stamp = timestamp_pb2.Timestamp()
    stamp.GetCurrentTime()
    return stamp


def snake(name: str) -> str:
    return re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower()


def page_of(items: list[Any], size: int, token: str) -> tuple[list[Any], str]:
    try:
        start = int(token or 0)
    except ValueError:
        raise invalid("Invalid page token") from None
    end = start + size if size > 0 else len(items)
    return items[start:end], str(end) if end < len(items) else ""
