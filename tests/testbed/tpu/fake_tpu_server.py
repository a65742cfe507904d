#!/usr/bin/env python3
"""A stand-in for the Cloud TPU API (``google.cloud.tpu.v2``) on a loopback port.

It speaks real gRPC with the real protobuf messages of ``google-cloud-tpu``, so the
unmodified ``TpuClient`` talks to it; only the cloud behind the API is simulated.

What it covers
    * ``CreateNode``, ``GetNode``, ``ListNodes``, ``DeleteNode``, ``StopNode``, ``StartNode``,
      ``UpdateNode`` and ``GetGuestAttributes``
    * ``Create/Get/List/Delete/ResetQueuedResource``, single node and multislice, with the
      states CREATING, ACCEPTED, WAITING_FOR_RESOURCES, PROVISIONING, ACTIVE, SUSPENDING,
      SUSPENDED, FAILED and DELETING
    * ``google.longrunning.Operations`` (Get, List, Wait, Cancel, Delete) and
      ``google.cloud.location.Locations``
    * accelerator types, runtime versions and one network endpoint per worker VM
    * quota errors, stock-outs, duplicates, spot preemption, maintenance events and
      faults injected into any method or long-running operation

What it does not cover
    Authentication, IAM and billing. The timing is that of ``Settings``. Where the public
    documentation does not fix a behaviour (which states accept a reset, the exact wording of
    an error), the choice made here is a plausible one and not a promise about the service.

In a test::

    with FakeTpuServer(Settings(provision_delay=0.2)) as fake:
        client = fake.client()
        node = t.Node(accelerator_type="v4-16", runtime_version="tpu-ubuntu2204-base")
        client.create_node(parent=PARENT, node_id="pod", node=node).result(polling=FAST_POLLING)
        fake.cloud.preempt(f"{PARENT}/nodes/pod")

From a shell::

    fake_tpu_cli.py serve --port 8470 --endpoints-per-node 2 --provision-delay 0.5
    fake_tpu_cli.py ctl --port 8470 preempt projects/p/locations/z/nodes/pod

``serve`` prints one JSON line (``{"address": "127.0.0.1:8470", "pid": 123}``) when it is ready.

The server is insecure by design. It refuses to listen on anything but a loopback address.
"""

from __future__ import annotations

import ipaddress
import json
import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent import futures
from dataclasses import fields
from typing import Any

import grpc
from fake_tpu_cloud import FakeTpuCloud
from fake_tpu_model import ApiError, CallRecord, Fault, Settings, WorkerHook, snake
from google.cloud.location import locations_pb2
from google.cloud.tpu_v2 import TpuClient
from google.cloud.tpu_v2.services.tpu.transports.grpc import TpuGrpcTransport
from google.cloud.tpu_v2.types import cloud_tpu as t
from google.longrunning import operations_pb2 as lro
from google.protobuf import empty_pb2, json_format, struct_pb2
from google.rpc import code_pb2
from grpc_status import rpc_status

LOG = logging.getLogger("fake_tpu")

TPU_SERVICE = "google.cloud.tpu.v2.Tpu"
OPERATIONS_SERVICE = "google.longrunning.Operations"
LOCATIONS_SERVICE = "google.cloud.location.Locations"
CONTROL_METHOD = "/testbed.faketpu.Control/Do"
TPU_METHODS = (
    *("ListNodes", "GetNode", "CreateNode", "DeleteNode", "StopNode", "StartNode", "UpdateNode"),
    *("ListQueuedResources", "GetQueuedResource", "CreateQueuedResource", "DeleteQueuedResource"),
    *("ResetQueuedResource", "GenerateServiceIdentity", "ListAcceleratorTypes", "GetAcceleratorType"),
    *("ListRuntimeVersions", "GetRuntimeVersion", "GetGuestAttributes"),
)

# --------------------------------------------------------------------------- gRPC


class FakeTpuServer:
    """Serves a ``FakeTpuCloud`` over gRPC. Use it as a context manager."""

    def __init__(
        self,
        settings: Settings | None = None,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        faults: Sequence[Fault] = (),
        worker_hook: WorkerHook | None = None,
    ) -> None:
        if not ipaddress.ip_address(host).is_loopback:
            raise ValueError(f"{host} is not a loopback address")
        self.cloud = FakeTpuCloud(settings, faults=faults, worker_hook=worker_hook)
        self._stop = threading.Event()
        self._server = grpc.server(
            futures.ThreadPoolExecutor(max_workers=16, thread_name_prefix="fake-tpu"),
            options=[("grpc.so_reuseport", 0)],
        )
        self._server.add_generic_rpc_handlers((self._handlers(),))
        self._server.add_generic_rpc_handlers((self._control_handler(),))
        self.port = self._server.add_insecure_port(f"{host}:{port}")
        self.address = f"{host}:{self.port}"
        self._ticker = threading.Thread(target=self._tick, name="fake-tpu-ticker", daemon=True)

    def __enter__(self) -> FakeTpuServer:
        self.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.stop()

    def start(self) -> None:
        self._server.start()
        self._ticker.start()

    def stop(self, grace: float = 0.2) -> None:
        self._stop.set()
        self._server.stop(grace).wait()
        self._ticker.join(timeout=5)
        self.cloud.shutdown()

    def channel(self) -> grpc.Channel:
        """A new insecure channel to this server; the caller closes it."""
        return grpc.insecure_channel(self.address)

    def client(self) -> TpuClient:
        """A real ``TpuClient`` for this server; no credentials are looked up."""
        return TpuClient(transport=TpuGrpcTransport(channel=self.channel()))

    def _tick(self) -> None:
        while not self._stop.wait(0.02):
            self.cloud.run_due()

    # ----- handlers

    def _handlers(self) -> grpc.GenericRpcHandler:
        cloud = self.cloud
        table: dict[str, grpc.RpcMethodHandler] = {}

        def add(service: str, method: str, request: Any, response: Any, function: Callable[[Any], Any]) -> None:
            plus = hasattr(request, "deserialize")  # a proto-plus message; others are plain protobuf
            table[f"/{service}/{method}"] = grpc.unary_unary_rpc_method_handler(
                self._endpoint(method, function),
                request_deserializer=request.deserialize if plus else request.FromString,
                response_serializer=response.serialize
                if hasattr(response, "serialize")
                else response.SerializeToString,
            )

        for method in TPU_METHODS:
            if method.startswith("List") or method in ("GetGuestAttributes", "GenerateServiceIdentity"):
                response = getattr(t, f"{method}Response")
            elif method.startswith("Get"):
                response = getattr(t, method.removeprefix("Get"))
            else:
                response = lro.Operation
            add(TPU_SERVICE, method, getattr(t, f"{method}Request"), response, getattr(cloud, snake(method)))
        ops = OPERATIONS_SERVICE
        add(ops, "GetOperation", lro.GetOperationRequest, lro.Operation, cloud.get_operation)
        add(ops, "WaitOperation", lro.WaitOperationRequest, lro.Operation, self._wait_operation)
        add(ops, "ListOperations", lro.ListOperationsRequest, lro.ListOperationsResponse, cloud.list_operations)
        add(ops, "CancelOperation", lro.CancelOperationRequest, empty_pb2.Empty, cloud.cancel_operation)
        add(ops, "DeleteOperation", lro.DeleteOperationRequest, empty_pb2.Empty, cloud.delete_operation)
        places = LOCATIONS_SERVICE
        location = locations_pb2.Location
        add(places, "GetLocation", locations_pb2.GetLocationRequest, location, cloud.get_location)
        many = locations_pb2.ListLocationsResponse
        add(places, "ListLocations", locations_pb2.ListLocationsRequest, many, cloud.list_locations)

        class Handler(grpc.GenericRpcHandler):  # type: ignore[misc]
            def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler | None:
                return table.get(details.method)

        return Handler()

    def _endpoint(self, method: str, function: Callable[[Any], Any]) -> Callable[[Any, grpc.ServicerContext], Any]:
        locked = method != "WaitOperation"

        def call(request: Any, context: grpc.ServicerContext) -> Any:
            cloud = self.cloud
            message = request if not hasattr(type(request), "pb") else type(request).pb(request)
            record = CallRecord(
                method,
                json_format.MessageToDict(message, preserving_proto_field_name=True),
                {k: v for k, v in context.invocation_metadata() if isinstance(v, str)},
            )
            cloud.calls.append(record)
            try:
                cloud.run_due()
                fault = cloud.take_fault(method)
                if fault:
                    raise fault
                if not locked:
                    return function(request)
                with cloud._lock:
                    return function(request)
            except ApiError as error:
                record.code = code_pb2.Code.Name(error.code)
                LOG.info("%s -> %s %s", method, record.code, error.message)
                context.abort_with_status(rpc_status.to_status(error.status()))

        return call

    def _wait_operation(self, request: lro.WaitOperationRequest) -> lro.Operation:
        wanted = request.timeout.ToTimedelta().total_seconds() or 30.0
        deadline = time.monotonic() + wanted
        while True:
            self.cloud.run_due()
            with self.cloud._lock:
                operation = self.cloud.get_operation(lro.GetOperationRequest(name=request.name))
            if operation.done or time.monotonic() >= deadline:
                return operation
            time.sleep(0.02)

    # ----- control

    def _control_handler(self) -> grpc.GenericRpcHandler:
        def do(request: struct_pb2.Struct, context: grpc.ServicerContext) -> struct_pb2.Struct:
            order = json_format.MessageToDict(request)
            answer = struct_pb2.Struct()
            try:
                answer.update(json.loads(json.dumps(self._control(order.get("action", ""), order.get("args", [])))))
            except (ApiError, ValueError, TypeError, KeyError) as error:
                context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
            return answer

        handler = grpc.unary_unary_rpc_method_handler(
            do,
            request_deserializer=struct_pb2.Struct.FromString,
            response_serializer=struct_pb2.Struct.SerializeToString,
        )

        class Handler(grpc.GenericRpcHandler):  # type: ignore[misc]
            def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler | None:
                return handler if details.method == CONTROL_METHOD else None

        return Handler()

    def _control(self, action: str, args: list[str]) -> dict[str, Any]:
        cloud = self.cloud
        cloud.run_due()
        if action == "preempt":
            cloud.preempt(*args)
        elif action == "terminate":
            cloud.terminate(*args)
        elif action == "maintenance":
            cloud.maintenance(*args)
        elif action == "maintenance-over":
            cloud.maintenance(*args, over=True)
        elif action == "guest-attribute":
            node, worker, path, value = args
            cloud.set_guest_attribute(node, int(worker), path, value)
        elif action == "suspend":
            cloud.suspend(*args)
        elif action == "fail":
            cloud.fail(*args)
        elif action == "fault":
            for text in args:
                cloud.add_fault(Fault.parse(text))
        elif action == "clear-faults":
            cloud.faults.clear()
        elif action == "set":
            cloud.configure(**dict(_setting(a) for a in args))
        elif action == "calls":
            return {"calls": [vars(c) for c in cloud.calls]}
        elif action != "summary":
            raise ValueError(f"unknown action {action!r}")
        return cloud.summary()


def _setting(text: str) -> tuple[str, Any]:
    """Read ``name=value``; the value is JSON, or a plain string."""
    name, _, value = text.partition("=")
    name = name.replace("-", "_")
    if name not in {f.name for f in fields(Settings)}:
        raise ValueError(f"unknown setting {name!r}")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


def control(address: str, action: str, *args: str, timeout: float = 60.0) -> dict[str, Any]:
    """Ask a server in another process to do something; see ``ctl --help`` for the actions."""
    order = struct_pb2.Struct()
    order.update({"action": action, "args": list(args)})
    with grpc.insecure_channel(address) as channel:
        call = channel.unary_unary(
            CONTROL_METHOD,
            request_serializer=struct_pb2.Struct.SerializeToString,
            response_deserializer=struct_pb2.Struct.FromString,
        )
        answer: dict[str, Any] = json_format.MessageToDict(call(order, timeout=timeout))
        return answer
