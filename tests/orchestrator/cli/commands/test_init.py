"""`orc init`."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

from orc.launchers.spec.json_schema import job_schema
from orc.orchestrator.cli.commands import init
from orc.orchestrator.cli.commands.init import starters

from ..conftest import Run, tree


def test_without_arguments_it_lists_the_starters(orc: Run) -> None:
    result = orc("init")
    assert result.code == 0
    for name in ("digits", "char-gpt", "hello"):
        assert name in result.out
    assert result.out.index("To begin with:") < result.out.index("hello") < result.out.index("One feature each:")
    assert orc("init", "--list").out == result.out
    described = orc("init", "--json").json["starters"]
    assert {s["name"] for s in described} == set(starters())
    assert all(s["description"] and s["group"] and re.fullmatch(r"\d+ s", s["takes"]) for s in described)
    needs = {s["name"]: s["needs"] for s in described}
    assert needs["hello"] == []
    assert needs["digits"] == ["torch", "scikit-learn"]
    assert needs["slurm"] == ["torch", "scikit-learn", "a slurm cluster"]
    (row,) = [line for line in result.out.splitlines() if line.startswith("digits ")]
    assert re.fullmatch(r"digits +10 s +torch, scikit-learn +Handwritten digits, .+", row)
    shipped = next(iter(starters().values())).parent.rglob("job.yaml")
    assert {path.parent.name for path in shipped} == set(starters())


def test_it_copies_all_files_of_a_starter(orc: Run, place: Path) -> None:
    result = orc("init", "digits", "--json")
    assert result.code == 0
    assert set(result.json["files"]) >= {"job.yaml", "train.py"}
    source = {k: v for k, v in tree(starters()["digits"]).items() if "__pycache__" not in k}
    copied = tree(place / "digits")
    assert json.loads(copied.pop("job.schema.json") or b"") == job_schema()
    first, named, rest = (copied["job.yaml"] or b"").split(b"\n", 2)
    assert named == b"# yaml-language-server: $schema=job.schema.json"
    assert copied | {"job.yaml": first + b"\n" + rest} == source


def test_its_last_line_is_the_next_two_commands(orc: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(init, "packages", lambda folder: ["torch", "no-such-package"])
    wrote, missing, following = orc("init", "digits", "some where").out.splitlines()
    assert wrote.endswith(" to some where")
    assert missing == "not installed here: no-such-package; `pip install -r 'some where/requirements.txt'`"
    assert following == "next: cd 'some where' && orc submit job.yaml --follow"
    monkeypatch.setattr(init, "packages", lambda folder: ["torch"])
    assert orc("init", "ssh").out.splitlines()[1:] == ["next: cd ssh && ORC_CLUSTERS=clusters.yaml orc render job.yaml"]


def test_it_copies_into_a_named_directory(orc: Run, place: Path) -> None:
    assert orc("init", "hello", "some/where").code == 0
    assert (place / "some" / "where" / "job.yaml").is_file()


def test_it_overwrites_nothing(orc: Run, place: Path) -> None:
    (place / "hello").mkdir()
    (place / "hello" / "job.yaml").write_text("mine")
    before = tree(place)
    result = orc("init", "hello")
    assert result.code == 2
    assert "would overwrite job.yaml" in result.err
    assert tree(place) == before


def test_it_joins_files_that_are_there(orc: Run, place: Path) -> None:
    (place / "notes.txt").write_text("mine")
    assert orc("init", "hello", ".").code == 0
    assert (place / "notes.txt").read_text() == "mine"
    assert (place / "job.yaml").is_file()


def test_an_unknown_starter_is_refused_with_the_known_ones(orc: Run, place: Path) -> None:
    result = orc("init", "digit")
    assert result.code == 2
    assert "digits" in result.err
    assert tree(place) == {}


def test_a_failed_copy_leaves_nothing(orc: Run, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import shutil

    calls = []

    def full_disk(*_: object) -> None:
        calls.append(1)
        if len(calls) == 2:
            raise OSError(28, os.strerror(28))

    monkeypatch.setattr(shutil, "copyfileobj", full_disk)
    result = orc("init", "hello")
    assert result.code == 2
    assert "No space left on device" in result.err
    assert tree(place) == {}
