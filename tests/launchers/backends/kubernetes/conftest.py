"""Jobs on a cluster of Kubernetes that is this machine, and plans that are sent nowhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from golden_plans import SNAPSHOT
from kubernetes_testbed import KubernetesTestbed

from orc.launchers.backends.base import Placement
from orc.launchers.backends.kubernetes import KubernetesBackend
from orc.launchers.ids import AttemptId
from orc.launchers.plan import Plan
from orc.launchers.spec import JobSpec
from orc.launchers.spec.clusters import Cluster
from orc.launchers.testing.fixtures import make_job, run
from orc.launchers.testing.jobs import View

Render = Callable[..., Plan]


@pytest.fixture
def backend_under_test(kubernetes_testbed: KubernetesTestbed, bare_runtime: None) -> Iterator[KubernetesBackend]:
    """Clusters of kind kubernetes, with a directory of the test."""
    backend = KubernetesBackend(kubernetes_testbed.cluster())
    yield backend
    backend.close()


@pytest.fixture
def view(kubernetes_testbed: KubernetesTestbed) -> View:
    return lambda plan, path: [kubernetes_testbed.here(path)]


@pytest.fixture
def render() -> Render:
    """``render({options of the cluster}, {options of the job}, **job)``: a plan that was sent nowhere."""

    def make(cluster: dict[str, Any] | None = None, job: dict[str, Any] | None = None, /, **spec: Any) -> Plan:
        options = {"namespace": "training", "image": "img", "volumes": [{"claim": "data", "path": "/shared"}]}
        backend = KubernetesBackend(
            Cluster(name="k8s", kind="kubernetes", root="/shared/orc", options={**options, **(cluster or {})})
        )
        resources = {**spec.pop("resources", {}), "options": {"kubernetes": job or {}}}
        placement = Placement((), avoid=tuple(spec.pop("avoid", ())))
        attempt = AttemptId(spec.pop("job_id", "digits-abcdef"), 1)
        made = JobSpec.model_validate({"name": "digits", "script": "train.py", "resources": resources, **spec})
        return backend.render(made, SNAPSHOT, attempt, placement)

    return make


__all__ = ["make_job", "run"]
