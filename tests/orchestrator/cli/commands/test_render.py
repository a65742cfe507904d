"""`orc render`: what is shown is what would be sent, and begins with lines that start the same ranks in a shell."""

from __future__ import annotations

import json
import shlex
import stat
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from ..conftest import Run, tree

JobFile = Callable[..., str]

SECRET = """\
name: hush
command: 'true'
launcher: python
secrets: [TOKEN]
env: {GREETING: "it's a \\"test\\""}
resources: {procs_per_node: 2}
"""


def test_text_shows_every_file_and_command(orc: Run, job_file: JobFile) -> None:
    path = job_file(SECRET)
    plan = orc("render", path, "--json").json
    shown = orc("render", path).out
    for file in plan["files"]:
        assert file["content"].rstrip("\n") in shown
        assert f"{file['path']} (mode {file['mode']})" in shown
    for command in plan["commands"]:
        for word in command["argv"]:
            assert word in shown
    assert plan["digest"] in shown


def test_json_is_the_plan_and_the_same_every_time(orc: Run, job_file: JobFile) -> None:
    path = job_file(SECRET)
    plan = orc("render", path, "--json").json
    assert plan == orc("render", path, "--format", "json").json
    assert plan["marker"] == "orc-hush-000000-a1"
    assert plan["cluster"] == plan["backend"] == "local"
    assert plan["env"]["GREETING"] == 'it\'s a "test"'
    assert set(plan["trees"]) == {"code", "runtime"}


def test_values_of_secrets_are_not_shown(orc: Run, job_file: JobFile, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKEN", "hunter2")
    for form in ("text", "json"):
        shown = orc("render", job_file(SECRET), "--format", form).out
        assert "TOKEN" in shown
        assert "hunter2" not in shown


def test_dir_writes_files_and_commands(orc: Run, job_file: JobFile, place: Path) -> None:
    path = job_file(SECRET)
    plan = orc("render", path, "--json").json
    assert orc("render", path, "--format", "dir", "--output", "plan").code == 0
    written = place / "plan"
    assert json.loads((written / "plan.json").read_text()) == plan
    for file in plan["files"]:
        copy = written / "files" / file["path"].lstrip("/")
        assert copy.read_text() == file["content"]
        assert stat.S_IMODE(copy.stat().st_mode) == int(file["mode"], 8)
    assert (written / "commands.sh").read_text().startswith("#!/bin/sh\nset -e\n")
    assert orc("render", path, "--format", "dir", "-o", "other", "--json").json["directory"] == str(place / "other")


def test_dir_overwrites_nothing_and_needs_a_place(orc: Run, job_file: JobFile, place: Path) -> None:
    path = job_file(SECRET)
    (place / "plan").mkdir()
    (place / "plan" / "mine").write_text("mine")
    before = tree(place)
    assert orc("render", path, "--format", "dir", "--output", "plan").code == 2
    assert tree(place) == before
    assert orc("render", path, "--format", "dir").code == 2
    assert orc("render", path, "--output", "plan").code == 2


def test_it_leaves_no_trace(orc: Run, job_file: JobFile, orc_home: Path) -> None:
    assert orc("render", job_file()).code == 0
    assert not orc_home.exists()


def test_overrides_and_another_cluster_are_taken(
    orc: Run, job_file: JobFile, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clusters = place / "clusters.yaml"
    clusters.write_text(f"other: {{kind: local, root: {place}/other, env: {{PLACE: there}}}}\n")
    monkeypatch.setenv("ORC_CLUSTERS", str(clusters))
    overrides = ("--set", "name=renamed", "--set", "env.X=1")
    plan = orc("render", job_file(), "--cluster", "other", *overrides, "--json").json
    assert plan["cluster"] == "other"
    assert plan["marker"] == "orc-renamed-000000-a1"
    assert plan["env"]["X"] == "1"
    assert plan["env"]["PLACE"] == "there"
    assert all(file["path"].startswith(f"{place}/other/") for file in plan["files"])


def test_a_submission_sends_what_was_rendered(orc: Run, job_file: JobFile) -> None:
    path = job_file()
    (shown,) = orc("render", path, "--json").json["files"]
    job = orc("submit", path, "--follow", "--json").json["id"]
    sent = Path(shown["path"].replace("hello-000000", job))
    assert sent.read_text() == shown["content"].replace("hello-000000", job)


def test_warnings_about_the_snapshot_go_to_stderr(orc: Run, job_file: JobFile) -> None:
    path = job_file()
    Path(path).with_name("link").symlink_to("nowhere")
    result = orc("render", path, "--json")
    assert result.json["marker"]
    assert result.err.startswith("warning: ")
    assert "link" in result.err


RANKS = """\
name: pasted
command: [/bin/sh, -c, 'echo "$1 $GREETING rank $RANK of $WORLD_SIZE in $(basename "$PWD")"', sh, "it's {python}"]
launcher: python
secrets: [TOKEN]
setup: [echo prepared]
env: {GREETING: "a \\"{nnodes}\\" $x"}
resources: {procs_per_node: 2}
"""
TORCHRUN = "{name: t, script: t.py, args: {lr: 0.1, note: it's}, resources: {nodes: 3, procs_per_node: 2}}"


def test_the_lines_start_the_ranks_in_a_shell(orc: Run, job_file: JobFile) -> None:
    shown = orc("render", job_file(RANKS)).out
    (line,) = orc("render", job_file(RANKS), "--json").json["command_lines"]
    assert shown.startswith("# what runs on node 0 of 1\n")
    assert "# first export the secrets: TOKEN\n" in shown
    assert line["command"] in shown
    done = subprocess.run(["/bin/sh", "-c", line["command"]], capture_output=True, text=True, check=True)
    ranks = [f'it\'s {{python}} a "{{nnodes}}" $x rank {rank} of 2 in job' for rank in range(2)]
    assert sorted(done.stdout.splitlines()) == [*ranks, "prepared"]


def test_each_node_has_its_own_torchrun_that_knows_what_is_known(orc: Run, job_file: JobFile, place: Path) -> None:
    path = job_file(TORCHRUN)
    (place / "job" / "t.py").touch()
    lines = orc("render", path, "--json").json["command_lines"]
    assert [line["node"] for line in lines] == [0, 1, 2]
    for line in lines:
        directory, command = line["command"].split("\n", 1)
        words = shlex.split(command)
        assert directory == f"cd {place}/job"
        assert {"--nnodes=3", f"--node-rank={line['node']}", "--nproc-per-node=2"} <= set(words)
        assert words[-5:] == ["t.py", "--lr", "0.1", "--note", "it's"]
        assert '--master-addr="$MASTER_ADDR"' in command
        assert "first set MASTER_ADDR: the address of node 0" in line["notes"]


def test_of_many_nodes_the_first_ones_are_shown(orc: Run, job_file: JobFile, place: Path) -> None:
    path = job_file(TORCHRUN)
    (place / "job" / "t.py").touch()
    shown = orc("render", path, "--set", "resources.nodes=64").out
    assert "# what runs on node 3 of 64\n" in shown
    assert "# what runs on node 4 of 64" not in shown
    assert "# nodes 4 to 63: the same with their own numbers\n" in shown


def test_hosts_are_named_and_their_addresses_filled_in(
    orc: Run, job_file: JobFile, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clusters = place / "clusters.yaml"
    clusters.write_text(
        "lab: {kind: ssh, root: /data/orc, python: /opt/py, options: {hosts: [{name: a, address: 10.0.0.1},"
        " {name: b, address: 10.0.0.2}]}}\n"
    )
    path = job_file(TORCHRUN)
    (place / "job" / "t.py").touch()
    monkeypatch.setenv("ORC_CLUSTERS", str(clusters))
    lines = orc("render", path, "--cluster", "lab", "--set", "resources.nodes=2", "--json").json["command_lines"]
    assert [line["host"] for line in lines] == ["a", "b"]
    assert all("--master-addr=10.0.0.1 " in line["command"] for line in lines)
    assert all("/opt/py -m torch.distributed.run " in line["command"] for line in lines)


def test_a_launcher_of_node_0_alone_is_shown_once(orc: Run, job_file: JobFile, place: Path) -> None:
    path = job_file("{name: t, script: t.py, launcher: mpirun, resources: {nodes: 2}}")
    (place / "job" / "t.py").touch()
    (line,) = orc("render", path, "--json").json["command_lines"]
    assert "first write $ORC_ATTEMPT_DIR/hostfile: node-0 slots=1; node-1 slots=1" in line["notes"]
    assert "exec mpirun " in line["command"]
