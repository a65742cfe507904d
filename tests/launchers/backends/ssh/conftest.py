"""A cluster of hosts that nobody connects to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from orc.launchers.backends.ssh.settings import Settings, read_settings
from orc.launchers.spec import JobSpec
from orc.launchers.spec.clusters import Cluster


@pytest.fixture
def cluster() -> Callable[..., Cluster]:
    """``cluster(hosts=[...], slots=4, ...)``: a cluster of kind ssh, called lab."""

    def make(*, root: str | None = "/scratch/orc", python: str | None = None, **options: Any) -> Cluster:
        return Cluster(name="lab", kind="ssh", root=root, python=python, options={"hosts": ["a", "b", "c"], **options})

    return make


@pytest.fixture
def settings(cluster: Callable[..., Cluster]) -> Callable[..., Settings]:
    return lambda **options: read_settings(cluster(**options))


@pytest.fixture
def job() -> Callable[..., JobSpec]:
    """``job(nodes=2, procs_per_node=4, ssh={...})``."""

    def make(ssh: dict[str, Any] | None = None, **resources: Any) -> JobSpec:
        if ssh is not None:
            resources["options"] = {"ssh": ssh}
        return JobSpec.model_validate({"name": "digits", "script": "train.py", "resources": resources})

    return make
