"""The documentation: links lead somewhere, commands exist, examples parse."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
import yaml

from orc.launchers.spec import load_job
from orc.orchestrator.cli.main import COMMANDS

ROOT = Path(__file__).parents[1]
PAGES = sorted(
    path
    for path in (*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "templates").rglob("*.md"))
    if path.is_file()
)
FENCE = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")

each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


def anchors(page: Path) -> set[str]:
    """The names of a page's headings, as the usual renderers make them."""
    headings = re.findall(r"^#+ (.*)$", FENCE.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


@each_page
def test_relative_links_lead_somewhere(page: Path) -> None:
    for link in LINK.findall(FENCE.sub("", page.read_text())):
        if "://" in link or link.startswith("mailto:"):
            continue
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        assert target.exists(), f"{page}: {link}"
        if anchor and target.suffix == ".md":
            assert anchor in anchors(target), f"{page}: {link}"


@each_page
def test_examples_parse(page: Path) -> None:
    for language, text in FENCE.findall(page.read_text()):
        if language in ("yaml", "yml"):
            list(yaml.safe_load_all(text))
        elif language in ("python", "py"):
            ast.parse(text)


@each_page
def test_commands_in_examples_exist(page: Path) -> None:
    known = {*COMMANDS, "--help", "--version"}
    for language, text in FENCE.findall(page.read_text()):
        if language in ("sh", "bash", "console", "shell"):
            for command in re.findall(r"^(?:\$ )?orc ([\w-]+)", text, re.MULTILINE):
                assert command in known, f"{page}: orc {command}"


def test_make_targets_in_the_documentation_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = {
        word
        for page in PAGES
        for words in re.findall(r"(?:`|^)make ((?:[a-z-]+ ?)+)(?:`|$| )", page.read_text(), re.MULTILINE)
        for word in words.split()
    }
    assert named
    assert named <= targets


# Keys that stand for themselves in a table: `resources: {nodes: 2}`.
JOB_SNIPPET = re.compile(
    r"`((?:args|checkpoint|command|env|environment|launcher|module|resources|retry|script|setup): [^`…]+)`"
)


@pytest.mark.parametrize("page", ["coming-from"])
def test_job_keys_that_tables_name_are_valid(page: str, tmp_path: Path) -> None:
    snippets = JOB_SNIPPET.findall((ROOT / "docs/how-to" / f"{page}.md").read_text())
    assert len(snippets) > 10
    (tmp_path / "train.py").touch()
    for number, snippet in enumerate(snippets):
        program = "" if re.match("script|module|command", snippet) else "script: train.py\n"
        file = tmp_path / f"job-{number}.yaml"
        file.write_text(f"name: snippet\n{program}{snippet}\n")
        load_job(file)
