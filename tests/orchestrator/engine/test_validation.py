"""One look at a job file shows everything that any stage has against it."""

from __future__ import annotations

from pathlib import Path

import pytest

from orc.launchers.errors import LaunchError, RenderError, SpecError
from orc.launchers.spec import SpecProblems
from orc.orchestrator.client import Client
from orc.orchestrator.engine.job_source import load_checked

ALL = """\
name: x
script: t.py
launcher: {kind: torchrun, options: {max_restart: 3}}
cluster: lap
resources:
  nodez: 3
environment: {venv: reqs.txt}
env: {A: "${env:NOPE}"}
retry: {on: crasch}
"""


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("NOPE", raising=False)
    (tmp_path / "clusters.yaml").write_text(
        "lab: {kind: slurm, root: /orc, options: {partitoin: gpu}}\nhpc: {kind: slurm, root: /orc}\n"
    )
    monkeypatch.setenv("ORC_CLUSTERS", str(tmp_path / "clusters.yaml"))
    return Path("job.yaml")


def problems(path: Path, *overrides: str, cluster: str | None = None) -> list[str]:
    with pytest.raises(SpecProblems) as caught:
        load_checked(path, overrides, cluster=cluster)
    return [f"{problem.where}: {problem.text}" for problem in caught.value.problems]


def test_every_stage_is_heard_at_once_in_the_order_of_the_lines(job: Path) -> None:
    job.write_text(ALL)
    found = problems(job)
    begin = [text.split(": ", 1) for text in found]
    assert [place for place, _ in begin] == [
        "job.yaml:2:9",
        "job.yaml:3:38",
        "job.yaml:4:10",
        "job.yaml:6:3",
        "job.yaml:7:21",
        "job.yaml:8:10",
        "job.yaml:9:13",
    ]
    said = [text for _, text in begin]
    assert said[0].startswith("script: there is no file 't.py'")
    assert "unknown option 'max_restart', did you mean 'max_restarts'?" in said[1]
    assert "unknown cluster 'lap', did you mean 'lab'?" in said[2]
    assert said[3] == "resources: unknown key 'nodez', did you mean 'nodes'?"
    assert "reqs.txt: there is no such file" in said[4]
    assert said[5].startswith("env.A: the environment variable NOPE is not set")
    assert "did you mean 'crash'?" in said[6]


def test_options_of_the_cluster_and_of_the_job_for_it_are_checked_too(job: Path) -> None:
    job.write_text("name: x\ncommand: 'true'\nresources: {options: {slurm: {qosx: 1}}}\nruntim: {}\n")
    in_cluster = problems(job, cluster="lab")
    assert in_cluster[0] == "job.yaml:4:1: unknown key 'runtim', did you mean 'runtime'?"
    assert "clusters.yaml:1:42: " in in_cluster[1]
    assert "'partitoin', did you mean 'partition'" in in_cluster[1]
    in_job = problems(job, cluster="hpc")
    assert in_job[0].startswith("job.yaml:3:31: ")
    assert "'qosx'" in in_job[0]


def test_what_is_wrong_alone_is_said_by_whoever_found_it(job: Path) -> None:
    job.write_text("name: x\ncommand: 'true'\nlauncher: {options: {max_restart: 3}}\n")
    with pytest.raises(RenderError, match="unknown option 'max_restart'") as caught:
        load_checked(job)
    assert caught.value.where == "job.yaml:3:22"
    job.write_text("name: x\ncommand: 'true'\ncluster: nowhere\n")
    with pytest.raises(SpecError, match="unknown cluster") as unknown:
        load_checked(job)
    assert unknown.value.where == "job.yaml:3:10"


def test_what_only_the_backend_has_against_a_job_is_left_to_the_plan_that_is_rendered_next(job: Path) -> None:
    job.write_text("name: x\ncommand: 'true'\nresources: {options: {slurm: {qosx: 1}}}\n")
    loaded = load_checked(job, cluster="hpc")
    with Client(reconciler=False) as client, pytest.raises(LaunchError, match="'qosx'") as caught:
        client.submit(loaded)
    assert caught.value.where == "job.yaml:3:31"
    with Client(reconciler=False) as client:
        assert client.jobs() == []


def test_what_is_right_is_loaded(job: Path) -> None:
    job.write_text("name: x\ncommand: 'true'\nenvironment: {venv: reqs.txt}\n")
    Path("reqs.txt").touch()
    assert load_checked(job, ["name=y"]).spec.name == "y"


@pytest.mark.parametrize(
    "text",
    [
        'name: x\nscript: "t.py\nargs: [a]\n',  # to the end of the file
        'name: x\nscript: "t.py\nargs: ["--lr", 1]\n',  # to the next quote
        "name: x\nscript: 't.py\nargs: ['--lr', 1]\n",
    ],
)
def test_an_open_quote_is_reported_where_it_opens(job: Path, text: str) -> None:
    job.write_text(text)
    with pytest.raises(SpecError, match="quote is not closed") as caught:
        load_checked(job)
    assert caught.value.where == "job.yaml:2:9"


def test_quotes_on_one_line_and_texts_of_several_are_left_alone(job: Path) -> None:
    job.write_text('name: "x"\ncommand: "echo a\n  b"\n\tenv: {}\n')
    with pytest.raises(SpecError) as caught:
        load_checked(job)
    assert caught.value.where == "job.yaml:4:1"
