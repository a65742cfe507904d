"""`orc submit SCRIPT.py`: an ordinary script, without a job file."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from orc.launchers.spec import load_job
from orc.orchestrator.cli.commands.submit import _yaml_list

from ..conftest import Run

SCRIPT = """\
import os, sys
from helper import shout
print(shout(f"rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']}"), sys.argv[1:])
"""


@pytest.fixture
def script(place: Path) -> Path:
    """An ordinary script beside a module that it imports, which is the current directory."""
    (place / "helper.py").write_text("shout = str.upper\n")
    (place / "train.py").write_text(SCRIPT)
    return place / "train.py"


@pytest.mark.usefixtures("script")
def test_an_ordinary_script_runs_as_it_is_with_its_arguments(orc: Run) -> None:
    done = orc(
        "submit", "train.py", "--nodes", "2", "--follow", "--all-ranks", "--", "--lr", "0.1", "a b", "--", "--json"
    )
    assert done.code == 0, done.err
    words = "['--lr', '0.1', 'a b', '--', '--json']"
    assert sorted(done.out.splitlines()) == [f"[rank {rank}] RANK {rank} OF 2 {words}" for rank in (0, 1)]


@pytest.mark.usefixtures("script")
def test_a_dry_run_shows_the_job_file_and_save_keeps_it(orc: Run, place: Path) -> None:
    options = ("--nodes", "2", "-n", "1", "--set", "env.A=on", "--dry-run")
    shown = orc("submit", "train.py", *options, "--save", "job.yaml", "--", "--lr", "0.1")
    assert shown.code == 0, shown.err
    text = (place / "job.yaml").read_text()
    assert shown.out.startswith(text)
    assert "train.py --lr 0.1" in shown.out.removeprefix(text)
    assert yaml.safe_load(text) == {
        "name": "train",
        "script": "train.py",
        "env": {"A": "on"},
        "resources": {"nodes": 2, "procs_per_node": 1},
        "args": ["--lr", "0.1"],
    }
    assert orc("submit", "train.py", *options, "--", "--lr", "0.1").out == shown.out
    assert orc("list").err.endswith("no jobs\n")
    assert orc("submit", "job.yaml", "--dry-run", "--json").json["digest"]


@pytest.mark.usefixtures("script")
def test_a_job_file_that_is_kept_elsewhere_sends_the_same_code(orc: Run, place: Path) -> None:
    (place / "jobs").mkdir()
    assert orc("submit", "train.py", "--save", "jobs/train.yaml", "--dry-run").code == 0
    done = orc("submit", "jobs/train.yaml", "--follow")
    assert (done.code, done.out) == (0, "RANK 0 OF 1 []\n")
    again = orc("submit", "train.py", "--save", "jobs/train.yaml", "--", "--other")
    assert (again.code, "cannot write the job file: File exists" in again.err) == (2, True)
    assert len(orc("list", "--json").json["jobs"]) == 1  # what could not be kept was not sent


@pytest.mark.usefixtures("script")
def test_what_a_dry_run_has_kept_is_sent_by_the_same_command_without_it(orc: Run, place: Path) -> None:
    assert orc("submit", "train.py", "--save", "job.yaml", "--dry-run").code == 0
    text = (place / "job.yaml").read_text()
    done = orc("submit", "train.py", "--save", "job.yaml", "--follow")
    assert (done.code, done.out) == (0, "RANK 0 OF 1 []\n"), done.err
    assert (place / "job.yaml").read_text() == text


@pytest.mark.usefixtures("script")
@pytest.mark.parametrize(
    ("arguments", "lines"),
    [
        (
            ("trian.py",),
            ["script: there is no file 'trian.py' in {place}, did you mean 'train.py'?", "where: trian.py"],
        ),
        (("train.py", "--nodes", "0"), ["resources.nodes: a job needs at least 1 node, not 0", "where: --nodes 0"]),
        (("train.py", "--gpus", "x"), ["resources.gpus_per_node: expected a whole number", "where: --gpus x"]),
        (("train.py", "--cluster", "lba"), ["unknown cluster 'lba'", "where: --cluster lba"]),
        (("train.py", "--priority", "1", "-n", "x"), ["resources.procs_per_node: expected a", "where: --nproc x"]),
    ],
)
def test_what_is_wrong_names_the_option(orc: Run, place: Path, arguments: tuple[str, ...], lines: list[str]) -> None:
    done = orc("submit", *arguments)
    assert done.code == 2
    assert [line.format(place=place) for line in lines if line.format(place=place) not in done.err] == []


def test_only_the_job_file_of_a_script_is_kept(orc: Run, place: Path) -> None:
    (place / "job.yaml").write_text("name: x\ncommand: 'true'\n")
    done = orc("submit", "--save", "x.yaml")
    assert (done.code, "--save keeps the job file of a script" in done.err) == (2, True)


@pytest.mark.usefixtures("script")
@pytest.mark.parametrize(
    ("file", "workdir"), [("job.yaml", {"limit": "2GB"}), ("jobs/job.yaml", {"limit": "2GB", "path": ".."})]
)
def test_a_job_file_that_is_kept_has_the_other_keys_of_the_workdir(
    orc: Run, place: Path, file: str, workdir: dict[str, str]
) -> None:
    (place / "jobs").mkdir()
    done = orc("submit", "train.py", "--set", "workdir.limit=2GB", "--save", file, "--dry-run")
    assert done.code == 0, done.err
    assert yaml.safe_load((place / file).read_text())["workdir"] == workdir
    assert orc("render", file).code == 0


WORDS = ("\U0001f600", "\x85", "a\u2028b", "e\u0301", "\ufeff", "\n", "", "no", "1e-3", "0x1F", "~", "'\"\\", "# x")


@pytest.mark.usefixtures("script")
def test_any_text_is_an_argument_and_is_kept(orc: Run) -> None:
    words = [*WORDS, "long " * 100]
    shown = orc("submit", "train.py", "--save", "job.yaml", "--dry-run", "--json", "--", *words)
    assert shown.code == 0, shown.err
    assert load_job("job.yaml").spec.args == tuple(words)
    assert load_job("train.py", [f"args={_yaml_list(words)}"]).spec.args == tuple(words)


@pytest.mark.usefixtures("script")
@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("train.py --lr 0.1", "orc submit train.py -- --lr 0.1"),
        ("train.py --nodes 2 --lr=0.1 --yes", "orc submit train.py --nodes 2 -- --lr=0.1 --yes"),
        ("train.py -x1 -- more", "orc submit train.py -- -x1 more"),
    ],
)
def test_an_argument_of_the_script_among_the_options_is_told_its_place(orc: Run, words: str, line: str) -> None:
    done = orc("submit", *words.split())
    assert done.code == 2
    assert f"arguments of the script go after `--`: {line}\n" in done.err
    assert "behind" not in orc("submit", "--lr", "0.1", "train.py").err
