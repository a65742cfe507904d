"""The state behind the API: nodes, queued resources, operations and a timeline of events."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from fake_tpu_model import (
    LISTED_ACCELERATORS,
    NODE_ID,
    QUEUED_ID,
    RUNTIME_VERSIONS,
    STATE_DATA,
    ApiError,
    Initiator,
    QrState,
    QueuedRecord,
    copy_of,
    invalid,
    not_found,
    page_of,
    precondition,
    timestamp,
)
from fake_tpu_nodes import NodesOfCloud
from google.cloud.tpu_v2.types import cloud_tpu as t
from google.longrunning import operations_pb2 as lro
from google.rpc import code_pb2


class FakeTpuCloud(NodesOfCloud):
    """The state behind the API.

    Public methods may be called from any thread. Time advances only through ``run_due``, which
    every request calls; the server calls it from a ticker as well.
    """

    # ----- queued resources, inner

    def _set_qr(
        self,
        record: QueuedRecord,
        state: int,
        error: ApiError | None = None,
        initiator: int = Initiator.STATE_INITIATOR_UNSPECIFIED,
    ) -> None:
        kwargs: dict[str, Any] = {"state": state, "state_initiator": initiator}
        if state in STATE_DATA:
            kwargs[STATE_DATA[state]] = {"error": error.status()} if error else {}
        record.resource.state = t.QueuedResourceState(**kwargs)

    def _qr_step(self, record: QueuedRecord, delay: float, event: Callable[[], None]) -> None:
        """Schedule ``event`` unless the record is reset, deleted or suspended meanwhile."""
        generation = record.generation

        def run() -> None:
            if self._queued.get(record.resource.name) is record and record.generation == generation:
                event()

        self._after(delay, run)

    def _enqueue(self, record: QueuedRecord, accepted: Callable[[], None] = lambda: None) -> None:
        record.generation += 1
        self._set_qr(record, QrState.CREATING)

        def accept() -> None:
            self._set_qr(record, QrState.ACCEPTED)
            accepted()
            self._qr_step(record, self.settings.accept_delay, wait)

        def wait() -> None:
            self._set_qr(record, QrState.WAITING_FOR_RESOURCES)
            self._qr_step(record, self.settings.queue_delay, lambda: self._try_provision(record))

        self._qr_step(record, self.settings.accept_delay, accept)

    def _try_provision(self, record: QueuedRecord) -> None:
        zone = record.parent.rsplit("/", 1)[-1]
        shapes = [self._shape(node) for _, node in record.specs]
        now = self._clock()
        if record.expires_at is not None and now >= record.expires_at:
            self._fail_qr(record, ApiError(code_pb2.DEADLINE_EXCEEDED, "The request expired before it could be filled"))
            return
        if not self._has_capacity(zone, *shapes):
            self._qr_step(record, 0.05, lambda: self._try_provision(record))
            return
        fault = self.take_fault("op:provision-qr")
        if fault:
            self._fail_qr(record, fault)
            return
        self._set_qr(record, QrState.PROVISIONING)
        waiting = {node_id for node_id, _ in record.specs}

        def ready(node_id: str) -> None:
            waiting.discard(node_id)
            if not waiting and record.state == QrState.PROVISIONING:
                self._set_qr(record, QrState.ACTIVE)

        def failed(error: ApiError) -> None:
            if record.state == QrState.PROVISIONING:
                self._fail_qr(record, error)

        for node_id in waiting:
            if f"{record.parent}/nodes/{node_id}" in self._nodes:
                text = f"Resource '{record.parent}/nodes/{node_id}' already exists"
                self._fail_qr(record, ApiError(code_pb2.ALREADY_EXISTS, text))
                return
        for (node_id, spec), shape in zip(record.specs, shapes, strict=True):
            node = self._begin_node(
                record.parent,
                node_id,
                spec,
                shape,
                on_ready=lambda node_id=node_id: ready(node_id),  # type: ignore[misc]
                on_fail=failed,
                queued_resource=record.resource.name,
            )
            record.nodes.append(node.node.name)

    def _drop_qr_nodes(self, record: QueuedRecord) -> None:
        for name in record.nodes:
            node = self._nodes.get(name)
            if node is not None and node.node.queued_resource == record.resource.name:
                self._drop(node)
        record.nodes = []

    def _fail_qr(self, record: QueuedRecord, error: ApiError) -> None:
        record.generation += 1
        self._drop_qr_nodes(record)
        self._set_qr(record, QrState.FAILED, error)

    def _suspend(self, record: QueuedRecord, initiator: int) -> None:
        if record.state not in (QrState.ACTIVE, QrState.PROVISIONING):
            return
        record.generation += 1
        self._set_qr(record, QrState.SUSPENDING, initiator=initiator)

        def suspended() -> None:
            self._drop_qr_nodes(record)
            self._set_qr(record, QrState.SUSPENDED, initiator=initiator)

        self._qr_step(record, self.settings.suspend_delay, suspended)

    def _queued_resource(self, name: str) -> QueuedRecord:
        if name not in self._queued:
            raise not_found(name)
        return self._queued[name]

    # ----- queued resources, API

    def create_queued_resource(self, request: t.CreateQueuedResourceRequest) -> lro.Operation:
        zone = self._zone(request.parent)
        seen = self._requests.get((request.parent, request.request_id)) if request.request_id else None
        if seen:
            return self._snapshot(self._operation(seen))
        qr_id = request.queued_resource_id or f"qr-{next(self._serial)}"
        if not QUEUED_ID.fullmatch(qr_id):
            raise invalid(f"Invalid queued resource id {qr_id!r}")
        name = f"{request.parent}/queuedResources/{qr_id}"
        if name in self._queued:
            raise ApiError(code_pb2.ALREADY_EXISTS, f"Resource '{name}' already exists")
        specs: list[tuple[str, t.Node]] = []
        chips = 0
        for spec in request.queued_resource.tpu.node_spec:
            if spec.parent != request.parent:
                raise invalid(f"node_spec.parent must be {request.parent!r}")
            specs.append((spec.node_id, spec.node))
            chips += self._check_node(spec.node).chips
        if not specs:
            raise invalid("tpu.node_spec is required")
        for node_id, _ in specs:
            if not NODE_ID.fullmatch(node_id):
                raise invalid(f"Invalid node id {node_id!r}")
            if f"{request.parent}/nodes/{node_id}" in self._nodes:
                raise ApiError(code_pb2.ALREADY_EXISTS, f"Resource '{request.parent}/nodes/{node_id}' already exists")
        self._check_quota(zone, chips)
        resource = copy_of(request.queued_resource)
        resource.name = name
        resource.create_time = timestamp()
        record = QueuedRecord(resource, request.parent, specs, self._expiry(request.queued_resource))
        self._queued[name] = record
        operation = self._new_operation(request.parent, name, "create")
        if request.request_id:
            self._requests[request.parent, request.request_id] = operation.name
        self._enqueue(record, accepted=lambda: self._finish(operation, copy_of(record.resource)))
        return self._snapshot(operation)

    def _expiry(self, resource: t.QueuedResource) -> float | None:
        """When the request is given up."""
        policy = t.QueuedResource.QueueingPolicy.pb(resource.queueing_policy)
        if policy.WhichOneof("start_timing_constraints") != "valid_until_duration":
            return None
        return self._clock() + float(policy.valid_until_duration.ToTimedelta().total_seconds())

    def get_queued_resource(self, request: t.GetQueuedResourceRequest) -> t.QueuedResource:
        resource: t.QueuedResource = copy_of(self._queued_resource(request.name).resource)
        return resource

    def list_queued_resources(self, request: t.ListQueuedResourcesRequest) -> t.ListQueuedResourcesResponse:
        items = [copy_of(r.resource) for r in self._queued.values() if self._within(r.parent, request.parent)]
        page, token = page_of(items, request.page_size, request.page_token)
        return t.ListQueuedResourcesResponse(queued_resources=page, next_page_token=token)

    def delete_queued_resource(self, request: t.DeleteQueuedResourceRequest) -> lro.Operation:
        record = self._queued_resource(request.name)
        busy = (QrState.PROVISIONING, QrState.ACTIVE, QrState.SUSPENDING, QrState.DELETING)
        if record.state in busy and not request.force:
            raise precondition(
                f"Can not delete a queued resource in state {record.state_name}; delete its nodes first or use force"
            )
        operation = self._new_operation(record.parent, request.name, "delete")
        record.generation += 1
        self._set_qr(record, QrState.DELETING)

        def delete() -> None:
            self._drop_qr_nodes(record)
            if self._queued.get(request.name) is record:
                del self._queued[request.name]
            self._finish(operation)

        self._after(self.settings.delete_delay, delete)
        return self._snapshot(operation)

    # ----- catalogue

    def list_accelerator_types(self, request: t.ListAcceleratorTypesRequest) -> t.ListAcceleratorTypesResponse:
        self._zone(request.parent)
        items = [t.AcceleratorType(name=f"{request.parent}/acceleratorTypes/{a}", type_=a) for a in LISTED_ACCELERATORS]
        page, token = page_of(items, request.page_size, request.page_token)
        return t.ListAcceleratorTypesResponse(accelerator_types=page, next_page_token=token)

    def list_runtime_versions(self, request: t.ListRuntimeVersionsRequest) -> t.ListRuntimeVersionsResponse:
        self._zone(request.parent)
        items = [t.RuntimeVersion(name=f"{request.parent}/runtimeVersions/{v}", version=v) for v in RUNTIME_VERSIONS]
        page, token = page_of(items, request.page_size, request.page_token)
        return t.ListRuntimeVersionsResponse(runtime_versions=page, next_page_token=token)

    # ----- what happens to resources without anybody asking

    def preempt(self, node_name: str) -> None:
        """Take a node away, as happens to spot capacity."""
        with self._lock:
            self._preempt(self._node(node_name))

    def set_guest_attribute(self, node_name: str, worker: int, path: str, value: str) -> None:
        """Publish a guest attribute such as ``hostkeys/ssh-ed25519`` for one worker."""
        with self._lock:
            self._node(node_name).guest_attributes.setdefault(int(worker), {})[path] = value

    def activate_without_node(self, queued_resource_name: str) -> None:
        """Let a queued resource be ACTIVE, and its node never come."""
        with self._lock:
            record = self._queued_resource(queued_resource_name)
            record.generation += 1
            self._set_qr(record, QrState.ACTIVE)

    def configure(self, **changes: Any) -> None:
        """Change settings while running, for instance ``capacity_chips``."""
        with self._lock:
            self.settings = replace(self.settings, **changes)

    def shutdown(self, timeout: float = 120.0) -> None:
        """Take every worker down and wait for the hooks."""
        with self._lock:
            for record in list(self._nodes.values()):
                self._drop(record)
        for hook in self._hooks:
            hook.join(timeout)

    def summary(self) -> dict[str, Any]:
        """Names and states of everything."""
        with self._lock:
            return {
                "nodes": {n: r.node.state.name for n, r in self._nodes.items()},
                "queued_resources": {n: r.state_name for n, r in self._queued.items()},
            }
