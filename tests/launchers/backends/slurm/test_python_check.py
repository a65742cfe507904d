"""The Python of a Slurm cluster, as `orc clusters check` and `discover` look at it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from orc.launchers.backends.slurm.discovery import _PROBE
from orc.launchers.backends.slurm.preflight import _short, check_python
from orc.launchers.remote.transport import LocalTransport


def program(path: Path, text: str) -> str:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize(
    ("text", "level", "said"),
    [
        (None, "error", "cannot be started"),
        ("exit 3", "error", "cannot be started: exit status 3"),
        ("echo 3.9 torch", "error", "is Python 3.9; ranks need 3.10 or newer"),
        ("echo 3.12 -", "warning", "has no torch"),
        ("echo 3.12 torch", None, ""),
    ],
)
def test_a_python_is_tried_not_believed(tmp_path: Path, text: str | None, level: str | None, said: str) -> None:
    python = str(tmp_path / "python") if text is None else program(tmp_path / "python", text)
    found = check_python(LocalTransport(), python, (), "hpc")
    assert [finding.level for finding in found] == ([level] if level else [])
    assert all(said in finding.what and python in finding.what for finding in found)


def test_the_real_one_is_asked_what_it_is() -> None:
    assert check_python(LocalTransport(), sys.executable, (), "hpc") == []


@pytest.mark.parametrize(("time", "warned"), [("60", True), ("10m", False), (None, False)])
def test_a_time_limit_that_is_mostly_grace_is_warned_about(plan_of, time: str | None, warned: bool) -> None:
    plan = plan_of(resources={"time": time} if time else {})
    said = [finding.what for finding in _short(plan, "hpc")]
    assert said == (["of a time limit of 0:01:00 the ranks get 0:00:30; the rest is kept for their end"] * warned)


def test_discovery_prefers_the_python_that_has_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    for name in ("python3", "python3.14", "python3.13", "python3.12", "python3.11", "python3.10", "python3.9"):
        program(tmp_path / name, 'case "$2" in *torch*) exit 1;; esac')
    with_torch = program(tmp_path / "python3.12", ":")

    def probe() -> list[str]:
        return LocalTransport().run(("/bin/sh", "-c", _PROBE), timeout_s=60).stdout.split("\n")[1:3]

    assert probe() == [with_torch, "torch"]
    program(tmp_path / "python3.12", "exit 1")
    assert probe() == [str(tmp_path / "python3"), ""]
