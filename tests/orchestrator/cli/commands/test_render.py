"""`orc render`: what is shown is what would be sent."""

from __future__ import annotations

import json
import stat
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
