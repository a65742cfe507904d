"""The TPU API server behaves as the documentation of the service says, seen through the real client library."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest
from fake_tpu_cli import main
from fake_tpu_cloud import FakeTpuCloud
from fake_tpu_model import FAST_POLLING, ApiError, Fault, Settings, WorkerEvent, parse_accelerator
from fake_tpu_server import FakeTpuServer, control
from google.api_core import exceptions
from google.api_core import retry as core_retry
from google.cloud.tpu_v2 import TpuClient
from google.cloud.tpu_v2.services.tpu.transports.grpc import TpuGrpcTransport
from google.cloud.tpu_v2.types import cloud_tpu as t
from google.protobuf import field_mask_pb2

HERE = Path(__file__).parent
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
        extra = {k: kwargs.pop(k) for k in ("faults", "worker_hook") if k in kwargs}
        server = FakeTpuServer(Settings(**{**FAST, **kwargs}), **extra)  # type: ignore[arg-type]
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


def test_a_node_is_made_changed_and_deleted(serve: Serve) -> None:
    server, client = serve(endpoints_per_node=2, ip_base="127.0.70.1", external_ips=True)
    node = spec(labels={"job": "a-1"}, metadata={"startup-script": "#!/bin/sh\ntrue\n"}, tags=["x"])
    operation = client.create_node(parent=PARENT, node_id="pod", node=node)
    assert operation.metadata.verb == "create"
    made = operation.result(timeout=60, polling=FAST_POLLING)
    assert made.name == f"{PARENT}/nodes/pod"
    got = client.get_node(name=made.name)
    assert got.state == t.Node.State.READY
    assert got.health == t.Node.Health.HEALTHY
    assert [e.ip_address for e in got.network_endpoints] == ["127.0.70.1", "127.0.70.2"]
    assert got.network_endpoints[1].access_config.external_ip == "127.0.70.2"
    assert got.metadata["startup-script"].startswith("#!")
    assert got.labels["job"] == "a-1"
    assert [n.name for n in client.list_nodes(parent=PARENT)] == [made.name]
    assert [n.name for n in client.list_nodes(parent="projects/demo/locations/-")] == [made.name]
    changed = client.update_node(
        node=t.Node(name=made.name, labels={"job": "b"}), update_mask=field_mask_pb2.FieldMask(paths=["labels"])
    )
    assert changed.result(timeout=60, polling=FAST_POLLING).labels["job"] == "b"
    client.delete_node(name=made.name).result(timeout=60, polling=FAST_POLLING)
    with pytest.raises(exceptions.NotFound):
        client.get_node(name=made.name)
    assert server.cloud.summary()["leased_ips"] == []
    first = next(c for c in server.cloud.calls if c.method == "CreateNode")
    assert first.request["node"]["accelerator_type"] == "v4-16"
    assert "x-goog-request-params" in first.metadata


def test_what_exists_cannot_be_made_and_what_does_not_cannot_be_deleted(serve: Serve) -> None:
    _, client = serve()
    client.create_node(parent=PARENT, node_id="pod", node=spec())
    with pytest.raises(exceptions.AlreadyExists):
        client.create_node(parent=PARENT, node_id="pod", node=spec())
    with pytest.raises(exceptions.NotFound):
        client.delete_node(name=f"{PARENT}/nodes/none")


@pytest.mark.parametrize(
    "node",
    [
        t.Node(accelerator_type="v4-8"),
        t.Node(accelerator_type="h100-8", runtime_version="x"),
        spec(labels={"Bad": "x"}),
        spec(metadata={"startup-script": "x" * (256 * 1024 + 1)}),
        spec(accelerator_config=t.AcceleratorConfig(type_="V4", topology="2x2x1")),
    ],
)
def test_invalid_nodes(serve: Serve, node: t.Node) -> None:
    _, client = serve()
    with pytest.raises(exceptions.InvalidArgument):
        client.create_node(parent=PARENT, node_id="pod", node=node)


def test_invalid_names(serve: Serve) -> None:
    _, client = serve(zones=("us-central2-b",))
    for node_id in ("Pod", "-a", "a" * 64):
        with pytest.raises(exceptions.InvalidArgument):
            client.create_node(parent=PARENT, node_id=node_id, node=spec())
    with pytest.raises(exceptions.PermissionDenied):
        client.create_node(parent="projects/demo/locations/nowhere", node_id="pod", node=spec())


def test_accelerator_config(serve: Serve) -> None:
    _, client = serve()
    node = t.Node(accelerator_config=t.AcceleratorConfig(type_="V4", topology="2x2x2"), runtime_version="tpu-vm-base")
    made = client.create_node(parent=PARENT, node_id="pod", node=node).result(polling=FAST_POLLING)
    assert made.accelerator_type == "v4-16"
    assert len(made.network_endpoints) == 2


def test_quota_and_stock_out(serve: Serve) -> None:
    server, client = serve(quota_chips=8)
    client.create_node(parent=PARENT, node_id="one", node=spec()).result(polling=FAST_POLLING)
    with pytest.raises(exceptions.ResourceExhausted) as caught:
        client.create_node(parent=PARENT, node_id="two", node=spec())
    assert caught.value.reason == "RATE_LIMIT_EXCEEDED"
    assert caught.value.metadata["quota_limit_value"] == "8"
    server.cloud.configure(quota_chips=None, capacity_chips=8)
    operation = client.create_node(parent=PARENT, node_id="two", node=spec())
    with pytest.raises(exceptions.ResourceExhausted, match="no more capacity"):
        operation.result(timeout=60, polling=FAST_POLLING)
    with pytest.raises(exceptions.NotFound):
        client.get_node(name=f"{PARENT}/nodes/two")


def test_faults_hit_as_many_calls_as_they_are_told(serve: Serve) -> None:
    faults = [Fault.parse("GetNode=UNAVAILABLE:2"), Fault.parse("op:create-node=INTERNAL:1:1")]
    server, client = serve(faults=faults)
    client.create_node(parent=PARENT, node_id="one", node=spec()).result(polling=FAST_POLLING)
    with pytest.raises(exceptions.ServiceUnavailable):
        client.get_node(name=f"{PARENT}/nodes/one")
    retry = core_retry.Retry(
        predicate=core_retry.if_exception_type(exceptions.ServiceUnavailable), initial=0.01, timeout=60
    )
    assert client.get_node(name=f"{PARENT}/nodes/one", retry=retry).state == t.Node.State.READY
    with pytest.raises(exceptions.GoogleAPICallError):
        client.create_node(parent=PARENT, node_id="two", node=spec()).result(timeout=60, polling=FAST_POLLING)
    assert [c.code for c in server.cloud.calls if c.method == "GetNode"] == ["UNAVAILABLE", "UNAVAILABLE", "OK"]


def test_a_creation_that_is_cancelled_leaves_nothing(serve: Serve) -> None:
    _, client = serve(provision_delay=30)
    operation = client.create_node(parent=PARENT, node_id="pod", node=spec())
    assert operation.cancel()
    with pytest.raises(exceptions.Cancelled):
        operation.result(timeout=60, polling=FAST_POLLING)
    with pytest.raises(exceptions.NotFound):
        client.get_node(name=f"{PARENT}/nodes/pod")


def test_a_spot_node_is_preempted_as_often_as_is_set(serve: Serve) -> None:
    server, client = serve(preempt_after=0.1)
    node = spec(scheduling_config=t.SchedulingConfig(spot=True))
    name = client.create_node(parent=PARENT, node_id="pod", node=node).result(polling=FAST_POLLING).name
    until(lambda: client.get_node(name=name).state == t.Node.State.PREEMPTED)
    with pytest.raises(exceptions.AlreadyExists):
        client.create_node(parent=PARENT, node_id="pod", node=node)
    client.delete_node(name=name).result(polling=FAST_POLLING)
    client.create_node(parent=PARENT, node_id="pod", node=node).result(polling=FAST_POLLING)
    assert client.get_node(name=name).state == t.Node.State.READY
    assert server.cloud.preemptions_left == 0
    server.cloud.maintenance(name)
    assert client.get_node(name=name).health == t.Node.Health.UNHEALTHY_MAINTENANCE


def test_a_node_with_one_worker_can_be_stopped_and_started(serve: Serve) -> None:
    _, client = serve()
    client.create_node(parent=PARENT, node_id="one", node=spec("v4-8")).result(polling=FAST_POLLING)
    client.create_node(parent=PARENT, node_id="two", node=spec("v4-16")).result(polling=FAST_POLLING)
    one = {"name": f"{PARENT}/nodes/one"}
    assert client.stop_node(request=one).result(polling=FAST_POLLING).state == t.Node.State.STOPPED
    assert client.start_node(request=one).result(polling=FAST_POLLING).state == t.Node.State.READY
    with pytest.raises(exceptions.FailedPrecondition):
        client.stop_node(request={"name": f"{PARENT}/nodes/two"})


def test_a_queued_resource_goes_through_all_its_states() -> None:
    now, seen = [0.0], []
    delays = {"accept_delay": 1, "queue_delay": 1, "provision_delay": 1}
    cloud = FakeTpuCloud(Settings(**delays), clock=lambda: now[0])  # type: ignore[arg-type]
    cloud.create_queued_resource(
        t.CreateQueuedResourceRequest(parent=PARENT, queued_resource_id="q", queued_resource=queued())
    )
    for _ in range(5):
        seen.append(cloud.get_queued_resource(t.GetQueuedResourceRequest(name=f"{PARENT}/queuedResources/q")))
        now[0] += 1
        cloud.run_due()
    names = ["CREATING", "ACCEPTED", "WAITING_FOR_RESOURCES", "PROVISIONING", "ACTIVE"]
    assert [resource.state.state.name for resource in seen] == names


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
    assert not node.multislice_node
    assert len(node.network_endpoints) == 2
    with pytest.raises(exceptions.FailedPrecondition):
        client.delete_queued_resource(name=name)
    client.delete_queued_resource(request={"name": name, "force": True}).result(polling=FAST_POLLING)
    assert not list(client.list_queued_resources(parent=PARENT))
    assert not list(client.list_nodes(parent=PARENT))


def test_a_queued_resource_whose_node_is_preempted_is_suspended_and_can_be_reset(serve: Serve) -> None:
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
    client.reset_queued_resource(name=name).result(polling=FAST_POLLING)
    until(lambda: qr_state(client, name) == QR.ACTIVE)
    client.delete_node(name=f"{PARENT}/nodes/pod").result(polling=FAST_POLLING)
    until(lambda: qr_state(client, name) == QR.SUSPENDED)
    state = client.get_queued_resource(name=name).state
    assert state.state_initiator == t.QueuedResourceState.StateInitiator.USER
    client.delete_queued_resource(name=name).result(polling=FAST_POLLING)


def test_a_queued_resource_fails_expires_or_waits_for_capacity(serve: Serve) -> None:
    _, client = serve(faults=[Fault.parse("op:provision-qr=INTERNAL")], capacity_chips=8)
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


def test_a_request_that_is_repeated_makes_one_multislice(serve: Serve) -> None:
    _, client = serve()
    inner = {"parent": PARENT, "multislice_params": {"node_count": 3, "node_id_prefix": "s"}, "node": spec("v6e-8")}
    request = {
        "parent": PARENT,
        "queued_resource_id": "multi",
        "queued_resource": t.QueuedResource(tpu={"node_spec": [inner]}),
        "request_id": "11111111-2222-3333-4444-555555555555",
    }
    first = client.create_queued_resource(request=request)
    again = client.create_queued_resource(request=request)
    assert first.operation.name == again.operation.name
    until(lambda: qr_state(client, f"{PARENT}/queuedResources/multi") == QR.ACTIVE)
    nodes = list(client.list_nodes(parent=PARENT))
    assert sorted(n.name.rsplit("/", 1)[-1] for n in nodes) == ["s-0", "s-1", "s-2"]
    assert all(n.multislice_node for n in nodes)
    del request["request_id"]
    with pytest.raises(exceptions.AlreadyExists):
        client.create_queued_resource(request=request)


def test_listings_come_in_pages(serve: Serve) -> None:
    _, client = serve()
    for index in range(5):
        client.create_node(parent=PARENT, node_id=f"n{index}", node=spec("v4-8"))
    pages = list(client.list_nodes(request={"parent": PARENT, "page_size": 2}).pages)
    assert [len(p.nodes) for p in pages] == [2, 2, 1]
    kinds = [a.type_ for a in client.list_accelerator_types(parent=PARENT)]
    assert "v5litepod-16" in kinds
    assert list(client.list_runtime_versions(parent=PARENT))


def test_a_hook_hears_of_every_worker_and_gives_it_guest_attributes(serve: Serve) -> None:
    events: list[WorkerEvent] = []

    def hook(event: WorkerEvent) -> dict[str, str]:
        events.append(event)
        return {"hostkeys/ssh-ed25519": f"KEY{event.worker_id}", "other/x": "y"}

    server, client = serve(worker_hook=hook, ip_base="127.0.71.1")
    client.create_node(parent=PARENT, node_id="pod", node=spec(metadata={"k": "v"})).result(polling=FAST_POLLING)
    assert [(e.action, e.worker_id, e.ip_address) for e in events] == [("up", 0, "127.0.71.1"), ("up", 1, "127.0.71.2")]
    assert events[0].metadata == {"k": "v"}
    assert events[1].all_ips == ("127.0.71.1", "127.0.71.2")
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


def test_nothing_happens_before_its_time() -> None:
    now = [0.0]
    cloud = FakeTpuCloud(Settings(provision_delay=100), clock=lambda: now[0])
    cloud.create_node(t.CreateNodeRequest(parent=PARENT, node_id="pod", node=spec()))
    cloud.run_due()
    request = t.GetNodeRequest(name=f"{PARENT}/nodes/pod")
    assert cloud.get_node(request).state == t.Node.State.CREATING
    now[0] = 101.0
    cloud.run_due()
    assert cloud.get_node(request).state == t.Node.State.READY


def test_the_server_listens_on_loopback_only() -> None:
    with pytest.raises(ValueError, match="loopback"):
        FakeTpuServer(host="0.0.0.0")


@pytest.mark.parametrize("text", ["x", "A=", "A=NOPE", "A=INTERNAL:x", "A=INTERNAL:1:2:3"])
def test_a_fault_that_makes_no_sense_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"not a fault|invalid literal"):
        Fault.parse(text)


def test_what_does_not_exist_cannot_be_preempted() -> None:
    with pytest.raises(ApiError):
        FakeTpuCloud().preempt("projects/p/locations/z/nodes/none")


def test_a_server_is_controlled_from_another_process(capsys: pytest.CaptureFixture[str]) -> None:
    command = [sys.executable, str(HERE / "fake_tpu_cli.py"), "serve", "--provision-delay", "0.05"]
    command += ["--endpoints-per-node", "3", "--ip-base", "127.0.72.1", "--fault", "GetNode=UNAVAILABLE"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=HERE) as process:
        try:
            assert process.stdout is not None
            address = json.loads(process.stdout.readline())["address"]
            with grpc.insecure_channel(address) as channel:
                client = TpuClient(transport=TpuGrpcTransport(channel=channel))
                made = client.create_node(parent=PARENT, node_id="pod", node=spec()).result(polling=FAST_POLLING)
                assert [e.ip_address for e in made.network_endpoints] == ["127.0.72.1", "127.0.72.2", "127.0.72.3"]
                with pytest.raises(exceptions.ServiceUnavailable):
                    client.get_node(name=made.name)
                control(address, "guest-attribute", made.name, "2", "hostkeys/k", "v")
                answer = client.get_guest_attributes(request={"name": made.name, "worker_ids": ["2"]})
                assert answer.guest_attributes[0].query_value.items[0].value == "v"
                assert control(address, "preempt", made.name)["nodes"] == {made.name: "PREEMPTED"}
                port = address.rsplit(":", 1)[-1]
                assert main(["ctl", "--port", port, "set", "capacity-chips=0"]) == 0
                assert main(["ctl", "--port", port, "preempt", "nothing"]) == 1
                assert "PREEMPTED" in capsys.readouterr().out
                assert len(control(address, "calls")["calls"]) >= 3
        finally:
            process.terminate()
            assert process.wait(30) == 0
