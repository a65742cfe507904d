"""The ``environment`` section: short forms, what is refused and where, whose word counts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from orc.launchers.spec import JobSpec
from orc.launchers.spec.clusters import environment_of, load_clusters
from orc.launchers.spec.environment import Environment

JOB = "name: x\nscript: train.py\n"


def environment(job_files: Any, text: str) -> Environment:
    found: Environment = job_files.load(f"{JOB}environment: {text}\n").spec.environment
    return found


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("none", "none"),
        ("copy", "copy"),
        ("{copy: .venv}", "copy"),
        ("{copy: {exclude: ['**/tests/']}}", "copy"),
        ("{venv: requirements.txt}", "venv"),
        ("{conda: environment.yml}", "conda"),
        ("{conda: env.tar.gz}", "conda"),
        ("{container: img}", "container"),
    ],
)
def test_short_forms_are_understood_and_survive_the_ledger(text: str, kind: str, job_files: Any) -> None:
    found = environment(job_files, text)
    assert found.kind == kind
    spec = job_files.load(f"{JOB}environment: {text}\n").spec
    assert JobSpec.model_validate(spec.model_dump(mode="json")) == spec


def test_short_forms_say_what_the_long_ones_say(job_files: Any) -> None:
    assert environment(job_files, "{conda: env.tar.gz}") == environment(job_files, "{conda: {archive: env.tar.gz}}")
    assert environment(job_files, "{conda: env.yaml}") == environment(job_files, "{conda: {file: ./env.yaml}}")
    assert environment(job_files, "{venv: {requirements: r.txt}}") == environment(job_files, "{venv: r.txt}")


def test_a_version_of_python_is_text(job_files: Any) -> None:
    found = environment(job_files, "{venv: {requirements: r.txt, python: 3.10}}").venv
    assert found is not None
    assert found.python == "3.10"


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("conda", "environment: expected none, copy, or a mapping such as {venv: requirements.txt}"),
        ("{venv: {requirements: r.txt, python: 3.9}}", "Python 3.9; ranks need 3.10 or newer"),
        ("{vnev: r.txt}", "unknown key 'vnev', did you mean 'venv'?"),
        ("{venv: {requirement: r.txt}}", "unknown key 'requirement', did you mean 'requirements'?"),
        (
            "{venv: r.txt, copy: .venv}",
            "environment.copy: only one kind of environment can be given; venv is given too",
        ),
        ("{venv: ../r.txt}", "'../r.txt' lies outside the workdir"),
        ("{venv: ~/r.txt}", "is in a home directory that the nodes need not share"),
        ("{venv: uv.lock}", "pip cannot read uv.lock; write one that it can: uv export > requirements.lock"),
        ("{venv: {requirements: r, index_url: 'https://me:pw@host/simple'}}", "holds a user name or password"),
        ("{venv: {requirements: r, extra_index_urls: ['HTTPS://me:pw@host']}}", "holds a user name or password"),
        (
            "{venv: {requirements: r, no_index: true, index_url: 'https://h/s'}}",
            "no_index and an index exclude each other",
        ),
        ("{conda: {}}", "give either file (environment.yml) or archive (made by conda-pack)"),
        ("{container: {image: img, runtime: dokcer}}", "expected 'docker', 'podman' or 'apptainer', not 'dokcer'"),
        ("{container: {image: img, mounts: [data]}}", "'data' is not /on/the/node, /on/the/node:/inside or ...:ro"),
        ("{container: '--privileged'}", "'--privileged' is not the name of an image"),
    ],
)
def test_what_is_wrong_is_said_with_its_place(text: str, complaint: str, job_files: Any) -> None:
    said = job_files.complaint(f"{JOB}environment: {text}\n")
    assert complaint in said
    assert ":3:" in said
    assert "pw@" not in said


def test_the_jobs_word_goes_over_the_clusters(job_files: Any, tmp_path: Path) -> None:
    file = tmp_path / "clusters.yaml"
    file.write_text("lab: {kind: slurm, environment: {venv: {requirements: /shared/r.txt, python: 3.10}}}\n")
    cluster = load_clusters(file)["lab"]
    assert cluster.environment.venv is not None
    assert cluster.environment.venv.python == "3.10"
    silent, none, copy = (job_files.load(f"{JOB}{own}").spec for own in ("", "environment: none", "environment: copy"))
    assert environment_of(silent, cluster) is cluster.environment
    assert (environment_of(none, cluster).kind, environment_of(copy, cluster).kind) == ("none", "copy")
