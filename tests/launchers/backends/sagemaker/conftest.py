"""Clusters and jobs of kind sagemaker that nobody sends anywhere."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest

from orc.launchers.backends.base import Snapshot
from orc.launchers.backends.sagemaker.rendering import render_plan, request_of
from orc.launchers.backends.sagemaker.settings import Settings, read_settings
from orc.launchers.ids import AttemptId
from orc.launchers.plan import Plan
from orc.launchers.snapshot.manifest import Entry
from orc.launchers.snapshot.scan import Bundle
from orc.launchers.spec import JobSpec
from orc.launchers.spec.clusters import Cluster

OPTIONS = {
    "region": "us-east-1",
    "account": "123456789012",
    "bucket": "my-bucket",
    "role": "training",
    "instance_type": "ml.c5.xlarge",
    "pytorch_version": "2.5.1",
}
# The documented example of a configuration file, with the documented additional arguments.
DOCUMENTED = {
    "base_job_name": "accelerate-sagemaker-1",
    "compute_environment": "AMAZON_SAGEMAKER",
    "distributed_type": "DATA_PARALLEL",
    "ec2_instance_type": "ml.p3.16xlarge",
    "iam_role_name": "xxxxx",
    "image_uri": None,
    "mixed_precision": "fp16",
    "num_machines": 1,
    "profile": "xxxxx",
    "py_version": "py38",
    "pytorch_version": "1.10.2",
    "region": "us-east-1",
    "transformers_version": "4.17.0",
    "use_cpu": False,
    "additional_args": {"use_spot_instances": True, "max_wait": 86400, "enable_network_isolation": True},
}
SNAPSHOT = Snapshot(
    Bundle.of([Entry.link("code", "a"), Entry.link("requirements.txt", "code")]),
    Bundle.of([Entry.link("runtime", "b")]),
)


def make_cluster(python: str | None = None, **options: Any) -> Cluster:
    """OPTIONS, with *options* over them; `None` takes one away."""
    given = {key: value for key, value in {**OPTIONS, **options}.items() if value is not None}
    return Cluster(name="sm", kind="sagemaker", python=python, options=given)


def make_job(sagemaker: Mapping[str, Any] | None = None, **spec: Any) -> JobSpec:
    """A job whose options for SageMaker are *sagemaker*."""
    resources = {**spec.pop("resources", {}), **({"options": {"sagemaker": sagemaker}} if sagemaker else {})}
    return JobSpec.model_validate({"name": "digits", "script": "train.py", "resources": resources, **spec})


@pytest.fixture
def documented() -> dict[str, Any]:
    """The documented configuration file."""
    return DOCUMENTED


@pytest.fixture
def cluster() -> Callable[..., Cluster]:
    return make_cluster


@pytest.fixture
def job() -> Callable[..., JobSpec]:
    return make_job


@pytest.fixture
def settings() -> Callable[..., Settings]:
    """``settings(job options, **cluster options)``."""

    def read(own: Mapping[str, Any] | None = None, **options: Any) -> Settings:
        return read_settings(make_cluster(**options), make_job(own))

    return read


@pytest.fixture
def plan() -> Callable[..., Plan]:
    """``plan({job's sagemaker options}, {cluster's options}, **job)``: what is rendered."""

    def render(own: Mapping[str, Any] | None = None, options: Mapping[str, Any] | None = None, **spec: Any) -> Plan:
        python = spec.pop("python", None)
        where, what = make_cluster(python, **(options or {})), make_job(own, **spec)
        given = read_settings(where, what)
        return render_plan(what, SNAPSHOT, AttemptId("digits-k3f9a2", 1), where, given, given.place.region or "")

    return render


@pytest.fixture
def request_for(plan: Callable[..., Plan]) -> Callable[..., dict[str, Any]]:
    """The request of such a plan."""
    return lambda *args, **spec: request_of(plan(*args, **spec))


@pytest.fixture
def agents_for(plan: Callable[..., Plan]) -> Callable[..., dict[str, Any]]:
    """The ``agent.json`` of such a plan."""
    return lambda *args, **spec: json.loads(plan(*args, **spec).files[0].content)


@pytest.fixture(autouse=True, scope="session")
def _botocore_reads_its_files_once() -> Iterator[None]:
    """A session reads the descriptions of services once; here all sessions together do, of which a test makes some."""
    from botocore.loaders import JSONFileLoader

    read = functools.cache(functools.partial(JSONFileLoader._load_file, JSONFileLoader()))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(JSONFileLoader, "_load_file", lambda _, path, open_method: read(path, open_method))
        yield
