"""The JSON Schema of job.yaml and clusters.yaml takes what orc takes, and marks what it refuses."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from orc.launchers.backends import backend_class
from orc.launchers.errors import SpecError
from orc.launchers.plugins import BACKENDS
from orc.launchers.spec import source
from orc.launchers.spec.json_schema import SCHEMAS, clusters_schema, job_schema

ROOT = Path(__file__).parents[3]
STARTERS = sorted((ROOT / "templates" / "starters").glob("*/job.yaml"))


@pytest.fixture(scope="module")
def job() -> Draft202012Validator:
    return Draft202012Validator(job_schema())


def test_they_are_schemas() -> None:
    for make in SCHEMAS.values():
        Draft202012Validator.check_schema(make())


def test_the_starters_and_the_reference_are_valid(job: Draft202012Validator) -> None:
    assert STARTERS
    for path in STARTERS:
        assert [e.message for e in job.iter_errors(source.parse(path.read_text(), str(path)).data)] == [], path
    reference = (ROOT / "docs" / "reference" / "job-yaml.md").read_text()
    example = re.findall(r"```yaml\n(name:.*?)```", reference, re.DOTALL)[0]
    assert [e.message for e in job.iter_errors(source.parse(example, "example").data)] == []


SHORT = """\
name: 1
script: a.py
args: {lr: 0.1, flag: true}
launcher: torchrun
cluster: ${env:CLUSTER:-local}
resources: {nodes: 2:4, procs_per_node: "${env:N}", time: 90}
env: {A: 1, B: true}
setup: module load cuda
workdir: .
environment: copy
retry: {on: crash, backoff: 1m}
checkpoint:
"""


def test_short_forms_references_and_plain_values_are_allowed(job: Draft202012Validator) -> None:
    data = source.parse(SHORT, "job.yaml").data
    del data["checkpoint"]
    assert [e.message for e in job.iter_errors(data)] == []
    for environment in ("none", {"venv": "r.txt"}, {"copy": None}, {"conda": "e.yml"}, {"container": "image"}):
        assert job.is_valid(data | {"environment": environment})


PIPELINE = """\
cluster: local
jobs:
  prepare: {command: make data, outputs: {data: out}}
  train: {script: a.py, resources: {nodes: 2}, inputs: {data: prepare.data}}
"""


def test_a_pipeline_has_jobs_in_place_of_a_program(job: Draft202012Validator) -> None:
    data = source.parse(PIPELINE, "job.yaml").data
    assert [e.message for e in job.iter_errors(data)] == []
    for wrong in (
        {"jobs": {}},
        {"jobs": {"-x": {"command": "a"}}},
        {"jobs": {"a": {"comand": "a"}}},
        {"jobs": {"a": {"command": "a", "array": "4"}}},
        {"jobs": {"a": {"jobs": {}}}},
    ):
        assert not job.is_valid(data | wrong), wrong


@pytest.mark.parametrize(
    "wrong",
    [
        {"script": None},
        {"resourcez": {}},
        {"resources": {"nodez": 1}},
        {"resources": {"procs_per_node": "two"}},
        {"retry": {"on": "crasch"}},
        {"environment": "venv"},
        {"runtime": {"sed": 1}},
        {"args": 3},
    ],
)
def test_mistakes_are_marked(job: Draft202012Validator, wrong: dict[str, object]) -> None:
    data = {"name": "x", "script": "a.py"} | wrong
    if data["script"] is None:
        del data["script"]
    assert not job.is_valid(data)


def test_clusters_have_a_kind_but_for_the_local_one() -> None:
    schema = Draft202012Validator(clusters_schema())
    assert schema.is_valid({"local": {"env": {"A": 1}}, "hpc": {"kind": "slurm", "root": "/orc", "options": {"x": 1}}})
    assert not schema.is_valid({"hpc": {"root": "/orc"}})
    assert not schema.is_valid({"hpc": {"kind": "slurm", "rot": "/orc"}})


def all_kinds() -> Draft202012Validator:
    models = {kind: backend_class(kind).options_model for kind in BACKENDS.kinds()}
    return Draft202012Validator(clusters_schema({kind: model for kind, model in models.items() if model is not None}))


def documented_clusters() -> dict[str, dict[str, Any]]:
    """Files of clusters in the documentation and among the templates, by their places."""
    found: dict[str, dict[str, Any]] = {}
    for path in sorted((ROOT / "templates").rglob("clusters.yaml")):
        found[str(path.relative_to(ROOT))] = source.parse(path.read_text(), str(path)).data
    for page in sorted((ROOT / "docs").rglob("*.md")):
        for number, block in enumerate(re.findall(r"^```yaml\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)):
            try:
                data = source.parse(block, page.name).data
            except SpecError:
                continue
            if data and all(isinstance(each, dict) and "kind" in each for each in data.values()):
                found[f"{page.name}-{number}"] = data
    return found


DOCUMENTED = documented_clusters()


@pytest.mark.parametrize("place", DOCUMENTED)
def test_the_documented_clusters_are_valid_with_the_options_of_their_kinds(place: str) -> None:
    assert [error.message for error in all_kinds().iter_errors(DOCUMENTED[place])] == []


def test_options_of_every_kind_that_has_some_are_described_and_checked() -> None:
    schema = all_kinds()
    assert {"slurm", "ssh", "sagemaker", "tpu"} <= {
        kind for kind in BACKENDS.kinds() if backend_class(kind).options_model
    }
    for kind in BACKENDS.kinds():
        for model in (backend_class(kind).options_model, backend_class(kind).job_options_model):
            assert (
                [name for name, field in model.model_fields.items() if not field.description] == [] if model else True
            )
    assert schema.is_valid(
        {"hpc": {"kind": "slurm", "options": {"login": "me@front", "gres": "nvme:1", "modules": "cuda"}}}
    )
    assert not schema.is_valid({"hpc": {"kind": "slurm", "options": {"gpus_as": "cores"}}})
    assert schema.is_valid({"lab": {"kind": "ssh", "options": {"hosts": ["a", {"name": "b", "slots": 2}]}}})
    assert not schema.is_valid({"lab": {"kind": "ssh", "options": {"hostz": ["a"]}}})
