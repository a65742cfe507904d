"""The API server of the tests behaves as documented, seen through the official client and kubectl."""

from __future__ import annotations

import json
import shutil
import subprocess
from typing import Any

import pytest
from kubernetes import client, config
from kubernetes.client.rest import ApiException
from kubernetes_testbed import NAMESPACE, KubernetesTestbed
from polling import polls

from orc.launchers.backends.kubernetes import KubernetesBackend
from orc.launchers.containers.http import ApiRefusal


@pytest.fixture
def core(kubernetes_testbed: KubernetesTestbed) -> Any:
    return client.CoreV1Api(config.new_client_from_config(str(kubernetes_testbed.kubeconfig)))


def secret(name: str, **labels: str) -> dict[str, Any]:
    meta = {"name": name, "labels": labels}
    return {"apiVersion": "v1", "kind": "Secret", "metadata": meta, "stringData": {"a": "1"}}


def pod(name: str, *command: str) -> dict[str, Any]:
    main = {"name": "main", "image": "img", "command": list(command)}
    meta = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}}
    return {**meta, "spec": {"restartPolicy": "Never", "terminationGracePeriodSeconds": 1, "containers": [main]}}


def until(core: Any, name: str, phase: str) -> None:
    for _ in polls(30):
        if core.read_namespaced_pod(name, NAMESPACE).status.phase == phase:
            return
    raise AssertionError(f"{name} is not {phase}")


def test_objects_have_versions_are_selected_by_labels_and_come_in_pages(core: Any) -> None:
    made = [core.create_namespaced_secret(NAMESPACE, secret(f"s{n}", kind=str(n % 2))) for n in range(5)]
    assert len({each.metadata.resource_version for each in made}) == 5
    assert made[0].data == {"a": "MQ=="}
    found = core.list_namespaced_secret(NAMESPACE, label_selector="kind in (1,7)").items
    assert [each.metadata.name for each in found] == ["s1", "s3"]
    page = core.list_namespaced_secret(NAMESPACE, limit=3)
    assert len(page.items) == 3
    rest = core.list_namespaced_secret(NAMESPACE, limit=3, _continue=page.metadata._continue)
    assert [each.metadata.name for each in (*page.items, *rest.items)] == [f"s{n}" for n in range(5)]
    with pytest.raises(ApiException) as error:
        core.create_namespaced_secret(NAMESPACE, secret("s1"))
    assert (error.value.status, json.loads(error.value.body)["reason"]) == (409, "AlreadyExists")


def test_what_the_published_schema_does_not_know_is_refused(kubernetes_testbed: KubernetesTestbed) -> None:
    api = KubernetesBackend(kubernetes_testbed.cluster()).api
    for resource, body in (("secrets", {**secret("x"), "date": {}}), ("pods", {**pod("p"), "spec": {"container": []}})):
        with pytest.raises(ApiRefusal) as error:
            api.create(resource, body)
        assert error.value.code == 422


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="no kubectl (Debian: kubernetes-client)")
def test_kubectl_gets_describes_reads_logs_and_accepts_our_manifests(
    kubernetes_testbed: KubernetesTestbed, core: Any, render: Any, tmp_path: Any
) -> None:
    def kubectl(*words: str) -> str:
        argv = ["kubectl", f"--kubeconfig={kubernetes_testbed.kubeconfig}", f"--cache-dir={tmp_path}", *words]
        done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=60)
        assert done.returncode == 0, done.stderr
        return done.stdout

    kubernetes_testbed.server.token = ""  # kubectl sends none without TLS
    core.create_namespaced_pod(NAMESPACE, pod("talker", "sh", "-c", "echo hello from a pod"))
    until(core, "talker", "Succeeded")
    assert "talker" in kubectl("get", "pods")
    assert kubectl("logs", "talker") == "hello from a pod\n"
    said = kubectl("describe", "pod", "talker")
    assert "Succeeded" in said
    assert "node-1" in said
    plan = render({"namespace": NAMESPACE}, secrets=["TOKEN"])
    for number, file in enumerate(plan.files[1:]):
        (tmp_path / f"{number}.json").write_text(file.content)
    files = ("-f", str(tmp_path / "0.json"), "-f", str(tmp_path / "1.json"))
    told = kubectl("apply", "--dry-run=client", "--validate=false", *files)
    assert told.splitlines() == [
        f"job.batch/{plan.marker} created (dry run)",
        f"secret/{plan.marker} created (dry run)",
    ]


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="no kubectl (Debian: kubernetes-client)")
def test_kubectl_runs_commands_in_a_pod_if_it_speaks_websocket(
    kubernetes_testbed: KubernetesTestbed, core: Any, tmp_path: Any
) -> None:
    kubernetes_testbed.server.token = ""
    core.create_namespaced_pod(NAMESPACE, pod("sleeper", "sleep", "600"))
    base = ["kubectl", f"--kubeconfig={kubernetes_testbed.kubeconfig}", f"--cache-dir={tmp_path}"]
    version = json.loads(
        subprocess.run([*base, "version", "--client", "-o", "json"], capture_output=True, check=True).stdout
    )
    until(core, "sleeper", "Running")
    argv = [*base, "exec", "-i", "sleeper", "--", "sh", "-c", "cat; exit 5"]
    done = subprocess.run(argv, input=b"through a pod", capture_output=True, check=False, timeout=60)
    if int(version["clientVersion"]["minor"].rstrip("+")) < 31:  # which have SPDY alone
        assert b"websocket with v4 or v5.channel.k8s.io required" in done.stderr
    else:
        assert (done.returncode, done.stdout) == (5, b"through a pod")
