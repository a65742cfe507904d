"""What a person sees: on a real (pseudo) terminal, and in a log file."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from orc.orchestrator.cli.display import Display, describe, display

JobFile = Callable[..., str]

WAITS = "name: slow\ncommand: echo first; while [ ! -e {go} ]; do sleep 0.05; done; echo last\nlauncher: python\n"


def _on_a_terminal(*arguments: str, once_said: str = "", go: Path | None = None) -> tuple[int, str]:
    """`orc ARGS` with stdout and stderr on one terminal; its exit status and everything it wrote.

    The file *go* is made when it has written *once_said*.
    """
    leader, follower = pty.openpty()
    command = [sys.executable, "-m", "orc.orchestrator.cli.main", *arguments]
    env = {**os.environ, "TERM": "xterm-256color"}
    env.pop("NO_COLOR", None)
    process = subprocess.Popen(command, stdin=follower, stdout=follower, stderr=follower, env=env)
    os.close(follower)
    written = b""
    while True:
        try:
            data = os.read(leader, 65536)
        except OSError:  # Linux says EIO when the other side is closed
            break
        if not data:
            break
        written += data
        if go is not None and once_said.encode() in written:
            go.touch()
    os.close(leader)
    return process.wait(timeout=60), written.decode()


def test_following_shows_the_state_in_a_line_that_comes_and_goes(job_file: JobFile, place: Path) -> None:
    go = place / "go"
    code, written = _on_a_terminal("submit", job_file(WAITS.format(go=go)), "--follow", once_said="RUNNING", go=go)
    assert code == 0
    assert "\x1b[2K" in written or "\r" in written
    # The lines of the job stand alone: nothing of the live line is left on them.
    lines = [line.rpartition("\x1b[2K")[2].strip() for line in written.split("\n")]
    assert "first" in lines
    assert "last" in lines
    assert "\x1b[32mSUCCEEDED" in written


def test_errors_are_coloured_on_a_terminal_only(job_file: JobFile) -> None:
    assert "\x1b[31m" in _on_a_terminal("status", "nothing")[1]


def test_without_a_terminal_each_step_is_one_plain_line(capsys: pytest.CaptureFixture[str]) -> None:
    with display() as shown:
        assert type(shown) is Display
        for detail in ("10%", "50%"):
            shown.show("uploading", detail)
        shown.show("submitting")
    assert capsys.readouterr().err == "uploading\nsubmitting\n"


def test_json_is_accompanied_by_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with display(silent=True) as shown:
        shown.show("uploading")
    assert capsys.readouterr() == ("", "")


def test_steps_of_a_submission_are_described() -> None:
    assert describe("snapshot", {"done": 500_000, "bytes": 2_000_000}) == (
        "taking a snapshot",
        "500.0 kB of 2.0 MB (25%)",
    )
    assert describe("scan", {"files": 3, "bytes": 10}) == ("scanned", "3 files, 10 B")
    assert describe("stage", {}) == ("uploading", "")
