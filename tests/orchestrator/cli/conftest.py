"""Running `orc` in this process (fast) or in one of its own (start-up, signals, pipes)."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from orc.orchestrator.cli.main import main

HELLO = """\
name: hello
command: [/bin/sh, -c, 'echo hello from $RANK; echo said to stderr >&2']
launcher: python
"""


@dataclass(frozen=True)
class Result:
    """How one command ended."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """The whole output as one JSON document that is no error."""
        value = json.loads(self.out)
        assert "error" not in value, value
        return value

    @property
    def error(self) -> dict[str, Any]:
        """The error that was printed as JSON."""
        value = json.loads(self.out)["error"]
        assert value["exit_code"] == self.code
        assert isinstance(value, dict)
        return value


Run = Callable[..., Result]


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty current directory."""
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    return work


@pytest.fixture
def orc(place: Path, capfd: pytest.CaptureFixture[str]) -> Run:
    """`orc ARGS...` in this process."""

    def run(*arguments: str) -> Result:
        capfd.readouterr()
        code = main(arguments)
        out, err = capfd.readouterr()
        return Result(code, out, err)

    return run


@pytest.fixture
def orc_process(place: Path) -> Run:
    """`orc ARGS...` in a process of its own; keyword arguments go to `subprocess.run`."""

    def run(*arguments: str, **options: Any) -> Result:
        done = subprocess.run(
            [sys.executable, "-m", "orc.orchestrator.cli.main", *arguments],
            capture_output=True,
            text=True,
            **options,
        )
        return Result(done.returncode, done.stdout, done.stderr)

    return run


@pytest.fixture
def job_file(place: Path) -> Callable[[str], str]:
    """Write a job file into a directory of its own and return its path."""

    def write(text: str = HELLO, name: str = "job.yaml") -> str:
        folder = place / "job"
        folder.mkdir(exist_ok=True)
        (folder / name).write_text(text)
        return str(folder / name)

    return write


def tree(folder: Path) -> dict[str, bytes | None]:
    """Every file below *folder* with its content, directories with `None`; empty when there is no folder."""
    return {str(p.relative_to(folder)): None if p.is_dir() else p.read_bytes() for p in sorted(folder.rglob("*"))}
