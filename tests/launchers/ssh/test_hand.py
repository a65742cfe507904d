"""Our end of the program on a host, where a real link could not be broken at the right moment."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from orc.launchers.ssh import hand
from orc.launchers.ssh.errors import LinkLost


class Silent:
    """A channel on which the host does not answer any more."""

    def __init__(self) -> None:
        self.closed = threading.Event()

    def settimeout(self, seconds: float) -> None:
        """As `paramiko.Channel`."""

    def exec_command(self, command: str) -> None:
        self.closed.wait(60)
        raise EOFError  # as paramiko does for a closed connection


def test_a_link_that_dies_before_the_program_starts_is_noticed() -> None:
    channel: Any = Silent()
    with pytest.raises(LinkLost, match="node1: no session was opened in time"):
        hand.Hand("node1", channel, None, 0.1, shut=channel.closed.set)
    assert channel.closed.is_set()


@pytest.mark.parametrize("python", [None, "python3", "~/a b/python"])
def test_any_login_shell_can_read_the_command(python: str | None) -> None:
    """csh ends a quoted text at a newline, and expands exclamation marks in it."""
    command = hand._command(python, 5.0)
    assert "\n" not in command
    assert "!" not in command


def test_the_program_is_read_to_the_byte_and_greets(tmp_path: Path) -> None:
    done = subprocess.run(
        ["/bin/sh", "-c", hand._command(sys.executable, 5.0)],
        input=b"".join(hand._pieces()),  # then the end of the input: nobody is there any more
        capture_output=True,
        timeout=60,
        cwd=tmp_path,
    )
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout.startswith(hand.MAGIC)
    assert b'"home"' in done.stdout


def frame(**header: Any) -> bytes:
    text = json.dumps(header).encode()
    return hand.LENGTHS.pack(len(text), 0) + text


def left(word: str) -> list[int]:
    """Processes that have *word* among their arguments."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            if word.encode() in entry.read_bytes().split(b"\0"):
                found.append(int(entry.parent.name))
    return found


@pytest.mark.parametrize("killed", [False, True], ids=["hangs up", "is killed"])
def test_whoever_goes_away_just_when_a_command_begins_leaves_nothing_running(killed: bool) -> None:
    """At once after asking for it, and a little later each time."""
    for turn in range(10):
        seconds = f"{98_000 + os.getpid() % 900}.{turn}{int(killed)}"
        request = frame(id=1, op="start", argv=["sleep", seconds], env={}, drop=[], keep=[], input=False)
        with subprocess.Popen(
            ["/bin/sh", "-c", hand._command(sys.executable, 5.0)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        ) as host:
            assert host.stdin is not None
            assert host.stdout is not None
            host.stdin.write(b"".join(hand._pieces()) + request)
            host.stdin.flush()
            deadline = time.monotonic() + 60
            said = b""
            while (b"started" if killed else hand.MAGIC) not in said:
                said += host.stdout.read1()
                assert time.monotonic() < deadline
            if killed:  # the program on the host, and nothing else
                host.kill()
            else:
                time.sleep(turn * 0.002)
        while left(seconds):
            assert time.monotonic() < deadline
            time.sleep(0.02)


@pytest.mark.parametrize("module", ["files.py", "shipped.py", "ssh/remote_hand.py", "ssh/remote_fork.py"])
def test_what_runs_on_hosts_is_python_3_9(module: str) -> None:
    source = (Path(hand.__file__).parents[1] / module).read_text()
    ast.parse(source, feature_version=(3, 9))
    imported = {
        name.name.split(".")[0]
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Import)
        for name in node.names
    }
    assert imported <= set(sys.stdlib_module_names)
