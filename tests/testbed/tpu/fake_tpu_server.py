"""A stand-in for the Cloud TPU API (``google.cloud.tpu.v2``) on a loopback port.

It speaks real gRPC with the real messages of ``google-cloud-tpu``, so the unmodified ``TpuClient`` talks to it; only
the cloud behind the API is simulated: nodes and queued resources of one node with their states, operations, guest
attributes, quotas, stock-outs, preemptions, and faults in any method. It has no authentication; the timing is that of
``Settings``. Where the public documentation does not fix a behaviour (which states accept a deletion, the exact wording
of an error), the choice made here is a plausible one and not a promise about the service.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent import futures
from typing import Any

import grpc
from fake_tpu_cloud import FakeTpuCloud
from fake_tpu_model import ApiError, CallRecord, Settings, WorkerHook, snake
from google.cloud.tpu_v2 import TpuClient
from google.cloud.tpu_v2.services.tpu.transports.grpc import TpuGrpcTransport
from google.cloud.tpu_v2.types import cloud_tpu as t
from google.longrunning import operations_pb2 as lro
from google.protobuf import json_format
from google.rpc import code_pb2
from grpc_status import rpc_status

LOG = logging.getLogger("fake_tpu")

TPU_SERVICE = "google.cloud.tpu.v2.Tpu"
OPERATIONS_SERVICE = "google.longrunning.Operations"
TPU_METHODS = (
    *("ListNodes", "GetNode", "CreateNode", "DeleteNode", "UpdateNode", "GetGuestAttributes"),
    *("ListQueuedResources", "GetQueuedResource", "CreateQueuedResource", "DeleteQueuedResource"),
    *("ListAcceleratorTypes", "ListRuntimeVersions"),
)

# --------------------------------------------------------------------------- gRPC


class FakeTpuServer:
    """Serves a ``FakeTpuCloud`` over gRPC. Use it as a context manager."""

    def __init__(
        self,
        settings: Settings | None = None,
        *,
        worker_hook: WorkerHook | None = None,
    ) -> None:
        self.cloud = FakeTpuCloud(settings, worker_hook=worker_hook)
        self._stop = threading.Event()
        self._server = grpc.server(
            futures.ThreadPoolExecutor(max_workers=16, thread_name_prefix="fake-tpu"),
            options=[("grpc.so_reuseport", 0)],
        )
        self._server.add_generic_rpc_handlers((self._handlers(),))
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
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

    def client(self) -> TpuClient:
        """A real ``TpuClient`` for this server; no credentials are looked up."""
        return TpuClient(transport=TpuGrpcTransport(channel=grpc.insecure_channel(self.address)))

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
            if method.startswith("List") or method == "GetGuestAttributes":
                response = getattr(t, f"{method}Response")
            elif method.startswith("Get"):
                response = getattr(t, method.removeprefix("Get"))
            else:
                response = lro.Operation
            add(TPU_SERVICE, method, getattr(t, f"{method}Request"), response, getattr(cloud, snake(method)))
        ops = OPERATIONS_SERVICE
        add(ops, "GetOperation", lro.GetOperationRequest, lro.Operation, cloud.get_operation)
        add(ops, "ListOperations", lro.ListOperationsRequest, lro.ListOperationsResponse, cloud.list_operations)

        class Handler(grpc.GenericRpcHandler):  # type: ignore[misc]
            def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler | None:
                return table.get(details.method)

        return Handler()

    def _endpoint(self, method: str, function: Callable[[Any], Any]) -> Callable[[Any, grpc.ServicerContext], Any]:
        def call(request: Any, context: grpc.ServicerContext) -> Any:
            cloud = self.cloud
            message = request if not hasattr(type(request), "pb") else type(request).pb(request)
            record = CallRecord(
                method,
                json_format.MessageToDict(message, preserving_proto_field_name=True),
            )
            cloud.calls.append(record)
            try:
                cloud.run_due()
                fault = cloud.take_fault(method)
                if fault:
                    raise fault
                with cloud._lock:
                    return function(request)
            except ApiError as error:
                record.code = code_pb2.Code.Name(error.code)
                LOG.info("%s -> %s %s", method, record.code, error.message)
                context.abort_with_status(rpc_status.to_status(error.status()))

        return call
