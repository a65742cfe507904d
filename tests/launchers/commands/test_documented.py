"""The reference page: every option has its row, and every example is a job that renders."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest
import yaml

from orc.launchers.commands import build_command
from orc.launchers.plugins import COMMANDS
from orc.launchers.spec import JobSpec

PAGE = (Path(__file__).parents[3] / "docs" / "reference" / "commands.md").read_text()
SECTIONS = dict(re.findall(r"^## (\w+)\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL))
EXAMPLES = re.findall(r"^```yaml\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)


def test_every_command_has_a_section() -> None:
    assert set(COMMANDS.kinds()) <= set(SECTIONS)


@pytest.mark.parametrize("kind", COMMANDS.kinds())
def test_every_option_has_a_row_and_every_row_an_option(kind: str) -> None:
    options = getattr(importlib.import_module(f"orc.launchers.commands.{kind}"), "OPTIONS", {})
    cells = re.findall(r"^\| (`[a-z_`, ]+) \|", SECTIONS[kind], re.MULTILINE)
    assert {name for cell in cells for name in re.findall(r"`(\w+)`", cell)} == set(options)


@pytest.mark.parametrize("text", EXAMPLES)
def test_examples_render(text: str) -> None:
    assert "launcher" in yaml.safe_load(text)
    job = JobSpec.model_validate({"name": "example", "script": "train.py", **yaml.safe_load(text)})
    assert build_command(job).program == ("{python}", "train.py") or job.launcher.options.get("launcher") == "pdsh"
