"""Client of the TPU API: plain values, a time limit and retries for every call, one sentence per error.

The client library has neither by default, and gives up on long operations after a quarter of an hour.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

from orc.launchers.backends.tpu.lifecycle import Creation, Node, QueuedResource
from orc.launchers.backends.tpu.request import API, NODES, parent
from orc.launchers.errors import BackendError, BackendUnreachable

if TYPE_CHECKING:
    from google.api_core.retry import Retry
    from google.cloud.tpu_v2 import TpuClient

    from orc.launchers.backends.tpu.settings import Options

CALL_TIMEOUT_S = 20.0  # of one try
READ_PATIENCE_S = 30.0  # of all tries of a question
WRITE_PATIENCE_S = 30.0  # of all tries of an order; what was ordered may have been done
_PAGE = 500
_AT_ONCE = 100  # workers whose host keys are asked for in one call
T = TypeVar("T")


class AlreadyExists(BackendError):
    """A resource of that name exists."""


class ResourceExhausted(BackendError):
    """The zone has no such TPU now, or the project's quota is used up."""


class ApiRejected(BackendError):
    """The API rejected the call; ``code`` is its status code."""

    code = ""


class NotFound(ApiRejected):
    """No resource of that name exists."""


def check_library() -> None:
    """Raise `BackendUnreachable` where the library is not installed: another process may have it, so jobs can wait."""
    try:
        import google.cloud.tpu_v2  # noqa: F401
    except ImportError as error:
        what = f"the library of Cloud TPU is missing: {error}"
        raise BackendUnreachable(what, hint="pip install 'orc-launch[gcp]'") from None


class TpuApi:
    """Client of one project. Connects on first use."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self._channel: Any = None

    @cached_property
    def _client(self) -> TpuClient:
        check_library()
        from google.cloud.tpu_v2 import TpuClient
        from google.cloud.tpu_v2.services.tpu.transports.grpc import TpuGrpcTransport

        with self._errors("connect"):
            if self.options.insecure:
                import grpc

                self._channel = grpc.insecure_channel(self.options.endpoint)
                return TpuClient(transport=TpuGrpcTransport(channel=self._channel))
            from google.api_core.client_options import ClientOptions

            own = ClientOptions(api_endpoint=self.options.endpoint) if self.options.endpoint else None
            return TpuClient(client_options=own)

    def close(self) -> None:
        """Close the connection; it is made anew when it is needed again."""
        if "_client" in self.__dict__:
            self._client.transport.close()  # type: ignore[no-untyped-call]
            del self.__dict__["_client"]

    # -- looking

    def queued(self, zone: str) -> list[QueuedResource]:
        """Return all queued resources of a zone."""
        return [_queued(item) for item in self._all("list_queued_resources", zone)]

    def nodes(self, zone: str) -> list[Node]:
        """Return all nodes of a zone."""
        return [_node(item) for item in self._all("list_nodes", zone)]

    def runtime_versions(self, zone: str) -> list[str]:
        """Return the runtime versions of a zone."""
        return sorted(item.version for item in self._all("list_runtime_versions", zone))

    def accelerator_types(self, zone: str) -> list[str]:
        """Return the types that a zone has."""
        return sorted(item.type_ for item in self._all("list_accelerator_types", zone))

    def _all(self, method: str, zone: str) -> list[Any]:
        request = {"parent": parent(self.options.project, zone), "page_size": _PAGE}
        with self._errors(zone):
            return list(getattr(self._client, method)(request=request, **self._reading))  # its pager asks for the rest

    def node(self, zone: str, name: str) -> Node | None:
        """Return a node; `None` when there is none of that name."""
        found = self._one("get_node", f"{parent(self.options.project, zone)}/nodes/{name}")
        return None if found is None else _node(found)

    def queued_resource(self, zone: str, name: str) -> QueuedResource | None:
        """Return a queued resource; `None` when there is none of that name."""
        found = self._one("get_queued_resource", f"{parent(self.options.project, zone)}/queuedResources/{name}")
        return None if found is None else _queued(found)

    def _one(self, method: str, name: str) -> Any:
        try:
            with self._errors(name):
                return getattr(self._client, method)(name=name, **self._reading)
        except NotFound:
            return None

    def creations(self, zone: str) -> dict[str, Creation]:
        """Return the newest creation of each resource of a zone, by its full name.

        A node is not listed before its creation has got somewhere, and one that could not be made leaves nothing else.
        """
        from google.cloud.tpu_v2.types import cloud_tpu
        from google.rpc import code_pb2

        newest: dict[str, Creation] = {}
        with self._errors(zone):
            for operation in self._operations(zone):
                about = cloud_tpu.OperationMetadata()
                if not operation.metadata.Unpack(cloud_tpu.OperationMetadata.pb(about)) or about.verb != "create":
                    continue
                at, error, before = _seconds(about.create_time), operation.error, newest.get(about.target)
                if before is not None and (at or 0.0) < (before.started_at or 0.0):
                    continue
                code = code_pb2.Code.Name(error.code) if error.code else ""
                newest[about.target] = Creation(operation.done, at, code, error.message)
        return newest

    def _operations(self, zone: str) -> Iterator[Any]:
        token = ""
        while True:
            request = {"name": parent(self.options.project, zone), "page_size": _PAGE, "page_token": token}
            answer = self._client.list_operations(request=request, **self._reading)
            yield from answer.operations
            token = answer.next_page_token
            if not token:
                return

    def host_keys(self, node: Node) -> list[dict[str, str]]:
        """Return the host keys that each worker of *node* has published, by type; empty before it has."""
        found: list[dict[str, str]] = []
        for first in range(0, len(node.addresses), _AT_ONCE):
            workers = [str(k) for k in range(first, min(first + _AT_ONCE, len(node.addresses)))]
            request = {"name": node.name, "query_path": "hostkeys/", "worker_ids": workers}
            with self._errors(node.name):
                answer = self._client.get_guest_attributes(request=request, **self._reading)
            attributes = list(answer.guest_attributes)
            if len(attributes) != len(workers):
                raise BackendUnreachable(
                    f"{len(attributes)} of {len(workers)} workers have guest attributes so far", where=node.name
                )
            found += [{item.key: item.value for item in one.query_value.items} for one in attributes]
        return found

    # -- ordering

    def create(self, request: Mapping[str, Any]) -> None:
        """Create a TPU by a request of a plan. Returns when it was accepted, which is long before it is up.

        Raises `AlreadyExists`, `ResourceExhausted` and `ApiRejected`; `BackendUnreachable` when it may have been taken.
        """
        from google.cloud.tpu_v2.types import cloud_tpu

        with self._errors(str(request["parent"])):
            if "queued_resource" in request:
                queued = cloud_tpu.CreateQueuedResourceRequest.from_json(json.dumps(request))
                self._client.create_queued_resource(request=queued, **self._writing)
            else:
                node = cloud_tpu.CreateNodeRequest.from_json(json.dumps(request))
                self._client.create_node(request=node, **self._writing)

    def delete(self, name: str, *, wait_s: float = 0.0) -> None:
        """Delete a queued resource (with its node) or a node; a missing one is no error.

        Returns when the order was taken, or with *wait_s* when it has been carried out.
        """
        try:
            with self._errors(name):
                if f"/{NODES}/" in name:
                    operation = self._client.delete_node(name=name, **self._writing)
                else:
                    order = {"name": name, "force": True}  # with its node, whatever it does
                    operation = self._client.delete_queued_resource(request=order, **self._writing)
                if wait_s:
                    self._until_done(operation, wait_s)
        except NotFound:
            return

    def label(self, node: Node, labels: Mapping[str, str], *, wait_s: float = 60.0) -> None:
        """Replace the labels of *node*."""
        from google.cloud.tpu_v2.types import cloud_tpu

        with self._errors(node.name):
            update = {"node": cloud_tpu.Node(name=node.name, labels=dict(labels)), "update_mask": {"paths": ["labels"]}}
            self._until_done(self._client.update_node(request=update, **self._writing), wait_s)

    @staticmethod
    def _until_done(operation: Any, wait_s: float) -> None:
        """Wait for a long operation, for *wait_s* and not for the library's default."""
        from google.api_core.future.polling import DEFAULT_POLLING

        polling = DEFAULT_POLLING.with_delay(initial=0.2, maximum=10.0, multiplier=1.5).with_timeout(wait_s)
        try:
            operation.result(timeout=wait_s, polling=polling)
        except TimeoutError:
            what = f"it was ordered, and is not done after {wait_s:g} s"
            raise BackendUnreachable(what, where=operation.operation.name) from None

    # -- how calls are made

    @cached_property
    def _reading(self) -> dict[str, Any]:
        """Retry of reads, which are idempotent; slower when the rate limit is hit."""
        from google.api_core import exceptions as e

        busy = (e.ServiceUnavailable, e.DeadlineExceeded, e.InternalServerError, e.TooManyRequests, e.Aborted)
        return {"timeout": CALL_TIMEOUT_S, "retry": _retry(READ_PATIENCE_S, *busy)}

    @cached_property
    def _writing(self) -> dict[str, Any]:
        """Retry of writes, which name their resource, so that a repetition changes nothing."""
        from google.api_core import exceptions as e

        return {
            "timeout": CALL_TIMEOUT_S,
            "retry": _retry(WRITE_PATIENCE_S, e.ServiceUnavailable, e.DeadlineExceeded, e.Aborted),
        }

    @contextmanager
    def _errors(self, where: str) -> Iterator[None]:
        """Translate the library's errors."""
        from google.api_core import exceptions as e
        from google.auth import exceptions as auth

        try:
            yield
        except auth.DefaultCredentialsError:
            what = "there are no Google Cloud credentials on this machine"
            hint = "Run `gcloud auth application-default login`, or set GOOGLE_APPLICATION_CREDENTIALS."
            raise BackendError(what, where=self.options.project, hint=hint) from None
        except auth.GoogleAuthError as error:
            what = f"Google Cloud does not take the credentials: {_first_line(error)}"
            hint = "Have they expired? `gcloud auth application-default login` renews them."
            raise BackendError(what, where=self.options.project, hint=hint) from None
        except e.AlreadyExists as error:
            raise AlreadyExists(error.message, where=where) from None
        except e.ResourceExhausted as error:
            raise ResourceExhausted(error.message, where=where) from None
        except (e.PermissionDenied, e.Forbidden) as error:
            raise _rejection(
                ApiRejected, error, where, f"Does your account have the role TPU Admin, and is {API} on?"
            ) from None
        except e.Unauthenticated as error:
            raise _rejection(ApiRejected, error, where, "Run `gcloud auth application-default login`.") from None
        except e.NotFound as error:
            raise _rejection(NotFound, error, where, "") from None
        except (e.InvalidArgument, e.FailedPrecondition, e.OutOfRange, e.MethodNotImplemented) as error:
            raise _rejection(ApiRejected, error, where, "") from None
        except (e.GoogleAPICallError, e.RetryError) as error:
            raise BackendUnreachable(f"the TPU API does not answer: {_first_line(error)}", where=where) from None


def _retry(patience_s: float, *kinds: type[Exception]) -> Retry:
    from google.api_core.retry import Retry, if_exception_type

    return Retry(predicate=if_exception_type(*kinds), initial=0.2, maximum=10.0, multiplier=2.0, timeout=patience_s)


def _rejection(kind: type[ApiRejected], error: Any, where: str, hint: str) -> ApiRejected:
    zone_rejected = kind(error.message, where=where, hint=hint)
    zone_rejected.code = error.grpc_status_code.name if error.grpc_status_code else ""
    return zone_rejected


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__


def _seconds(time: Any) -> float | None:
    """Return a time of the API in seconds since the epoch; `None` for one that is not set."""
    return float(time.timestamp()) if time else None


def _queued(item: Any) -> QueuedResource:
    """Return a QueuedResource message as a plain value."""
    from google.rpc import code_pb2

    specs = list(item.tpu.node_spec)
    error = item.state.failed_data.error
    return QueuedResource(
        name=item.name,
        state=item.state.state.name,
        accelerator_type=specs[0].node.accelerator_type if specs else "",
        labels=dict(specs[0].node.labels) if specs else {},
        code=code_pb2.Code.Name(error.code) if error.code else "",
        error=error.message,
        by_user=item.state.state_initiator.name == "USER",
        created_at=_seconds(item.create_time),
    )


def _node(item: Any) -> Node:
    """Return a Node message as a plain value."""
    interfaces = max(1, len(item.network_configs))
    ends = list(item.network_endpoints)[::interfaces]  # a worker has one for each of its interfaces
    unwell = item.health.name not in ("HEALTHY", "HEALTH_UNSPECIFIED")
    return Node(
        name=item.name,
        state=item.state.name,
        accelerator_type=item.accelerator_type,
        labels=dict(item.labels),
        addresses=tuple((end.ip_address, end.access_config.external_ip if end.access_config else "") for end in ends),
        health=(item.health_description or item.health.name) if unwell else "",
        queued=item.queued_resource,
        created_at=_seconds(item.create_time),
        serial=item.id,
    )


def in_zones(zones: Sequence[str], ask: Callable[[str], T]) -> dict[str, T]:
    """Return the result of *ask* for each zone, side by side. Raises the first error."""
    from orc.launchers.errors import LaunchError
    from orc.launchers.remote.ssh.fanout import each

    found: dict[str, T] = {}
    for zone, answer in each({zone: zone for zone in zones}, ask).items():
        if isinstance(answer, LaunchError):
            raise answer
        found[zone] = answer
    return found
