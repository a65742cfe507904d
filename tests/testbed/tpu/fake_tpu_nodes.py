"""The nodes of a simulated TPU cloud: made, deleted, stopped, preempted; and their workers."""

from __future__ import annotations

import ipaddress
import itertools
import logging
import threading
import time
from collections.abc import Callable

from fake_tpu_core import CloudCore
from fake_tpu_model import (
    NODE_ID,
    ApiError,
    Initiator,
    NodeHealth,
    NodeRecord,
    NodeState,
    QrState,
    Slice,
    WorkerEvent,
    copy_of,
    invalid,
    not_found,
    page_of,
    precondition,
    timestamp,
)
from google.cloud.tpu_v2.types import cloud_tpu as t
from google.longrunning import operations_pb2 as lro
from google.rpc import code_pb2

LOG = logging.getLogger("fake_tpu")


class NodesOfCloud(CloudCore):
    """The part of the API that is about nodes."""

    # ----- nodes, inner

    def _lease_ips(self, count: int) -> list[str]:
        first = ipaddress.ip_address(self.settings.ip_base)
        found: list[str] = []
        for offset in itertools.count():
            address = str(first + offset)
            if address not in self._used_ips:
                found.append(address)
            if len(found) == count:
                break
        self._used_ips.update(found)
        return found

    def _begin_node(
        self,
        parent: str,
        node_id: str,
        spec: t.Node,
        shape: Slice,
        *,
        on_ready: Callable[[], None],
        on_fail: Callable[[ApiError], None],
        queued_resource: str = "",
    ) -> NodeRecord:
        node = copy_of(spec)
        node.name = f"{parent}/nodes/{node_id}"
        node.accelerator_type = shape.accelerator_type
        node.state = NodeState.CREATING
        node.create_time = timestamp()
        node.id = next(self._serial)
        node.api_version = "V2"
        node.queued_resource = queued_resource
        ips = self._lease_ips(self.settings.endpoints_per_node or shape.hosts)
        record = NodeRecord(node, shape, parent, ips, on_ready, on_fail)
        self._nodes[node.name] = record
        self._after(self.settings.provision_delay, lambda: self._bring_up(record))
        return record

    def _alive(self, record: NodeRecord, *states: int) -> bool:
        return self._nodes.get(record.node.name) is record and record.node.state in states

    def _bring_up(self, record: NodeRecord) -> None:
        if not self._alive(record, NodeState.CREATING):
            return
        fault = self.take_fault("op:create-node")
        if fault:
            record.on_fail(fault)
        elif self.worker_hook is None:
            self._ready(record, None)
        else:
            self._start_hooks(record, self._run_up_hooks)

    def _events(self, record: NodeRecord, action: str) -> list[WorkerEvent]:
        return [
            WorkerEvent(
                action,
                record.node.name,
                record.shape.accelerator_type,
                worker,
                ip,
                dict(record.node.metadata),
            )
            for worker, ip in enumerate(record.ips)
        ]

    def _start_hooks(self, record: NodeRecord, work: Callable[[NodeRecord], None]) -> None:
        """Run hooks off the request thread, and those of one node one after the other."""
        before = record.hook_thread

        def run() -> None:
            if before is not None:
                before.join()
            work(record)

        record.hook_thread = threading.Thread(target=run, name="fake-tpu-hook", daemon=True)
        self._hooks.append(record.hook_thread)
        record.hook_thread.start()

    def _run_up_hooks(self, record: NodeRecord) -> None:
        error: ApiError | None = None
        try:
            for event in self._events(record, "up"):
                assert self.worker_hook is not None
                found = self.worker_hook(event)
                if found:
                    record.guest_attributes.setdefault(event.worker_id, {}).update(found)
        except Exception as problem:  # a hook is foreign code: its failure is the node's
            LOG.warning("worker hook failed: %s", problem)
            error = ApiError(code_pb2.INTERNAL, str(problem))
        self._after(0, lambda: self._ready(record, error))

    def _run_down_hooks(self, record: NodeRecord) -> None:
        for event in self._events(record, "down"):
            try:
                assert self.worker_hook is not None
                self.worker_hook(event)
            except Exception as problem:
                LOG.warning("worker hook failed: %s", problem)
        with self._lock:
            self._used_ips.difference_update(record.ips)

    def _ready(self, record: NodeRecord, error: ApiError | None) -> None:
        if not self._alive(record, NodeState.CREATING):
            return
        if error:
            record.on_fail(error)
            return
        node = record.node
        node.state = NodeState.READY
        node.health = NodeHealth.HEALTHY
        node.network_endpoints = [
            t.NetworkEndpoint(
                ip_address=ip,
                port=8470,
                access_config=t.AccessConfig(external_ip=ip) if self.settings.external_ips else None,
            )
            for ip in record.ips
        ]
        record.on_ready()

    def _take_down(self, record: NodeRecord) -> None:
        """Workers are gone: run the hooks, then free the addresses."""
        if self.worker_hook is None:
            self._used_ips.difference_update(record.ips)
        else:
            self._start_hooks(record, self._run_down_hooks)

    def _drop(self, record: NodeRecord) -> None:
        if self._nodes.get(record.node.name) is record:
            del self._nodes[record.node.name]
            if record.node.state not in (NodeState.PREEMPTED, NodeState.TERMINATED):
                self._take_down(record)

    def _preempt(self, record: NodeRecord) -> None:
        if record.node.state == NodeState.CREATING:
            record.on_fail(ApiError(code_pb2.ABORTED, "The node was preempted while it was being created"))
            return
        record.node.state = NodeState.PREEMPTED
        record.node.health_description = "The TPU has been preempted."
        self._take_down(record)
        owner = self._queued.get(record.node.queued_resource)
        if owner:
            self._suspend(owner, Initiator.SERVICE)

    def _node(self, name: str) -> NodeRecord:
        if name not in self._nodes:
            raise not_found(name)
        return self._nodes[name]

    # ----- nodes, API

    def create_node(self, request: t.CreateNodeRequest) -> lro.Operation:
        zone = self._zone(request.parent)
        node_id = request.node_id or f"tpu-{next(self._serial)}"
        if not NODE_ID.fullmatch(node_id):
            raise invalid(f"Invalid node id {node_id!r}")
        shape = self._check_node(request.node)
        name = f"{request.parent}/nodes/{node_id}"
        if name in self._nodes:
            raise ApiError(code_pb2.ALREADY_EXISTS, f"Resource '{name}' already exists")
        self._check_quota(zone, shape.chips)
        operation = self._new_operation(request.parent, name, "create")
        if not self._has_capacity(zone, shape):
            self._after(self.settings.provision_delay, lambda: self._finish(operation, error=self._stock_out(zone)))
            return self._snapshot(operation)

        def failed(error: ApiError) -> None:
            self._drop(record)
            self._finish(operation, error=error)

        record = self._begin_node(
            request.parent,
            node_id,
            request.node,
            shape,
            on_ready=lambda: self._finish(operation, copy_of(record.node)),
            on_fail=failed,
        )
        return self._snapshot(operation)

    def get_node(self, request: t.GetNodeRequest) -> t.Node:
        node: t.Node = copy_of(self._node(request.name).node)
        if node.create_time.timestamp() > time.time() - self.settings.listing_delay:
            raise not_found(request.name)
        return node

    def list_nodes(self, request: t.ListNodesRequest) -> t.ListNodesResponse:
        items = [copy_of(r.node) for r in self._nodes.values() if self._within(r.parent, request.parent)]
        latest = time.time() - self.settings.listing_delay
        items = [node for node in items if node.create_time.timestamp() <= latest]
        page, token = page_of(items, request.page_size, request.page_token)
        return t.ListNodesResponse(nodes=page, next_page_token=token)

    @staticmethod
    def _within(parent: str, wanted: str) -> bool:
        return parent == wanted or (wanted.endswith("/locations/-") and parent.startswith(wanted[:-1]))

    def delete_node(self, request: t.DeleteNodeRequest) -> lro.Operation:
        record = self._node(request.name)
        if record.node.state == NodeState.DELETING:
            raise precondition(f"Resource '{request.name}' is already being deleted")
        operation = self._new_operation(record.parent, request.name, "delete")
        fault = self.take_fault("op:delete-node")
        if fault:
            self._after(self.settings.delete_delay, lambda: self._finish(operation, error=fault))
            return self._snapshot(operation)
        gone = record.node.state in (NodeState.PREEMPTED, NodeState.TERMINATED)
        record.node.state = NodeState.DELETING
        owner = self._queued.get(record.node.queued_resource)

        def delete() -> None:
            if self._nodes.get(request.name) is record:
                del self._nodes[request.name]
                if not gone:
                    self._take_down(record)
            if owner and owner.state in (QrState.ACTIVE, QrState.PROVISIONING):
                self._suspend(owner, Initiator.USER)
            self._finish(operation)

        self._after(self.settings.delete_delay, delete)
        return self._snapshot(operation)

    def update_node(self, request: t.UpdateNodeRequest) -> lro.Operation:
        record = self._node(request.node.name)
        allowed = {"description", "labels", "tags", "metadata", "data_disks"}
        unknown = set(request.update_mask.paths) - allowed
        if unknown or not request.update_mask.paths:
            raise invalid(f"Unsupported update_mask {sorted(unknown)}, want a subset of {sorted(allowed)}")
        operation = self._new_operation(record.parent, request.node.name, "update")
        for path in request.update_mask.paths:
            setattr(record.node, path, getattr(request.node, path))
        self._after(0, lambda: self._finish(operation, copy_of(record.node)))
        return self._snapshot(operation)

    def get_guest_attributes(self, request: t.GetGuestAttributesRequest) -> t.GetGuestAttributesResponse:
        record = self._node(request.name)
        everyone = [str(i) for i in range(len(record.ips))]
        wanted = [w for w in request.worker_ids if w] or everyone
        if not set(wanted) <= set(everyone):
            raise invalid(f"Unknown worker ids {sorted(set(wanted) - set(everyone))}")
        answers = []
        for worker in wanted:
            items = []
            for path, text in sorted(record.guest_attributes.get(int(worker), {}).items()):
                if path.startswith(request.query_path):
                    namespace, _, key = path.partition("/")
                    items.append(t.GuestAttributesEntry(namespace=namespace, key=key, value=text))
            value = t.GuestAttributesValue(items=items)
            answers.append(t.GuestAttributes(query_path=request.query_path, query_value=value))
        return t.GetGuestAttributesResponse(guest_attributes=answers)
