"""The real client of the TPU API against the API server of the testbed: pages, refusals, retries, long operations."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest
from tpu_testbed import PROJECT, ZONE, no_later_than

from orc.launchers.backends.tpu.client import AlreadyExists, ApiRejected, NotFound, ResourceExhausted, TpuApi
from orc.launchers.backends.tpu.settings import read_settings
from orc.launchers.errors import BackendError, BackendUnreachable

if TYPE_CHECKING:
    from fake_tpu_server import FakeTpuServer

PARENT = f"projects/{PROJECT}/locations/{ZONE}"
NODE = {"accelerator_type": "v4-16", "runtime_version": "tpu-ubuntu2204-base", "labels": {"orc-marker": "m"}}


def queued(name: str = "one", **node: Any) -> dict[str, Any]:
    spec = {"parent": PARENT, "node_id": name, "node": {**NODE, **node}}
    return {
        "parent": PARENT,
        "queued_resource_id": name,
        "request_id": f"request-{name}",
        "queued_resource": {"tpu": {"node_spec": [spec]}, "spot": {}},
    }


def node(name: str = "one") -> dict[str, Any]:
    return {"parent": PARENT, "node_id": name, "node": NODE}


@pytest.fixture
def api(tpu_cluster: Callable[..., Any]) -> Any:
    made = TpuApi(read_settings(tpu_cluster()).options)
    yield made
    made.close()


def fault(server: FakeTpuServer, *texts: str) -> None:
    from fake_tpu_model import Fault

    for text in texts:
        server.cloud.add_fault(Fault.parse(text))


def test_a_queued_resource_becomes_a_node_with_its_workers(api: TpuApi, tpu_api: FakeTpuServer) -> None:
    tpu_api.cloud.configure(external_ips=True)
    api.create(queued())
    no_later_than(tpu_api, lambda: api.queued(ZONE)[0].state == "ACTIVE")
    (asked,) = api.queued(ZONE)
    assert (asked.id, asked.zone, asked.accelerator_type, asked.labels) == ("one", ZONE, "v4-16", {"orc-marker": "m"})
    found = api.node(ZONE, "one")
    assert found is not None
    assert (found.state, found.queued, len(found.addresses)) == ("READY", asked.name, 2)
    assert found.addresses[0] == ("127.0.64.1", "127.0.64.1")
    assert found.created_at is not None
    api.delete(asked.name, wait_s=20)
    assert api.queued(ZONE) == api.nodes(ZONE) == []
    api.delete(asked.name)  # nothing is there, which is what was wanted


def test_asking_twice_is_asking_once(api: TpuApi) -> None:
    api.create(queued())
    api.create(queued())  # the same request
    assert len(api.queued(ZONE)) == 1
    with pytest.raises(AlreadyExists):
        api.create({**queued(), "request_id": "another"})


def test_a_node_is_made_at_once(api: TpuApi, tpu_api: FakeTpuServer) -> None:
    api.create(node())
    assert [found.id for found in api.nodes(ZONE)] == ["one"]
    no_later_than(tpu_api, lambda: api.nodes(ZONE)[0].state == "READY")
    with pytest.raises(AlreadyExists):
        api.create(node())
    api.delete(f"{PARENT}/nodes/one", wait_s=20)
    assert api.node(ZONE, "one") is None


def test_a_node_that_could_not_be_made_is_known_by_its_operation(api: TpuApi, tpu_api: FakeTpuServer) -> None:
    tpu_api.cloud.configure(capacity_chips=0)
    api.create(node())
    (name,) = api.creations(ZONE)
    assert name == f"{PARENT}/nodes/one"
    assert no_later_than(tpu_api, lambda: api.creations(ZONE)[name].code) == "RESOURCE_EXHAUSTED"
    assert "no more capacity" in api.creations(ZONE)[name].error
    tpu_api.cloud.configure(capacity_chips=None)
    api.create(node())
    assert api.creations(ZONE)[name].code == ""  # the newest counts


def test_all_pages_of_a_listing_are_read(api: TpuApi, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("orc.launchers.backends.tpu.client._PAGE", 2)
    for number in range(5):
        api.create(queued(f"n{number}"))
    assert [found.id for found in api.queued(ZONE)] == [f"n{number}" for number in range(5)]


def test_a_question_that_is_not_answered_is_asked_again(api: TpuApi, tpu_api: FakeTpuServer) -> None:
    fault(tpu_api, "ListNodes=UNAVAILABLE:2", "ListNodes=RESOURCE_EXHAUSTED:1")  # the last: we ask too much
    assert api.nodes(ZONE) == []
    codes = [call.code for call in tpu_api.cloud.calls if call.method == "ListNodes"]
    assert codes == ["UNAVAILABLE", "UNAVAILABLE", "RESOURCE_EXHAUSTED", "OK"]


def test_an_order_that_is_not_answered_is_given_again_and_carried_out_once(api: TpuApi, tpu_api: FakeTpuServer) -> None:
    fault(tpu_api, "CreateQueuedResource=UNAVAILABLE:1")
    api.create(queued())
    assert len(api.queued(ZONE)) == 1


def test_an_api_that_stays_silent_is_unreachable(api: TpuApi, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("orc.launchers.backends.tpu.client.READ_PATIENCE_S", 0.3)
    monkeypatch.setattr("orc.launchers.backends.tpu.client.CALL_TIMEOUT_S", 0.3)
    api = TpuApi(replace_options(api.options, endpoint="127.0.0.1:1"))
    with pytest.raises(BackendUnreachable, match="the TPU API does not answer"):
        api.nodes(ZONE)
    api.close()


def replace_options(options: Any, **changes: Any) -> Any:
    return options.model_copy(update=changes)


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        ("PERMISSION_DENIED", ApiRejected),
        ("UNAUTHENTICATED", ApiRejected),
        ("INVALID_ARGUMENT", ApiRejected),
        ("FAILED_PRECONDITION", ApiRejected),
        ("NOT_FOUND", NotFound),
        ("RESOURCE_EXHAUSTED", ResourceExhausted),
        ("INTERNAL", BackendUnreachable),
    ],
)
def test_every_refusal_has_its_error(api: TpuApi, tpu_api: FakeTpuServer, code: str, kind: type[Exception]) -> None:
    fault(tpu_api, f"CreateQueuedResource={code}")
    with pytest.raises(kind) as caught:
        api.create(queued())
    assert type(caught.value) is kind
    if isinstance(caught.value, ApiRejected):
        assert caught.value.code == code


def test_a_missing_right_names_the_role(api: TpuApi, tpu_api: FakeTpuServer) -> None:
    fault(tpu_api, "ListNodes=PERMISSION_DENIED")
    with pytest.raises(ApiRejected) as caught:
        api.nodes(ZONE)
    assert "TPU Admin" in caught.value.hint


def test_a_quota_is_no_capacity(api: TpuApi, tpu_api: FakeTpuServer) -> None:
    tpu_api.cloud.configure(quota_chips=4)
    with pytest.raises(ResourceExhausted, match="Quota limit"):
        api.create(queued())


def test_a_deletion_takes_its_nodes_with_it_whatever_they_do(api: TpuApi, tpu_api: FakeTpuServer) -> None:
    tpu_api.cloud.configure(provision_delay=60)
    api.create(queued())
    no_later_than(tpu_api, lambda: api.queued(ZONE)[0].state == "PROVISIONING")
    api.delete(f"{PARENT}/queuedResources/one", wait_s=20)
    assert tpu_api.cloud.summary()["nodes"] == {}


def test_waiting_for_an_operation_ends_when_we_say(api: TpuApi, tpu_api: FakeTpuServer) -> None:
    tpu_api.cloud.configure(delete_delay=60)
    api.create(queued())
    with pytest.raises(BackendUnreachable, match=r"is not done after 0\.5 s"):
        api.delete(f"{PARENT}/queuedResources/one", wait_s=0.5)


def test_labels_are_replaced(api: TpuApi, tpu_api: FakeTpuServer) -> None:
    api.create(node())
    no_later_than(tpu_api, lambda: api.nodes(ZONE)[0].state == "READY")
    api.label(api.nodes(ZONE)[0], {"orc-marker": "m", "orc-idle-since": "12"})
    assert api.nodes(ZONE)[0].labels == {"orc-marker": "m", "orc-idle-since": "12"}


def test_host_keys_come_from_guest_attributes_in_batches(
    api: TpuApi, tpu_api: FakeTpuServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("orc.launchers.backends.tpu.client._AT_ONCE", 3)
    tpu_api.cloud.configure(endpoints_per_node=4)
    api.create(node())
    no_later_than(tpu_api, lambda: api.nodes(ZONE)[0].state == "READY")
    (found,) = api.nodes(ZONE)
    for worker in (0, 1, 3):
        tpu_api.cloud.set_guest_attribute(found.name, worker, "hostkeys/ssh-ed25519", f"KEY{worker}")
    tpu_api.cloud.set_guest_attribute(found.name, 3, "other/secret", "x")
    keys = [{"ssh-ed25519": f"KEY{worker}"} for worker in range(4)]
    assert api.host_keys(found) == [keys[0], keys[1], {}, keys[3]]
    asked = [call.request["worker_ids"] for call in tpu_api.cloud.calls if call.method == "GetGuestAttributes"]
    assert asked == [["0", "1", "2"], ["3"]]


def test_of_a_worker_with_two_interfaces_the_first_counts(api: TpuApi, tpu_api: FakeTpuServer) -> None:
    body = json.loads(json.dumps(node()))
    body["node"]["network_configs"] = [{"network": "a"}, {"network": "b"}]
    tpu_api.cloud.configure(endpoints_per_node=4)
    api.create(body)
    no_later_than(tpu_api, lambda: api.nodes(ZONE)[0].state == "READY")
    assert [internal for internal, _ in api.nodes(ZONE)[0].addresses] == ["127.0.64.1", "127.0.64.3"]


def test_a_request_that_is_no_message_of_the_api_is_a_defect(api: TpuApi) -> None:
    with pytest.raises(Exception, match="colour"):
        api.create(queued(colour="red"))


def test_without_credentials_nothing_is_sent(
    tpu_cluster: Callable[..., Any], tpu_api: FakeTpuServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(tmp_path / "none.json"))
    made = TpuApi(read_settings(tpu_cluster(insecure=False)).options)
    with pytest.raises(BackendError, match="there are no Google Cloud credentials") as caught:
        made.nodes(ZONE)
    assert "gcloud auth application-default login" in caught.value.hint
    assert tpu_api.cloud.calls == []
