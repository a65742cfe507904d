"""Time, faults, operations and validation of a simulated TPU cloud: what nodes and queued resources are built on."""

from __future__ import annotations

import heapq
import itertools
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from fake_tpu_model import (
    LABEL_KEY,
    LABEL_VALUE,
    METADATA_VALUE_LIMIT,
    PARENT_NAME,
    ApiError,
    CallRecord,
    Fault,
    NodeRecord,
    NodeState,
    QueuedRecord,
    Settings,
    Slice,
    WorkerHook,
    invalid,
    not_found,
    page_of,
    parse_accelerator,
    timestamp,
)
from google.cloud.tpu_v2.types import cloud_tpu as t
from google.longrunning import operations_pb2 as lro
from google.protobuf import empty_pb2
from google.rpc import code_pb2, error_details_pb2


class CloudCore:
    """Time, faults, operations, validation; `fake_tpu_cloud.FakeTpuCloud` has the rest."""

    def __init__(
        self,
        settings: Settings | None = None,
        *,
        worker_hook: WorkerHook | None = None,
    ) -> None:
        self.settings = replace(settings) if settings else Settings()
        self.faults: list[Fault] = []
        self.worker_hook = worker_hook
        self.calls: list[CallRecord] = []
        self._clock = time.monotonic
        self._lock = threading.RLock()
        self._timeline: list[tuple[float, int, Callable[[], None]]] = []
        self._serial = itertools.count(1)
        self._nodes: dict[str, NodeRecord] = {}
        self._queued: dict[str, QueuedRecord] = {}
        self._operations: dict[str, lro.Operation] = {}
        self._requests: dict[tuple[str, str], str] = {}
        self._used_ips: set[str] = set()
        self._hooks: list[threading.Thread] = []

    # ----- time

    def run_due(self) -> None:
        """Run every event whose time has come."""
        with self._lock:
            while self._timeline and self._timeline[0][0] <= self._clock():
                heapq.heappop(self._timeline)[2]()

    def _after(self, delay: float, event: Callable[[], None]) -> None:
        with self._lock:
            heapq.heappush(self._timeline, (self._clock() + delay, next(self._serial), event))

    # ----- faults

    def add_fault(self, fault: Fault) -> None:
        """Add a fault to those already waiting."""
        with self._lock:
            self.faults.append(fault)

    def take_fault(self, target: str) -> ApiError | None:
        """Consume one matching fault, if there is one."""
        with self._lock:
            for fault in self.faults:
                if fault.target != target or fault.times <= 0:
                    continue
                if fault.skip > 0:
                    fault.skip -= 1
                    return None
                fault.times -= 1
                text = fault.message or f"injected {code_pb2.Code.Name(fault.code)} for {target}"
                return ApiError(fault.code, text)
        return None

    # ----- operations

    def _new_operation(self, parent: str, target: str, verb: str) -> lro.Operation:
        name = f"{parent}/operations/operation-{next(self._serial):08d}"
        operation = lro.Operation(name=name)
        meta = t.OperationMetadata(create_time=timestamp(), target=target, verb=verb, api_version="v2")
        operation.metadata.Pack(t.OperationMetadata.pb(meta))
        self._operations[name] = operation
        return operation

    def _finish(self, operation: lro.Operation, response: Any = None, error: ApiError | None = None) -> None:
        if operation.done:
            return
        meta = t.OperationMetadata()
        operation.metadata.Unpack(t.OperationMetadata.pb(meta))
        meta.end_time = timestamp()
        operation.metadata.Pack(t.OperationMetadata.pb(meta))
        if error is not None:
            operation.error.CopyFrom(error.status())
        else:
            message = empty_pb2.Empty() if response is None else type(response).pb(response)
            operation.response.Pack(message)
        operation.done = True

    def _snapshot(self, operation: lro.Operation) -> lro.Operation:
        copy = lro.Operation()
        copy.CopyFrom(operation)
        return copy

    def _operation(self, name: str) -> lro.Operation:
        if name not in self._operations:
            raise not_found(name)
        return self._operations[name]

    def get_operation(self, request: lro.GetOperationRequest) -> lro.Operation:
        return self._snapshot(self._operation(request.name))

    def list_operations(self, request: lro.ListOperationsRequest) -> lro.ListOperationsResponse:
        items = [self._snapshot(o) for n, o in self._operations.items() if n.startswith(request.name)]
        page, token = page_of(items, request.page_size, request.page_token)
        return lro.ListOperationsResponse(operations=page, next_page_token=token)

    # ----- validation

    def _zone(self, parent: str) -> str:
        match = PARENT_NAME.fullmatch(parent)
        if not match:
            raise invalid(f"Invalid parent {parent!r}, want projects/PROJECT/locations/ZONE")
        return match[2]

    def _shape(self, node: t.Node) -> Slice:
        try:
            return parse_accelerator(node.accelerator_type or "v2-8")
        except ValueError as error:
            raise invalid(f"Invalid value for accelerator type: {error}") from None

    def _check_node(self, node: t.Node) -> Slice:
        if not node.runtime_version:
            raise invalid("runtime_version is required")
        for key, value in node.labels.items():
            if not LABEL_KEY.fullmatch(key) or not LABEL_VALUE.fullmatch(value):
                raise invalid(f"Invalid label {key!r}: {value!r}")
        for key, value in node.metadata.items():
            if len(value.encode()) > METADATA_VALUE_LIMIT:
                raise invalid(f"Metadata value of {key!r} exceeds {METADATA_VALUE_LIMIT} bytes")
        return self._shape(node)

    def _chips_in_use(self, zone: str) -> int:
        return sum(
            r.shape.chips
            for r in self._nodes.values()
            if r.parent.rsplit("/", 1)[-1] == zone and r.node.state not in (NodeState.PREEMPTED, NodeState.TERMINATED)
        )

    def _check_quota(self, zone: str, chips: int) -> None:
        limit = self.settings.quota_chips
        if limit is None or self._chips_in_use(zone) + chips <= limit:
            return
        metric = "TPUChipsPerProjectPerZoneForTPUAPI"
        raise ApiError(
            code_pb2.RESOURCE_EXHAUSTED,
            f"Quota limit '{metric}' has been exceeded. Limit: {limit} in zone {zone}.",
            [
                error_details_pb2.ErrorInfo(
                    reason="RATE_LIMIT_EXCEEDED",
                    domain="googleapis.com",
                    metadata={"quota_limit": metric, "quota_limit_value": str(limit), "zone": zone},
                ),
                error_details_pb2.QuotaFailure(
                    violations=[error_details_pb2.QuotaFailure.Violation(subject=zone, description=metric)]
                ),
            ],
        )

    def _has_capacity(self, zone: str, *shapes: Slice) -> bool:
        chips, machines = self.settings.capacity_chips, self.settings.machines
        wanted = sum(self.settings.endpoints_per_node or shape.hosts for shape in shapes)
        if machines is not None and len(self._used_ips) + wanted > machines:
            return False
        return chips is None or self._chips_in_use(zone) + sum(shape.chips for shape in shapes) <= chips

    @staticmethod
    def _stock_out(zone: str) -> ApiError:
        return ApiError(
            code_pb2.RESOURCE_EXHAUSTED,
            f'There is no more capacity in the zone "{zone}"; you can try in another zone where '
            "Cloud TPU Nodes are offered",
        )
