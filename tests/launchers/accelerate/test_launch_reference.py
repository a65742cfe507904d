"""docs/reference/launch.md: its tables are those of the code, and its examples run."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from orc.launchers.accelerate.keys import GROUPS, OPTIONS, Option, of_group

PAGE = Path(__file__).parents[3] / "docs/reference/launch.md"
EFFECTS = {"done": "", "ignored": "No effect. ", "job": "For jobs: ", "refused": "Refused: "}


def row(one: Option) -> str:
    """The row of one flag."""
    flags = ", ".join(f"`{flag}`" for flag in one.flags)
    choices = f" ({', '.join(f'`{choice}`' for choice in one.choices)})" if one.choices else ""
    does = EFFECTS[one.effect] + one.does.rstrip(".")
    job = f"`{one.job}`" if one.job else ""
    return f"| {flags} | {one.doc.rstrip('.')}{choices} | {does} | {job} |"


def flag_tables() -> Iterator[str]:
    """The tables of all groups."""
    for group, title in GROUPS.items():
        if rows := [row(one) for one in of_group(group) if one.flags]:
            yield f"### {title}\n\n| flag | documented meaning | here | in a job file |\n|---|---|---|---|\n"
            yield "\n".join(rows) + "\n\n"


def variable_table() -> str:
    """The table of variables that the script sees."""
    rows = [
        f"| `{one.variable}` | `{one.flag}` |"
        for one in OPTIONS.values()
        if one.variable and one.flags and one.effect == "done"
    ]
    return "| variable | set by |\n|---|---|\n" + "\n".join(rows) + "\n"


def test_the_tables_are_those_of_the_code() -> None:
    page = PAGE.read_text()
    assert "".join(flag_tables()).rstrip() in page
    assert variable_table() in page


def test_the_examples_run_as_shown(tmp_path: Path) -> None:
    page = PAGE.read_text()
    files = re.findall(r"^`([\w.]+)`:\n\n```\w+\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    for name, text in files:
        (tmp_path / name).write_text(text)
    blocks = re.findall(r"^```console\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    runs = [run for block in blocks for run in re.findall(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", block, re.MULTILINE)]
    assert len(runs) >= 4
    environment = {
        **os.environ,
        "HF_HOME": str(tmp_path),
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }
    for line, shown in runs:
        words = shlex.split(line)
        done = subprocess.run(words, capture_output=True, text=True, cwd=tmp_path, env=environment, timeout=60)
        assert sorted((done.stdout + done.stderr).splitlines()) == sorted(shown.splitlines()), line


if __name__ == "__main__":
    print("".join(flag_tables()) + "\n=====\n" + variable_table())
