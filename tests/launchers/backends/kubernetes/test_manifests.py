"""The manifests: what the options become, by the published schemas of Kubernetes."""

from __future__ import annotations

import json
from typing import Any

import pytest
from kubernetes_store import violations

from orc.launchers.backends.kubernetes.manifests import gate_manifest
from orc.launchers.backends.kubernetes.options import ClusterOptions
from orc.launchers.errors import RenderError, SpecError
from orc.launchers.plan import Plan

EVERYTHING: dict[str, Any] = {
    "image_pull_secrets": "registry",
    "service_account": "trainer",
    "node_selector": {"pool": "a100"},
    "tolerations": ["nvidia.com/gpu", {"key": "dedicated", "value": "training", "effect": "NoSchedule"}],
    "affinity": {"podAntiAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": []}},
    "priority_class": "high",
    "gpu": "amd.com/gpu",
    "devices": {"rdma/hca": 1},
    "shm_size": "16G",
    "host_network": True,
    "volumes": [
        {"claim": "data", "path": "/shared"},
        {"empty": "disk", "path": "/scratch", "size": "100G"},
        {"empty": "memory", "path": "/fast"},
        {"host_path": "/opt/data", "path": "/opt/data", "read_only": True},
        {"config_map": "settings", "path": "/etc/settings"},
        {"secret": "login", "path": "/etc/login", "sub_path": "token"},
    ],
    "labels": {"team": "vision"},
    "pod_template": {
        "metadata": {"annotations": {"owner.example.com/who": "us"}},
        "spec": {
            "runtimeClassName": "nvidia",
            "containers": [
                {"name": "main", "securityContext": {"capabilities": {"add": ["IPC_LOCK"]}}},
                {"name": "sidecar", "image": "proxy"},
            ],
        },
    },
}


def manifest(plan: Plan, name: str = "job.json") -> dict[str, Any]:
    return dict(json.loads(next(file.content for file in plan.files if file.path.endswith(f"/{name}"))))


def pod_of(plan: Plan) -> dict[str, Any]:
    return dict(manifest(plan)["spec"]["template"]["spec"])


@pytest.mark.parametrize("version", ["1.27", "1.34"])
def test_every_option_makes_a_manifest_that_two_versions_of_the_published_schema_take(render, version) -> None:
    plan = render(
        EVERYTHING, secrets=["TOKEN"], resources={"nodes": 4, "gpus_per_node": 8, "memory": "64G"}, avoid=["n"]
    )
    assert violations(manifest(plan), version) == []
    assert violations(manifest(plan, "secret.json"), version) == []
    assert violations(manifest(plan, "service.json"), version) == []
    assert violations({**manifest(plan), "spec": {"templat": {}}}, version) != []  # the schema does look


def test_an_attempt_is_one_indexed_job_that_ends_with_its_first_pod_that_fails(render) -> None:
    job = manifest(render(resources={"nodes": 3, "gpus_per_node": 2, "cpus_per_proc": 4}, grace=90))
    spec = job["spec"]
    wanted = {"completionMode": "Indexed", "completions": 3, "parallelism": 3, "backoffLimit": 0}
    assert {key: spec[key] for key in wanted} == wanted
    (rule,) = spec["podFailurePolicy"]["rules"]
    assert (rule["action"], rule["onPodConditions"][0]["type"]) == ("FailJob", "DisruptionTarget")
    pod = spec["template"]["spec"]
    assert (pod["restartPolicy"], pod["terminationGracePeriodSeconds"]) == ("Never", 120)
    assert not pod["automountServiceAccountToken"]
    devices = {"nvidia.com/gpu": "2"}
    assert pod["containers"][0]["resources"] == {"requests": {**devices, "cpu": "8"}, "limits": devices}
    assert job["metadata"]["labels"]["orc-launch/attempt"] == job["metadata"]["name"] == "orc-digits-abcdef-a1"
    assert job["metadata"]["annotations"]["orc-launch/marker"] == "orc-digits-abcdef-a1"
    assert not spec.get("suspend")


def test_what_the_options_say_of_the_pod_is_in_it(render) -> None:
    plan = render(EVERYTHING, resources={"gpus_per_node": 8, "memory": "64G"})
    pod, main = pod_of(plan), pod_of(plan)["containers"][0]
    assert main["resources"]["limits"] == {"rdma/hca": "1", "amd.com/gpu": "8", "memory": "64Gi"}
    assert pod["tolerations"] == [
        {"operator": "Exists", "key": "nvidia.com/gpu"},
        {"operator": "Equal", "key": "dedicated", "value": "training", "effect": "NoSchedule"},
    ]
    assert (pod["hostNetwork"], pod["runtimeClassName"], pod["priorityClassName"]) == (True, "nvidia", "high")
    assert (pod["serviceAccountName"], pod["automountServiceAccountToken"]) == ("trainer", True)
    assert (pod["nodeSelector"], pod["imagePullSecrets"]) == ({"pool": "a100"}, [{"name": "registry"}])
    assert pod["affinity"] == EVERYTHING["affinity"]
    assert main["securityContext"] == {"capabilities": {"add": ["IPC_LOCK"]}}
    assert [each["name"] for each in pod["containers"]] == ["main", "sidecar"]
    mounts = {each["mountPath"]: each for each in main["volumeMounts"]}
    assert mounts["/opt/data"]["readOnly"] is True
    assert mounts["/etc/login"]["subPath"] == "token"
    sources = {each["name"]: each for each in pod["volumes"]}
    assert sources[mounts["/dev/shm"]["name"]]["emptyDir"] == {"medium": "Memory", "sizeLimit": "16Gi"}
    assert sources[mounts["/scratch"]["name"]]["emptyDir"] == {"sizeLimit": "100Gi"}
    template = manifest(plan)["spec"]["template"]["metadata"]
    assert template["annotations"] == {"owner.example.com/who": "us"}
    assert template["labels"]["team"] == "vision"


def test_tpus_of_gke_are_a_device_by_its_name_and_no_gpu(render) -> None:
    selector = {
        "cloud.google.com/gke-tpu-accelerator": "tpu-v5-lite-podslice",
        "cloud.google.com/gke-tpu-topology": "4x4",
    }
    plan = render({"devices": {"google.com/tpu": 4}, "node_selector": selector}, resources={"nodes": 4})
    pod, tpus = pod_of(plan), {"google.com/tpu": "4"}
    assert pod["containers"][0]["resources"] == {"requests": tpus, "limits": tpus}
    assert pod["nodeSelector"] == selector
    assert "ORC_GPUS" not in plan.env
    assert violations(manifest(plan)) == []


def test_pods_of_several_nodes_have_names_and_those_of_one_need_none(render) -> None:
    name = "orc-digits-abcdef-a1"
    plan = render(resources={"nodes": 2})
    assert pod_of(plan)["subdomain"] == name
    assert manifest(plan, "service.json")["spec"] == {
        "clusterIP": "None",
        "publishNotReadyAddresses": True,
        "selector": {"orc-launch/attempt": name},
    }
    command = pod_of(plan)["containers"][0]["command"]
    assert command[command.index("--master-host") + 1] == f"{name}-0.{name}"
    alone = render()
    assert [file.path.rpartition("/")[2] for file in alone.files] == ["agent.json", "job.json"]
    assert "--master-host" not in pod_of(alone)["containers"][0]["command"]


def test_a_jobset_holds_the_job_and_has_what_counts_for_all_of_it(render) -> None:
    options = {"jobset": True, "queue": "team-a", "keep": 60}
    made = manifest(render(options, resources={"nodes": 2}), "jobset.json")
    assert violations(made) == []
    assert (made["apiVersion"], made["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    (part,) = made["spec"].pop("replicatedJobs")
    assert made["spec"] == {"suspend": True, "ttlSecondsAfterFinished": 60, "failurePolicy": {"maxRestarts": 0}}
    assert made["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "team-a"
    assert "kueue.x-k8s.io/queue-name" not in part["template"]["metadata"]["labels"]  # Kueue knows the whole alone
    assert (part["name"], part["replicas"], part["template"]["spec"]["completions"]) == ("main", 1, 2)
    assert violations({**made, "spec": {"replicatedJobs": [part], "replicas": 1}}) != []


def test_a_jobs_options_go_over_the_clusters(render) -> None:
    own = {
        "image": "mine",
        "node_selector": {"disk": "ssd"},
        "volumes": [{"claim": "more", "path": "/more"}],
        "gpu": "a.b/c",
    }
    pod = pod_of(render({"node_selector": {"pool": "x"}}, own, resources={"gpus_per_node": 1}))
    assert pod["nodeSelector"] == {"pool": "x", "disk": "ssd"}
    assert [each["mountPath"] for each in pod["containers"][0]["volumeMounts"]] == ["/dev/shm", "/shared", "/more"]
    assert (pod["containers"][0]["image"], pod["containers"][0]["resources"]["limits"]) == ("mine", {"a.b/c": "1"})


def test_hosts_that_failed_the_job_are_kept_away_from_in_every_term_of_its_affinity(render) -> None:
    terms = {"nodeSelectorTerms": [{"matchExpressions": [{"key": "zone", "operator": "Exists"}]}, {"matchFields": []}]}
    rules = {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": terms}}
    pod = pod_of(render({"affinity": rules}, avoid=["n1", "n2"]))
    made = pod["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    away = [{"key": "metadata.name", "operator": "NotIn", "values": [name]} for name in ("n1", "n2")]
    assert [term["matchFields"] for term in made] == [away, away]
    assert made[0]["matchExpressions"] == terms["nodeSelectorTerms"][0]["matchExpressions"]


def test_the_gate_reaches_the_volume_and_takes_no_device_wherever_it_is() -> None:
    options = ClusterOptions.model_validate(EVERYTHING)
    gate = gate_manifest(options.model_copy(update={"image": "img"}), "/shared/orc", "python3", "k8s")
    assert violations(gate) == []
    spec = gate["spec"]
    assert [each["mountPath"] for each in spec["containers"][0]["volumeMounts"]] == ["/dev/shm", "/shared"]
    assert "limits" not in spec["containers"][0]["resources"]
    assert not {"nodeSelector", "affinity", "hostNetwork", "priorityClassName"} & set(spec)
    assert spec["activeDeadlineSeconds"] == 12 * 3600


def test_kueue_gets_the_job_suspended_in_its_queue(render) -> None:
    job = manifest(render({"queue": "team-a"}))
    assert job["spec"]["suspend"] is True
    assert job["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "team-a"


def test_names_that_are_too_long_are_cut_and_stay_different(render) -> None:
    long = "a" * 45
    names = [manifest(render(job_id=f"{long}-{end}"))["metadata"]["name"] for end in ("abcdef", "abcdeg")]
    assert len(set(names)) == 2
    assert max(map(len, names)) <= 45  # with -main-0 of a JobSet and -<index>-<five letters> a name of 63
    assert manifest(render(job_id=f"{long}-abcdef"))["metadata"]["annotations"]["orc-launch/marker"].endswith(
        "abcdef-a1"
    )


def test_variables_of_the_shell_are_not_kubernetes_own(render) -> None:
    words = pod_of(render(env={"A": "$(B)"}))["containers"][0]["command"]
    assert not [word for word in words if "$(" in word.replace("$$(", "")]


@pytest.mark.parametrize(
    ("template", "what"),
    [
        ({"spec": {"restartPolicy": "Always"}}, "spec.restartPolicy"),
        ({"spec": {"containers": [{"name": "main", "image": "other"}]}}, r"spec.containers\[0\].image"),
        ({"spec": {"containers": [{"name": "main", "command": None}]}}, r"spec.containers\[0\].command"),
        ({"metadata": {"labels": {"orc-launch/attempt": "x"}}}, "metadata.labels.orc-launch/attempt"),
        ({"spec": {"volumes": None}}, "spec.volumes"),
    ],
)
def test_a_template_that_contradicts_orc_is_refused_with_the_key(render, template, what) -> None:
    with pytest.raises(RenderError, match=rf"pod_template: {what} is orc's own"):
        render({"pod_template": template})


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"volumes": []}, "in no volume that all pods share"),
        ({"store": "s3://b/orc"}, "there is a store: give one of both"),
        ({"store": "bucket"}, "is not the URL of a place in an object store"),
        ({"volumes": [{"empty": "disk", "path": "/shared"}]}, "in no volume that all pods share"),
        ({"volumes": [{"claim": "data", "path": "/shared", "read_only": True}]}, "in no volume that all pods share"),
        ({"volumes": [{"claim": "data", "path": "/shared", "secret": "x"}]}, "is claim and secret"),
        ({"volumes": [{"path": "/shared"}]}, "is nothing"),
        ({"volumes": [{"claim": "a", "path": "/shared"}, {"claim": "b", "path": "/shared"}]}, "two are at /shared"),
        ({"image": "two words"}, "must not contain blanks"),
        ({"namespace": "Big"}, "is not the name of an object"),
        ({"gpu": "gpu"}, "is not the name of a device"),
        ({"jobsets": True}, "unknown key"),
        ({"pod_template": {"sepc": {}}}, "unknown key"),
    ],
)
def test_options_that_are_wrong_are_refused_with_what_they_should_be(render, options, what) -> None:
    with pytest.raises(SpecError, match=what):
        render(options)


@pytest.mark.parametrize(
    ("spec", "what"),
    [
        ({"resources": {"nodes": "2:4"}}, "a Job has one number of pods"),
        ({"environment": {"container": "img"}}, "the job runs in a container already"),
    ],
)
def test_jobs_that_kubernetes_cannot_carry_are_refused(render, spec, what) -> None:
    with pytest.raises(RenderError, match=what):
        render(**spec)
    with pytest.raises(RenderError, match="no image"):
        render({"image": None})
