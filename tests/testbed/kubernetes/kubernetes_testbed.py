"""A cluster of Kubernetes on this machine, for tests."""

from __future__ import annotations

import json
import shutil
import signal
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
from kubernetes_nodes import condition, put_condition
from kubernetes_server import Server

from orc.launchers.spec.clusters import Cluster

NAMESPACE = "training"
CLAIM = "shared"
MOUNT = "/mnt/shared"
IMAGE = "orc/python:3"


class KubernetesTestbed:
    """The API server and two nodes, with a claim that all pods can share."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.server = Server(home)
        self.store, self.cluster_ = self.server.store, self.server.cluster
        meta = {"metadata": {"name": NAMESPACE}}
        self.store.create("namespaces", "", {"apiVersion": "v1", "kind": "Namespace", **meta})
        for number in (1, 2):
            self.add_node(f"node-{number}")
        self.add_claim(CLAIM)
        self.kubeconfig = home / "kubeconfig"
        self.write_kubeconfig("valid")

    def write_kubeconfig(self, token: str) -> None:
        """Write the kubeconfig of a user with *token*."""
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "test",
            "clusters": [{"name": "test", "cluster": {"server": self.server.url}}],
            "users": [{"name": "dev", "user": {"token": token}}],
            "contexts": [{"name": "test", "context": {"cluster": "test", "user": "dev", "namespace": NAMESPACE}}],
        }
        self.kubeconfig.write_text(json.dumps(config))

    def add_node(self, name: str, **allocatable: str) -> None:
        """Add a node with 8 cores and two GPUs, or what *allocatable* says."""
        able = {"cpu": "64", "memory": "256Gi", "nvidia.com/gpu": "2", **allocatable}
        meta = {"name": name, "labels": {"kubernetes.io/hostname": name, "node.kubernetes.io/instance-type": "a2"}}
        status = {"allocatable": able, "conditions": [condition("Ready")]}
        self.store.create(
            "nodes", "", {"apiVersion": "v1", "kind": "Node", "metadata": meta, "spec": {}, "status": status}
        )

    def add_claim(self, name: str, mode: str = "ReadWriteMany") -> None:
        """Add a bound claim."""
        (self.home / "claims" / NAMESPACE / name).mkdir(parents=True)
        spec = {"accessModes": [mode], "resources": {"requests": {"storage": "1Gi"}}}
        body = {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": name}, "spec": spec}
        self.store.create("persistentvolumeclaims", NAMESPACE, {**body, "status": {"phase": "Bound"}})

    def cluster(self, **options: Any) -> Cluster:
        """Return the entry of clusters.yaml for it."""
        own = {
            "kubeconfig": str(self.kubeconfig),
            "namespace": NAMESPACE,
            "image": IMAGE,
            "volumes": [{"claim": CLAIM, "path": MOUNT}],
            **options,
        }
        return Cluster(name="k8s", kind="kubernetes", root=f"{MOUNT}/orc", options=own)

    def cluster_without_volume(self, env: Mapping[str, str] | None = None, **options: Any) -> Cluster:
        """Return the entry of a cluster whose pods share nothing, with *env* for the job."""
        own = {"kubeconfig": str(self.kubeconfig), "namespace": NAMESPACE, "image": IMAGE, **options}
        return Cluster(name="k8s", kind="kubernetes", options=own, env=dict(env or {}))

    def here(self, path: PurePosixPath) -> Path:
        """Return where a path of the shared volume is on this machine."""
        return self.home / "claims" / NAMESPACE / CLAIM / path.relative_to(MOUNT)

    def pods(self, labels: str = "batch.kubernetes.io/job-name") -> list[dict[str, Any]]:
        """Return the pods of Jobs, in the order of their nodes."""
        return sorted(self.store.list("pods", NAMESPACE, labels), key=lambda pod: str(pod["metadata"]["name"]))

    def node_lost(self, name: str) -> None:
        """Let a node go away: its processes are gone, and the garbage collector of pods says so."""
        self.cluster_.dead_nodes.add(name)
        for pod in self.store.list("pods", NAMESPACE):
            if pod["spec"].get("nodeName") != name or pod["status"]["phase"] != "Running":
                continue
            self.cluster_.processes[pod["metadata"]["uid"]].told = True
            self.cluster_.processes[pod["metadata"]["uid"]].kill()
            gone = condition("DisruptionTarget", "True", "DeletionByPodGC", "PodGC: node no longer exists")
            self._fail(pod, gone)

    def _fail(self, pod: dict[str, Any], why: dict[str, Any]) -> None:
        def change(item: dict[str, Any]) -> None:
            put_condition(item, why)
            item["status"].update(phase="Failed", containerStatuses=[])

        self.store.update("pods", NAMESPACE, pod["metadata"]["name"], change)

    def evict(self, pod: dict[str, Any]) -> None:
        """Evict a pod as a drain does: SIGTERM, and its grace."""
        why = condition("DisruptionTarget", "True", "EvictionByEvictionAPI", "Eviction API: evicting")
        name = pod["metadata"]["name"]
        self.store.update("pods", NAMESPACE, name, lambda item: put_condition(item, why))
        self.store.delete("pods", NAMESPACE, name)

    def kill(self, pod: dict[str, Any], reason: str, **status: Any) -> None:
        """End a container as the kernel or the kubelet does."""
        process = self.cluster_.processes[pod["metadata"]["uid"]]
        process.reason, process.status = reason, status
        process.signal(signal.SIGKILL)

    def close(self) -> None:
        """End everything."""
        self.server.stop()


def view(testbed: KubernetesTestbed, path: PurePosixPath) -> Sequence[Path]:
    """Return where a path of an attempt is, for the conformance suite."""
    return [testbed.here(path)]


@pytest.fixture
def kubernetes_testbed(tmp_path: Path) -> Iterator[KubernetesTestbed]:
    """A cluster of the test's own."""
    if shutil.which("unshare") is None:
        pytest.skip("no unshare (util-linux)")
    testbed = KubernetesTestbed(tmp_path / "kubernetes")
    yield testbed
    testbed.close()
