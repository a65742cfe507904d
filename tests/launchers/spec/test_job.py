"""The job model: what is read, what it means, and that nothing is lost on the way to JSON and back."""

from __future__ import annotations

import copy
import json
import pickle
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, TypeAdapter, ValidationError

from orc.launchers.ids import JOB_ID, derived_job_id, new_job_id
from orc.launchers.spec import JobSpec, Launcher, Resources, load_job
from orc.runtime.core.config import JOB_KEYS


def test_the_smallest_job(job_files: Any) -> None:
    loaded = job_files.load("name: x\nscript: train.py\n")
    job = loaded.spec
    assert (job.name, job.script, job.argv, job.cluster) == ("x", "train.py", (), "local")
    assert (job.launcher.kind, job.launcher.options) == ("torchrun", {})
    assert (job.resources.min_nodes, job.resources.max_nodes, job.resources.nproc) == (1, 1, 1)
    assert (job.resources.time_s, job.resources.memory_bytes) == (None, None)
    assert (job.retry.max_attempts, job.retry.on, job.retry.backoff) == (3, ("node_failure", "preempted"), 10.0)
    assert (job.grace, job.checkpoint.resume, job.workdir.path) == (30.0, "auto", ".")
    assert loaded.source_path == Path("job.yaml")
    assert loaded.base_dir == job_files.directory
    assert loaded.workdir == job_files.directory


@pytest.mark.parametrize("name", ["-", "/dev/stdin", "/dev/fd/0", "<(cat)"])
def test_a_job_that_is_piped_in_starts_from_the_current_directory(job_files: Any, name: str) -> None:
    """Not from /dev, of which a snapshot would be taken."""
    print_it = "import sys; from orc.launchers.spec import load_job; print(*load_job(sys.argv[1])[1:])"
    command = f'exec "$0" -c "$1" {name}'
    done = subprocess.run(
        ["bash", "-c", command, sys.executable, print_it],
        input="name: x\nscript: train.py\nworkdir: .\n",
        capture_output=True,
        text=True,
        check=True,
    )
    source, base_dir = done.stdout.split()
    assert source.startswith("/dev/")
    assert base_dir == str(job_files.directory)


def test_files_in_shared_memory_are_files() -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as place:
        for name in ("job.yaml", "train.py"):
            (Path(place) / name).write_text("name: x\nscript: train.py\n")
        assert load_job(f"{place}/job.yaml").base_dir == Path(place)


def test_what_processes_get_as_text_is_taken_as_written(job_files: Any) -> None:
    job = job_files.load(
        """
name: 007
script: train.py
args: {lr: 1e-4, version: 1.10, mode: no, verbose: true, quiet: false, nothing: null, seeds: [1.0, 0x10]}
env: {VERSION: 1.10, FLAG: true, DAY: 2026-01-01, OCTAL: 0644, EMPTY: ""}
tags: {run: 010}
setup: [true, 1]
"""
    ).spec
    assert job.name == "007"
    assert " ".join(job.argv) == "--lr 1e-4 --version 1.10 --mode no --verbose --seeds 1.0 0x10"
    assert job.env == {"VERSION": "1.10", "FLAG": "true", "DAY": "2026-01-01", "OCTAL": "0644", "EMPTY": ""}
    assert job.tags == {"run": "010"}
    assert job.setup == ("true", "1")


def test_yaml_1_1_does_not_surprise(job_files: Any) -> None:
    job = job_files.load(
        """
name: x
script: train.py
resources: {nodes: 2:4, time: 1:30:00}
runtime: {mixed_precision: no, debug_mode: yes, use_cpu: off, seed: 1}
retry: {on: [crash, timeout]}
"""
    ).spec
    assert (job.resources.min_nodes, job.resources.max_nodes, job.resources.time_s) == (2, 4, 5400)
    assert job.runtime == {"mixed_precision": "no", "debug_mode": True, "use_cpu": False, "seed": 1}
    assert job.retry.on == ("crash", "timeout")


def test_short_forms(job_files: Any) -> None:
    (job_files.directory / "src").mkdir()
    (job_files.directory / "src" / "main.py").write_text("")
    loaded = job_files.load(
        "name: x\nscript: ./main.py\nworkdir: src\nlauncher: python\nretry: {on: crash}\nsetup: |\n  a\n  b\n"
    )
    job = loaded.spec
    assert (job.script, job.workdir.path, job.launcher.kind, job.retry.on) == ("main.py", "src", "python", ("crash",))
    assert job.setup == ("a\nb\n",)
    assert loaded.workdir == job_files.directory / "src"


def test_torchrun_as_the_program_of_a_launcher_that_starts_no_torchrun_is_fine() -> None:
    for command in ("torchrun --standalone train.py", ["torchrun", "--standalone", "train.py"]):
        JobSpec.model_validate({"name": "x", "command": command, "launcher": "python"})


def test_one_process_per_gpu_unless_said_otherwise() -> None:
    assert Resources(gpus_per_node=4).nproc == 4
    assert Resources(gpus_per_node=4, procs_per_node=8).nproc == 8
    assert Resources().nproc == 1


def test_a_file_name_that_looks_like_an_option_is_no_option() -> None:
    job = JobSpec(name="x", script="-c.py")
    assert job.script == "./-c.py"
    assert JobSpec.model_validate(job.model_dump(mode="json")) == job


def test_models_are_frozen() -> None:
    job = JobSpec(name="x", script="a.py")
    with pytest.raises(ValidationError, match="frozen"):
        job.name = "y"  # type: ignore[misc]
    with pytest.raises(ValidationError, match="frozen"):
        del job.name
    with pytest.raises(ValidationError, match="frozen"):
        job.resources.nodes = 2  # type: ignore[misc]


@pytest.mark.parametrize("text", ["a\0b", "\udcff"])
def test_text_that_no_process_could_be_given_is_refused(text: str) -> None:
    for settings in ({"env": {"A": text}}, {"args": [text]}, {"args": {"a": text}}, {"tags": {"a": text}}):
        with pytest.raises(ValidationError, match=r"NUL|UTF-8"):
            JobSpec.model_validate({"name": "x", "script": "a.py", **settings})


def test_copies_are_checked_and_equal() -> None:
    job = JobSpec(name="x", script="a.py", env={"A": "1"})
    assert copy.deepcopy(job) == pickle.loads(pickle.dumps(job)) == job
    changed = job.model_copy(update={"launcher": "python"})
    assert changed.launcher == Launcher(kind="python")
    assert changed != job
    with pytest.raises(ValidationError):
        job.model_copy(update={"nme": "y"})


def test_the_json_schema_describes_every_key() -> None:
    schema = JobSpec.model_json_schema()
    json.dumps(schema)
    (main,) = [schema["$defs"]["JobSpec"]] if "$ref" in schema else [schema]
    assert main["required"] == ["name"]
    assert main["additionalProperties"] is False
    assert set(main["properties"]) == set(JobSpec.model_fields)
    assert all("description" in value for value in main["properties"].values())
    assert set(schema["$defs"]["Runtime"]["properties"]) == set(JOB_KEYS)
    assert schema["$defs"]["Resources"]["additionalProperties"] is False


_text = st.text(st.characters(exclude_categories=("Cs",), exclude_characters="\0"), max_size=20)
_name = st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,10}", fullmatch=True).filter(
    lambda name: not name.startswith("ORC_") and name not in ("RANK", "NODE_RANK")
)
_count = st.integers(1, 4096)
_program = st.one_of(
    st.fixed_dictionaries({"script": st.from_regex(r"[a-z]{1,8}/[a-z]{1,8}\.py", fullmatch=True)}),
    st.fixed_dictionaries({"module": st.from_regex(r"[a-z]{1,5}(\.[a-z]{1,5}){0,2}", fullmatch=True)}),
    st.fixed_dictionaries({"command": st.just("echo hi; exit 3") | st.lists(_text.filter(bool), min_size=1)}),
)
_nodes = st.tuples(st.integers(1, 500), st.integers(0, 500)).map(lambda n: f"{n[0]}:{n[0] + n[1]}" if n[1] else n[0])
_resources = st.fixed_dictionaries(
    {},
    optional={
        "nodes": _nodes,
        "procs_per_node": _count,
        "gpus_per_node": st.integers(0, 16),
        "cpus_per_proc": _count,
        "memory": st.from_regex(r"[1-9][0-9]{0,5}(\.[0-9]{1,3})?[KMGT]", fullmatch=True),
        "time": st.integers(1, 10**6) | st.from_regex(r"[1-9][0-9]?[smhd]", fullmatch=True),
        "options": st.dictionaries(st.sampled_from(["slurm", "local"]), st.dictionaries(_text, _text, max_size=2)),
    },
)
_arguments = st.lists(_text, max_size=4) | st.dictionaries(
    _name, st.none() | st.booleans() | st.integers() | _text | st.lists(_text, max_size=3), max_size=4
)
_extras = st.fixed_dictionaries(
    {},
    optional={
        "args": _arguments,
        "resources": _resources,
        "env": st.dictionaries(_name, _text | st.integers() | st.booleans(), max_size=3),
        "setup": st.lists(_text, max_size=3) | _text,
        "runtime": st.fixed_dictionaries(
            {}, optional={"mixed_precision": st.sampled_from(["no", "bf16"]), "seed": _count}
        ),
        "checkpoint": st.fixed_dictionaries({}, optional={"dir": _text, "every": _count, "keep": _count}),
        "retry": st.fixed_dictionaries({}, optional={"max_attempts": st.integers(1, 9), "backoff": st.floats(0, 600)}),
        "grace": st.floats(0, 600) | st.just("2m"),
        "tags": st.dictionaries(_text.filter(bool), _text, max_size=3),
        "launcher": st.just("python") | st.fixed_dictionaries({"kind": st.just("torchrun")}),
    },
)


@given(_program, _extras)
def test_json_and_back_is_the_same_job(program: dict[str, Any], extras: dict[str, Any]) -> None:
    job = JobSpec.model_validate({"name": "x", **program, **extras})
    for exclude_defaults in (False, True):
        dumped = job.model_dump(mode="json", exclude_defaults=exclude_defaults)
        assert JobSpec.model_validate(json.loads(json.dumps(dumped))) == job


@given(_text)
def test_every_accepted_name_makes_a_job_id(name: str) -> None:
    try:
        job = JobSpec(name=name, script="a.py")
    except ValidationError:
        return
    assert JOB_ID.fullmatch(new_job_id(job.name))


@pytest.mark.parametrize("made", [lambda _: new_job_id("train"), lambda number: derived_job_id("train", str(number))])
def test_a_hundred_thousand_jobs_of_one_name_have_ids_of_their_own(made: Any) -> None:
    assert len({made(number) for number in range(100_000)}) == 100_000


def test_a_job_is_a_pydantic_type() -> None:
    class Request(BaseModel):
        job: JobSpec

    job = Request.model_validate({"job": {"name": "x", "script": "a.py", "resources": {"nodes": 2}}}).job
    assert job == JobSpec(name="x", script="a.py", resources=Resources(nodes=2))
    assert TypeAdapter(JobSpec).validate_python(job) is job
    with pytest.raises(ValidationError):
        Request.model_validate({"job": {"name": "x"}})
