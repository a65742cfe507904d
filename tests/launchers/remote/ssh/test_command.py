"""Command lines that any login shell reads alike."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from orc.launchers.remote.ssh.command import any_shell, command_line, marks

WORDS = ("a b", "", "$HOME", "`id`", "'\"", "a\nb\n", "!!", "*", "\\", "\\n", "-n;", "ünïcode", "%s", "~")


@pytest.mark.parametrize(
    "shell", [name for name in ("sh", "bash", "dash", "tcsh", "fish", "zsh") if shutil.which(name)]
)
def test_a_shell_passes_every_word_on(shell: str) -> None:
    line = command_line(("printf", "<%s>", *WORDS), "token", {"NAME": "x y\n!"})
    done = subprocess.run([shell, "-c", line], capture_output=True, text=True, timeout=60)
    assert done.stdout.split(":\n", 1)[1] == "".join(f"<{word}>" for word in WORDS)


def test_no_line_has_what_csh_or_fish_read_otherwise() -> None:
    """csh ends a quoted text at a newline and expands exclamation marks in it; fish reads backslashes."""
    line = any_shell(("printf", "a\nb", "c!", "\\d"))
    assert not {"\n", "!"} & set(line)
    assert line.count("\\") == line.count("\\0")


def test_the_marks_stand_around_the_output_and_not_in_what_a_shell_shows() -> None:
    line = command_line(("sh", "-c", "echo out; echo err >&2; kill -9 $$"), "token", {}, mark_end=True)
    done = subprocess.run(["bash", "-xc", line], capture_output=True, timeout=60)
    assert done.returncode == 137
    start, pid, status, out, *_ = marks("token").split(done.stdout)
    assert (start, status, out) == (b"", b"0", b"out\n")
    assert len(marks("token").findall(done.stderr)) == 2
    assert int(pid) > 1


@pytest.mark.parametrize(("program", "status"), [("no-such-program", 127), ("/etc/passwd", 126)])
def test_a_program_that_cannot_be_started_is_told_from_one_that_fails(program: str, status: int) -> None:
    done = subprocess.run(["sh", "-c", command_line((program,), "token", {})], capture_output=True, timeout=60)
    found = marks("token").search(done.stdout)
    assert found is not None
    assert int(found[2]) == done.returncode == status


def test_variables_are_dropped_by_their_beginning_but_for_those_that_are_kept() -> None:
    line = command_line(("env",), "token", {"A_NEW": "1"}, ("A_", "B_"), ("B_KEPT",))
    env = {**os.environ, "A_GONE": "x", "B_GONE": "y\nB_KEPT=no", "B_KEPT": "kept"}
    said = subprocess.run(["sh", "-c", line], capture_output=True, text=True, env=env, timeout=60).stdout.splitlines()
    assert sorted(word for word in said if word.startswith(("A_", "B_"))) == ["A_NEW=1", "B_KEPT=kept"]


def test_as_root_a_command_leads_a_session_of_its_own(tmp_path: Path) -> None:
    """A double of sudo, which starts a child as the real one does and knows the flags that are used."""
    sudo = tmp_path / "sudo"
    sudo.write_text('#!/bin/sh\n[ "$1 $2" = "-n -H" ] || exit 9\nshift 2\n"$@"\n')
    sudo.chmod(0o755)
    line = command_line(("sh", "-c", "ps -o pgid= -p $$; echo $ORC_SSH_COMMAND; cat; exit 3"), "token", {}, sudo=True)
    env = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(["sh", "-c", line], capture_output=True, text=True, input="in\n", env=env, timeout=60)
    mark = marks("token").search(done.stdout.encode())
    assert mark is not None
    group = mark[1].decode()
    assert done.stdout[mark.end() :].split() == [group, f"token-{group}", "in"]
    assert done.returncode == 3
