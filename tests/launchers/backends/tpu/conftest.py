"""Clusters of TPUs that nobody asks for anything, and jobs for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from orc.launchers.backends.base import Snapshot
from orc.launchers.snapshot.manifest import Entry
from orc.launchers.snapshot.scan import Bundle
from orc.launchers.spec import JobSpec
from orc.launchers.spec.clusters import Cluster

SNAPSHOT = Snapshot(Bundle.of([Entry.link("code", "a")]), Bundle.of([Entry.link("runtime", "b")]))
SMALLEST = {"project": "demo-project", "zones": "us-central2-b", "accelerator_type": "v4-16"}


@pytest.fixture
def cluster() -> Callable[..., Cluster]:
    """``cluster(spot=True, ...)``: a cluster of kind tpu, called pod."""

    def make(*, root: str | None = None, python: str | None = None, **options: Any) -> Cluster:
        given = {key: value for key, value in {**SMALLEST, **options}.items() if value is not None}
        return Cluster(name="pod", kind="tpu", root=root, python=python, options=given)

    return make


@pytest.fixture
def job() -> Callable[..., JobSpec]:
    """``job(tpu={...}, nodes=2)``."""

    def make(tpu: dict[str, Any] | None = None, **resources: Any) -> JobSpec:
        if tpu is not None:
            resources["options"] = {"tpu": tpu}
        return JobSpec.model_validate({"name": "digits", "script": "train.py", "resources": resources})

    return make
