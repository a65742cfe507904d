"""The reference, the tutorials and the how-to pages about several jobs say what happens."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace

import click
import pytest
from executed_page import ExecutedPage

from orc.launchers.spec.groups import LoadedGroup, load_jobs
from orc.orchestrator.cli.commands import groups
from orc.orchestrator.cli.main import COMMANDS, HIDDEN, load

PAGES = Path(__file__).parents[3] / "docs" / "how-to"


def blocks(page: str, language: str) -> list[str]:
    text = (PAGES / f"{page}.md").read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def write(name: str, text: str) -> None:
    Path(name).write_text(text)
    Path("train.py").touch()


@pytest.mark.parametrize(("page", "sizes"), [("sweeps", [4, 2, 20]), ("pipelines", [4])])
def test_each_example_is_a_group(place: Path, page: str, sizes: list[int]) -> None:
    found = []
    for text in blocks(page, "yaml"):
        write("job.yaml", text)
        loaded = load_jobs("job.yaml")
        assert isinstance(loaded, LoadedGroup)
        found.append(len(loaded.members))
    assert found == sizes


@pytest.mark.parametrize(("page", "file"), [("sweeps", "job.yaml"), ("pipelines", "pipeline.yaml")])
def test_the_preview_is_the_one_that_is_shown(orc, place: Path, page: str, file: str) -> None:
    write(file, blocks(page, "yaml")[0])
    (shown,) = blocks(page, "console")
    command, _, expected = shown.partition("\n")
    assert command == f"$ orc render {file}"
    assert orc("render", file).out == expected


def test_the_sweep_runs_and_is_looked_at(orc, place: Path) -> None:
    write("job.yaml", blocks("sweeps", "yaml")[0])
    group = orc("submit", "job.yaml", "--no-reconciler").out.strip()
    assert orc("wait", group, "--timeout", "240").code == 0
    shown = orc("sweep", "status").out.splitlines()
    assert shown[0] == f"sweep {group}: 4 jobs, 2 at a time; 4 SUCCEEDED"
    assert [line.split()[:4] for line in shown[2:]] == [
        [str(number), lr, seed, "SUCCEEDED"]
        for number, (lr, seed) in enumerate([("1e-4", "1"), ("1e-4", "2"), ("1e-3", "1"), ("1e-3", "2")])
    ]
    assert len(orc("list", "--group", group, "-o", "name").out.split()) == 4
    assert len(orc("list", "--tag", "args.lr=1e-4", "-o", "name").out.split()) == 2
    refused = orc("sweep", "retry")
    assert refused.code != 0
    assert f"no member of {group} has failed" in refused.err


def test_the_commands_of_the_schedule_work(orc, place: Path) -> None:
    import shlex

    write("job.yaml", "name: digits\nscript: train.py\n")
    (text,) = blocks("schedules", "sh")
    for line in text.splitlines():
        done = orc(*shlex.split(line)[1:])
        assert done.code == 0, done.err
        if "list" in line:
            assert "Europe/Berlin" in done.out
            assert "nightly" in done.out
    assert "nightly" not in orc("schedule", "list").out


def test_a_group_of_which_a_part_is_refused_says_the_first_refusal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    states = [("t-aaaaaa", "PENDING", ""), ("t-bbbbbb", "FAILED", "too many jobs"), ("t-cccccc", "FAILED", "too many")]
    members = [SimpleNamespace(job=SimpleNamespace(id=i, state=state, reason=why)) for i, state, why in states]
    view = SimpleNamespace(id="sweep-1", kind="sweep", max_parallel=None, members=members, counts={"FAILED": 2})
    client = SimpleNamespace(submit_group=lambda _, on_progress: view)
    monkeypatch.setattr(groups, "open_client", lambda reconciler: client)
    assert groups.submit_group(None, reconciler=False, yes=True, as_json=False) != 0
    assert "\nt-bbbbbb FAILED: too many jobs\n" in capsys.readouterr().err


REFERENCE_PAGES = Path(__file__).parents[3] / "docs" / "reference"
REFERENCE = (REFERENCE_PAGES / "cli.md").read_text(encoding="utf-8")
ALIAS = {"run": "launch"}  # has the options that the section of the other name tells
OWN_PAGE = {"launch": (REFERENCE_PAGES / "launch.md").read_text(encoding="utf-8")}  # beside its section: its many flags
SHARED = {"submit": set(), "resubmit": {"--follow", "--rank", "--all-ranks", "--reconciler", "--no-reconciler"}}


def _section(name: str) -> str:
    name = ALIAS.get(name, name)
    (section,) = re.findall(rf"^### `orc {name}\b.*?(?=^##|\Z)", REFERENCE, re.MULTILINE | re.DOTALL)
    return section


@pytest.mark.parametrize("name", [name for name in COMMANDS if name not in HIDDEN])
def test_the_reference_names_every_option(name: str) -> None:
    command = load(name)
    below = list(command.commands.values()) if isinstance(command, click.Group) else []
    options = [p for each in (command, *below) for p in each.params if isinstance(p, click.Option)]
    taken = {text.replace("_", "-") for option in options for text in (*option.opts, *option.secondary_opts)} - {
        "--json"
    }
    section = _section(name)
    page = re.sub(r"(?<=[a-z0-9])_(?=[a-z0-9])", "-", OWN_PAGE.get(ALIAS.get(name, name), ""))
    named = set(re.findall(r"`(--?[a-z][a-z0-9-]*)", section + page))
    assert {t for t in taken if t.startswith("--")} - SHARED.get(name, set()) <= named
    shown = set(re.findall(r"^\| `(--?[a-z][a-z0-9-]*)|^\| `-.`, `(--[a-z0-9-]+)", section, re.MULTILINE))
    assert {text for pair in shown for text in pair if text} <= taken


TUTORIALS = Path(__file__).parents[3] / "docs/tutorials"


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("name", ["your-own-script", "laptop-to-slurm"])
def test_the_tutorial_works(name: str, tmp_path: Path, orc_home: Path) -> None:
    page = ExecutedPage((TUTORIALS / f"{name}.md").read_text(), tmp_path)
    page.write_files(orc_home / "config")
    for block in page.commands:
        page.run(block)
    page.check()
