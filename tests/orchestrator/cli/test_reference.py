"""docs/reference/cli.md says what the commands take: no option more, none less."""

from __future__ import annotations

import re
from pathlib import Path

import click
import pytest

from orc.orchestrator.cli.main import COMMANDS, HIDDEN, load

PAGES = Path(__file__).parents[3] / "docs" / "reference"
REFERENCE = (PAGES / "cli.md").read_text(encoding="utf-8")
ALIAS = {"run": "launch"}  # has the options that the section of the other name tells
OWN_PAGE = {"launch": (PAGES / "launch.md").read_text(encoding="utf-8")}  # beside its section: its many flags
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
