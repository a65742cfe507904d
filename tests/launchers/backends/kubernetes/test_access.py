"""The way to the API server: what is wrong with it is said once, with what to do; checks and discovery."""

from __future__ import annotations

from typing import Any

import pytest
import yaml
from kubernetes_testbed import NAMESPACE, KubernetesTestbed

from orc.launchers.backends.kubernetes import KubernetesBackend
from orc.launchers.errors import BackendError, BackendUnreachable


def look(testbed: KubernetesTestbed, **options: Any) -> str:
    """Return what the error says that every look at a cluster raises."""
    backend = KubernetesBackend(testbed.cluster(**options))
    with pytest.raises(BackendError) as error:
        backend.find("orc-digits-abcdef-a1")
    assert error.value.where == "cluster k8s"
    (finding,) = backend.check()
    assert (finding.level, finding.what) == ("error", error.value.what)
    return str(error.value)


def test_a_token_that_has_run_out_says_to_log_in_again(kubernetes_testbed: KubernetesTestbed) -> None:
    kubernetes_testbed.write_kubeconfig("expired")
    said = look(kubernetes_testbed)
    assert "does not accept the credentials" in said
    assert "Log in again" in said


def test_a_cluster_that_does_not_answer_is_unreachable(kubernetes_testbed: KubernetesTestbed) -> None:
    kubernetes_testbed.kubeconfig.write_text(
        kubernetes_testbed.kubeconfig.read_text().replace(kubernetes_testbed.server.url, "http://127.0.0.1:1")
    )
    assert "the API server does not answer" in look(kubernetes_testbed)
    with pytest.raises(BackendUnreachable):
        KubernetesBackend(kubernetes_testbed.cluster()).find("orc-digits-abcdef-a1")


@pytest.mark.parametrize(
    ("options", "what"),
    [({"context": "nowhere"}, "nowhere"), ({"kubeconfig": "/nowhere"}, ""), ({"in_cluster": True}, "")],
)
def test_a_context_that_is_not_there_says_where_it_is_written(kubernetes_testbed, options, what) -> None:
    said = look(kubernetes_testbed, **options)
    assert "no way to the cluster" in said
    assert what in said
    assert "`context` and `kubeconfig` under `options:`" in said


def test_what_the_account_may_not_do_is_named_with_the_role_that_it_needs(kubernetes_testbed) -> None:
    kubernetes_testbed.server.forbidden |= {("create", "jobs"), ("create", "pods/exec")}
    (finding,) = KubernetesBackend(kubernetes_testbed.cluster()).check()
    assert finding.what == "the account may not: create jobs, create pods/exec"
    role = yaml.safe_load(finding.hint.partition("\n")[2])
    assert (role["kind"], role["metadata"]["namespace"]) == ("Role", NAMESPACE)
    assert {"apiGroups": [""], "resources": ["pods/exec"], "verbs": ["create", "get"]} in role["rules"]


def test_claims_that_are_missing_or_that_nodes_cannot_share_are_found(kubernetes_testbed) -> None:
    kubernetes_testbed.add_claim("single", "ReadWriteOnce")
    volumes = [{"claim": "single", "path": "/mnt/shared"}, {"claim": "nothing", "path": "/data"}]
    backend = KubernetesBackend(kubernetes_testbed.cluster(volumes=volumes))
    warning, error = backend.check()
    assert (warning.level, warning.what) == (
        "warning",
        "the claim single is ReadWriteOnce: only pods on one node share it",
    )
    assert (error.level, error.what) == ("error", "there is no claim nothing in the namespace training")
    assert KubernetesBackend(kubernetes_testbed.cluster()).check() == []


def test_the_namespace_is_that_of_the_context_unless_it_is_given(kubernetes_testbed) -> None:
    assert KubernetesBackend(kubernetes_testbed.cluster(namespace=None)).api.namespace == NAMESPACE
    assert KubernetesBackend(kubernetes_testbed.cluster(namespace="other")).api.namespace == "other"


def test_a_cluster_is_described_by_its_claims_and_devices(kubernetes_testbed) -> None:
    kubernetes_testbed.add_claim("a-single", "ReadWriteOnce")
    found = KubernetesBackend.discover({"kubeconfig": str(kubernetes_testbed.kubeconfig)}, "lab")
    ((name, entry),) = yaml.safe_load(found.entry).items()
    assert (name, entry["kind"], entry["root"]) == ("lab", "kubernetes", "/shared/orc")
    assert entry["options"]["volumes"] == [{"claim": "shared", "path": "/shared"}]
    assert entry["options"]["namespace"] == NAMESPACE
    assert found.facts["devices"] == {"nvidia.com/gpu:2": 2}
    assert found.findings == ()
    kubernetes_testbed.server.forbidden.add(("list", "nodes"))
    assert KubernetesBackend.discover({"kubeconfig": str(kubernetes_testbed.kubeconfig)}, None).facts["devices"] == {}
    for claim in ("shared", "a-single"):
        kubernetes_testbed.store.delete("persistentvolumeclaims", NAMESPACE, claim)
    found = KubernetesBackend.discover({"kubeconfig": str(kubernetes_testbed.kubeconfig)}, "lab")
    assert not {"root", "volumes"} & {
        *yaml.safe_load(found.entry)["lab"],
        *yaml.safe_load(found.entry)["lab"]["options"],
    }
    assert "else, without a claim, records go with the pods" in found.entry
