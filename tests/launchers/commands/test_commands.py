"""What all commands have in common."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
from golden_plans import SNAPSHOT
from pydantic import ValidationError

from orc.launchers.attempts.agent_config import agent_config
from orc.launchers.commands import build_command
from orc.launchers.commands.base import PLACEHOLDERS, program_of
from orc.launchers.errors import RenderError
from orc.launchers.ids import AttemptId
from orc.launchers.paths import Layout
from orc.launchers.plugins import COMMANDS
from orc.launchers.spec import JobSpec, load_job
from orc.launchers.spec.clusters import Cluster

from .conftest import job

KINDS = ["deepspeed", "mpirun", "python", "ray", "torchrun", "xla"]


def config(made: JobSpec, kind: str) -> dict[str, Any]:
    cluster = Cluster(name="lab", kind=kind, root="/r")
    return agent_config(made, SNAPSHOT, AttemptId("x-000000", 1), cluster, Layout.at("/r")).to_dict()


def test_kinds_are_found_without_a_list() -> None:
    assert COMMANDS.kinds() == KINDS


def test_every_placeholder_that_is_used_is_known_to_the_agent() -> None:
    used = set()
    for kind in KINDS:
        for options in ({}, {"rdzv_backend": "c10d"} if kind == "torchrun" else {}):
            made = job(launcher={"kind": kind, "options": options}, resources={"procs_per_node": 1})
            command = build_command(made)
            words = [word for service in command.services for word in service.argv]
            text = " ".join([*command.launcher, *command.env.values(), *words])
            used |= {name for name in PLACEHOLDERS if f"{{{name}}}" in text}
    assert used == set(PLACEHOLDERS)
    agent = (Path(__file__).parents[3] / "launchers" / "agent" / "ranks.py").read_text()
    assert [name for name in PLACEHOLDERS if f'"{name}": ' not in agent] == []


@pytest.mark.parametrize("kind", KINDS)
def test_every_command_keeps_the_users_words(kind: str) -> None:
    words = ("a b", "$HOME", "it's", "{python}", "{nnodes}", "--", "")
    assert build_command(job(launcher=kind, args=list(words))).program == ("{python}", "train.py", *words)


@pytest.mark.parametrize("kind", KINDS)
def test_a_range_of_nodes_is_for_the_cluster_to_settle(kind: str) -> None:
    build_command(job(launcher=kind, resources={"nodes": "2:4", "procs_per_node": 1 if kind == "ray" else 4}))


@pytest.mark.parametrize(
    ("launcher", "place"),
    [
        ("{kind: mpirun, options: {bindd: core}}", "job.yaml:3:36"),
        ("{kind: deepspeed, options: {launcher: pdss}}", "job.yaml:3:39"),
        ("{kind: python, options: {nproc: 2}}", "job.yaml:3:36"),
        ("{kind: torchrun, options: {monitor_interval: 1, nnodes: 2}}", "job.yaml:3:59"),
        ("{kind: torchrun, options: {max_restarts: 2}}", "job.yaml:3:38"),
        ("{kind: mpirun, options: {map_by: core, bind_to: a b}}", "job.yaml:3:50"),
    ],
)
def test_a_wrong_option_is_named_with_its_place_in_the_job_file(
    launcher: str, place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").touch()
    Path("job.yaml").write_text(f"name: x\nscript: train.py\nlauncher: {launcher}\n")
    with pytest.raises(RenderError) as caught:
        build_command(load_job("job.yaml").spec)
    assert caught.value.where == place


@pytest.mark.parametrize("kind", ["torchrun", "mpirun", "deepspeed"])
def test_a_launcher_inside_itself_is_refused(kind: str) -> None:
    with pytest.raises(ValidationError, match=f"starts {kind} inside {kind}"):
        job(launcher=kind, command=[f"/usr/bin/{kind}", "-n", "4", "train.py"])
    build_command(job(launcher="python", command=[f"/usr/bin/{kind}", "train.py"]))


@pytest.mark.parametrize("kind", ["base", "program", "options", "nope", "../x", "os.path"])
def test_what_is_no_command_is_refused(kind: str) -> None:
    with pytest.raises(RenderError):
        build_command(job(launcher=kind))


def test_the_agents_are_told_what_is_not_usual() -> None:
    assert set(config(job(launcher="python"), "local")["command"]) == {"spawn", "launcher", "program", "env"}
    command = config(job(launcher="mpirun"), "local")["command"]
    assert (command["primary"], command["remote_shell"], command["settle_s"]) == ("first", True, 0.5)
    assert sorted(command["hostfiles"]) == ["hostfile", "machinefile"]
    command = config(job(launcher="ray"), "local")["command"]
    assert [(service["role"], service["nodes"]) for service in command["services"]] == [
        ("Ray head", "first"),
        ("Ray worker", "others"),
    ]


def test_a_command_for_one_kind_of_cluster_is_refused_on_others() -> None:
    made = job(launcher={"kind": "deepspeed", "options": {"launcher": "slurm"}})
    assert config(made, "slurm")["command"]["spawn"] == "launcher"
    with pytest.raises(RenderError) as caught:
        config(made, "local")
    assert "runs on clusters of kind slurm, and lab is of kind local" in caught.value.what


@pytest.mark.parametrize(
    ("settings", "program"),
    [
        ({"script": "train.py", "args": ["a b"]}, ("{python}", "train.py", "a b")),
        ({"module": "pkg.train", "args": ["-v"]}, ("{python}", "-m", "pkg.train", "-v")),
        ({"command": ["./run", "x"], "args": ["y"]}, ("./run", "x", "y")),
        ({"command": "make train"}, ("/bin/sh", "-c", "make train")),
    ],
)
def test_programs(settings: dict[str, Any], program: tuple[str, ...]) -> None:
    assert program_of(job(**settings)) == program


@pytest.mark.parametrize("command", ["printf '<%s>' x", "printf '<%s>' x\n", "true && printf '<%s>' x"])
def test_arguments_stand_behind_a_shell_command(command: str) -> None:
    program = program_of(job(command=command, args=["a b", "$HOME", "'", "-n"]))
    assert subprocess.run(program, capture_output=True, text=True, check=True).stdout == "<x><a b><$HOME><'><-n>"
