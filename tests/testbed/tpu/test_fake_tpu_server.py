"""The TPU API server behaves as the documentation of the service says, seen through the real client library."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from fake_tpu_model import FAST_POLLING, Fault, Settings, WorkerEvent, parse_accelerator
from fake_tpu_server import FakeTpuServer
from google.api_core import exceptions
from google.cloud.tpu_v2 import TpuClient
from google.cloud.tpu_v2.types import cloud_tpu as t

PARENT = "projects/demo/locations/us-central2-b"
FAST = {"provision_delay": 0.05, "accept_delay": 0.05, "queue_delay": 0.05, "delete_delay": 0.02, "suspend_delay": 0.05}
QR = t.QueuedResourceState.State
Serve = Callable[..., tuple[FakeTpuServer, TpuClient]]


def spec(accelerator: str = "v4-16", **kwargs: object) -> t.Node:
    return t.Node(accelerator_type=accelerator, runtime_version="tpu-ubuntu2204-base", **kwargs)


def queued(node_id: str = "pod", node: t.Node | None = None, **kwargs: object) -> t.QueuedResource:
    inner = {"parent": PARENT, "node_id": node_id, "node": node or spec()}
    return t.QueuedResource(tpu={"node_spec": [inner]}, **kwargs)


def until(check: Callable[[], object], timeout: float = 60.0) -> None:
    deadline = time.monotonic() + timeout
    while not check():
        assert time.monotonic() < deadline, "condition not reached"
        time.sleep(0.01)


@pytest.fixture
def serve() -> Iterator[Serve]:
    servers: list[FakeTpuServer] = []

    def start(**kwargs: object) -> tuple[FakeTpuServer, TpuClient]:
        hook: Any = kwargs.pop("worker_hook", None)
        server = FakeTpuServer(Settings(**{**FAST, **kwargs}), worker_hook=hook)  # type: ignore[arg-type]
        server.start()
        servers.append(server)
        return server, server.client()

    yield start
    for server in servers:
        server.stop()


def qr_state(client: TpuClient, name: str) -> QR:
    return client.get_queued_resource(name=name).state.state


@pytest.mark.parametrize(
    ("kind", "chips", "hosts"),
    [
        *[("v2-8", 4, 1), ("v3-32", 16, 4), ("v4-8", 4, 1), ("v4-16", 8, 2), ("v5p-16", 8, 2)],
        *[("v5litepod-8", 8, 1), ("v5litepod-16", 16, 4), ("v6e-1", 1, 1), ("v6e-32", 32, 8)],
    ],
)
def test_a_type_says_how_many_chips_and_machines_there_are(kind: str, chips: int, hosts: int) -> None:
    shape = parse_accelerator(kind)
    assert (shape.chips, shape.hosts) == (chips, hosts)


@pytest.mark.parametrize("kind", ["v4-4", "v9-8", "v4", "v4-x", "gpu-8", "v6e-12"])
def test_a_type_that_does_not_exist_is_refused(kind: str) -> None:
    with pytest.raises(ValueError, match=r"unknown accelerator type|unsupported size"):
        parse_accelerator(kind)


@pytest.mark.parametrize(
    "node",
    [
        t.Node(accelerator_type="v4-8"),
        t.Node(accelerator_type="h100-8", runtime_version="x"),
        spec(labels={"Bad": "x"}),
        spec(metadata={"startup-script": "x" * (256 * 1024 + 1)}),
    ],
)
def test_invalid_nodes(serve: Serve, node: t.Node) -> None:
    _, client = serve()
    with pytest.raises(exceptions.InvalidArgument):
        client.create_node(parent=PARENT, node_id="pod", node=node)


def test_an_active_queued_resource_has_a_node_and_is_deleted_by_force_alone(serve: Serve) -> None:
    _, client = serve()
    operation = client.create_queued_resource(
        parent=PARENT, queued_resource_id="q", queued_resource=queued(spot=t.QueuedResource.Spot())
    )
    name = f"{PARENT}/queuedResources/q"
    until(lambda: qr_state(client, name) == QR.ACTIVE)
    assert operation.result(polling=FAST_POLLING).name == name
    node = client.get_node(name=f"{PARENT}/nodes/pod")
    assert node.queued_resource == name
    assert len(node.network_endpoints) == 2
    with pytest.raises(exceptions.FailedPrecondition):
        client.delete_queued_resource(name=name)
    client.delete_queued_resource(request={"name": name, "force": True}).result(polling=FAST_POLLING)
    assert not list(client.list_queued_resources(parent=PARENT))
    assert not list(client.list_nodes(parent=PARENT))


def test_a_queued_resource_whose_node_is_preempted_is_suspended(serve: Serve) -> None:
    server, client = serve()
    client.create_queued_resource(parent=PARENT, queued_resource_id="q", queued_resource=queued())
    name = f"{PARENT}/queuedResources/q"
    until(lambda: qr_state(client, name) == QR.ACTIVE)
    server.cloud.preempt(f"{PARENT}/nodes/pod")
    until(lambda: qr_state(client, name) == QR.SUSPENDED)
    state = client.get_queued_resource(name=name).state
    assert state.state_initiator == t.QueuedResourceState.StateInitiator.SERVICE
    with pytest.raises(exceptions.NotFound):
        client.get_node(name=f"{PARENT}/nodes/pod")
    client.delete_queued_resource(name=name).result(polling=FAST_POLLING)


def test_a_queued_resource_fails_expires_or_waits_for_capacity(serve: Serve) -> None:
    server, client = serve(capacity_chips=8)
    server.cloud.add_fault(Fault.parse("op:provision-qr=INTERNAL"))
    client.create_queued_resource(parent=PARENT, queued_resource_id="bad", queued_resource=queued("a"))
    until(lambda: qr_state(client, f"{PARENT}/queuedResources/bad") == QR.FAILED)
    bad = client.get_queued_resource(name=f"{PARENT}/queuedResources/bad")
    assert "injected INTERNAL" in bad.state.failed_data.error.message
    client.create_queued_resource(parent=PARENT, queued_resource_id="one", queued_resource=queued("b"))
    until(lambda: qr_state(client, f"{PARENT}/queuedResources/one") == QR.ACTIVE)
    late = queued("c", queueing_policy={"valid_until_duration": {"seconds": 1}})
    client.create_queued_resource(parent=PARENT, queued_resource_id="late", queued_resource=late)
    client.create_queued_resource(parent=PARENT, queued_resource_id="wait", queued_resource=queued("d"))
    until(lambda: qr_state(client, f"{PARENT}/queuedResources/late") == QR.FAILED)
    until(lambda: qr_state(client, f"{PARENT}/queuedResources/wait") == QR.WAITING_FOR_RESOURCES)
    client.delete_queued_resource(request={"name": f"{PARENT}/queuedResources/one", "force": True})
    until(lambda: qr_state(client, f"{PARENT}/queuedResources/wait") == QR.ACTIVE)


def test_a_request_that_is_repeated_makes_one_resource(serve: Serve) -> None:
    _, client = serve()
    request = {"parent": PARENT, "queued_resource_id": "q", "queued_resource": queued(), "request_id": "11111111-2222"}
    first, again = (client.create_queued_resource(request=request) for _ in range(2))
    assert first.operation.name == again.operation.name
    del request["request_id"]
    with pytest.raises(exceptions.AlreadyExists):
        client.create_queued_resource(request=request)


def test_listings_come_in_pages(serve: Serve) -> None:
    _, client = serve()
    for index in range(5):
        client.create_node(parent=PARENT, node_id=f"n{index}", node=spec("v4-8"))
    pages = list(client.list_nodes(request={"parent": PARENT, "page_size": 2}).pages)
    assert [len(p.nodes) for p in pages] == [2, 2, 1]
    assert "v5litepod-16" in [kind.type_ for kind in client.list_accelerator_types(parent=PARENT)]


def test_a_hook_hears_of_every_worker_and_gives_it_guest_attributes(serve: Serve) -> None:
    events: list[WorkerEvent] = []

    def hook(event: WorkerEvent) -> dict[str, str]:
        events.append(event)
        return {"hostkeys/ssh-ed25519": f"KEY{event.worker_id}", "other/x": "y"}

    server, client = serve(worker_hook=hook, ip_base="127.0.71.1")
    client.create_node(parent=PARENT, node_id="pod", node=spec(metadata={"k": "v"})).result(polling=FAST_POLLING)
    assert [(e.action, e.worker_id, e.ip_address) for e in events] == [("up", 0, "127.0.71.1"), ("up", 1, "127.0.71.2")]
    assert events[0].metadata == {"k": "v"}
    server.cloud.set_guest_attribute(f"{PARENT}/nodes/pod", 1, "hostkeys/ssh-rsa", "R")
    request = {"name": f"{PARENT}/nodes/pod", "query_path": "hostkeys/"}
    keys = [
        [i.value for i in g.query_value.items] for g in client.get_guest_attributes(request=request).guest_attributes
    ]
    assert keys == [["KEY0"], ["KEY1", "R"]]
    one = client.get_guest_attributes(request={**request, "worker_ids": ["1"]}).guest_attributes
    assert len(one) == 1
    assert one[0].query_value.items[0].namespace == "hostkeys"
    client.delete_node(name=f"{PARENT}/nodes/pod").result(polling=FAST_POLLING)
    until(lambda: [e.action for e in events] == ["up", "up", "down", "down"])


def test_a_worker_that_does_not_come_up_fails_the_creation(serve: Serve) -> None:
    def hook(event: WorkerEvent) -> None:
        if event.action == "up" and event.worker_id == 1:
            raise RuntimeError("no boot")

    _, client = serve(worker_hook=hook)
    with pytest.raises(exceptions.GoogleAPICallError, match="no boot"):
        client.create_node(parent=PARENT, node_id="pod", node=spec()).result(timeout=60, polling=FAST_POLLING)
