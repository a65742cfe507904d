"""Our end of the program on a host, where a real link could not be broken at the right moment."""

from __future__ import annotations

import ast
import json
import os
import queue
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from orc.launchers.errors import BackendUnreachable
from orc.launchers.remote.ssh import hand, pool, remote_hand
from orc.launchers.remote.ssh.config import Route
from orc.launchers.remote.ssh.errors import AccessRefused, LinkLost
from orc.launchers.remote.ssh.hosts import Access

from .local_hand import Here, Pipes


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


class Ended(Silent):
    """A channel to a shell that had no Python for us and has ended, before anything was sent to it."""

    def __init__(self, status: int) -> None:
        super().__init__()
        self.exit_status = status
        self.status_event = threading.Event()
        self.status_event.set()  # as paramiko does for a channel that is closed, too
        self._said = [b"sh: python3: not found\n"]

    def exec_command(self, command: str) -> None:
        """It was taken."""

    def send(self, data: Any) -> int:
        raise OSError("Socket is closed")

    def recv_stderr(self, size: int) -> bytes:
        return self._said.pop() if self._said else b""


def test_a_shell_that_ends_before_our_program_is_sent_is_asked_why() -> None:
    channel: Any = Ended(127)
    with pytest.raises(AccessRefused, match=r"\(status 127\): sh: python3: not found") as refused:
        hand.Hand("node1", channel, None, 5.0, shut=channel.closed.set)
    assert "Python 3.9 or newer" in refused.value.hint
    channel = Ended(-1)
    with pytest.raises(LinkLost, match="node1: the connection was cut"):
        hand.Hand("node1", channel, None, 5.0, shut=channel.closed.set)


def test_an_sshd_that_says_nothing_is_named_whichever_limit_is_over_first(monkeypatch: pytest.MonkeyPatch) -> None:
    import paramiko

    start = paramiko.Transport.start_client
    monkeypatch.setattr(paramiko.Transport, "start_client", lambda self, timeout: start(self, timeout=0.0))
    ours, theirs = socket.socketpair()
    with theirs, pytest.raises(BackendUnreachable, match="something answers, but no SSH server within 30 s") as error:
        pool._enter(Route("node1", "10.0.0.1", 22, "me"), Access(connect_timeout_s=30.0), ours)
    assert "Its sshd hangs" in error.value.hint


class Hampered(Pipes):
    """Pipes to a hand here, on our side of which something happens."""

    hampered: str = ""

    def send(self, data: Any) -> int:
        self._stop("send")
        return super().send(data)

    def recv(self, size: int) -> bytes:
        if self.hampered == "room":
            raise EOFError  # what paramiko raises when it cannot tell a dead connection how much was taken
        self._stop("recv")
        return super().recv(size)

    def _stop(self, where: str) -> None:
        if self.hampered == where:
            self.hampered = ""
            time.sleep(4)  # as when this whole machine is asleep, or stopped with Ctrl-Z
            raise TimeoutError


@pytest.fixture
def hampered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Here]:
    """A transport that gives its hand up soon, connected by `Hampered` pipes, which are its ``pipes[0]``."""

    class Near(Here):
        def _connect(self) -> hand.Hand:
            pipes: Any = Hampered(tmp_path)
            self.pipes.append(pipes)
            return hand.Hand(self.name, pipes, self.spec.python, 60.0, shut=pipes.close)

    transport = Near(tmp_path)
    transport.names("/")
    monkeypatch.setattr(hand, "_LOOK_S", 0.1)
    transport._hand._channel.settimeout(0.1)
    transport._hand._silence_s = 3.0
    yield transport
    transport.close()


@pytest.mark.parametrize("where", ["send", "recv"])
def test_that_we_were_stopped_ourselves_is_not_taken_for_the_silence_of_the_host(hampered: Here, where: str) -> None:
    pipes: Any = hampered.pipes[0]
    with hampered.stream(("cat",), timeout_s=60) as program:
        pipes.hampered = where
        while where == "recv" and pipes.hampered:
            time.sleep(0.01)
        program.write(b"still there")
        assert program.read(100) == b"still there"
    assert len(hampered.pipes) == 1


def test_a_connection_that_dies_while_room_is_made_is_cut(hampered: Here) -> None:
    pipes: Any = hampered.pipes[0]
    with hampered.stream(("cat",), timeout_s=60) as program:
        pipes.hampered = "room"
        with pytest.raises(LinkLost, match="the connection was cut"):
            program.read(100)


class Vanishing(dict[int, Any]):
    """The requests that are underway, where one is answered just when somebody has asked for it."""

    def __contains__(self, number: object) -> bool:
        return self.pop(number, None) is not None  # type: ignore[call-overload]


def test_what_comes_for_a_request_that_is_just_answered_does_no_harm(monkeypatch: pytest.MonkeyPatch) -> None:
    for method in ("_watch", "_listen", "end"):  # the last would end this process
        monkeypatch.setattr(remote_hand.Hand, method, lambda self: None)
    source, feed = os.pipe()
    answers, sink = os.pipe()
    there = remote_hand.Hand(source, sink, None, "python3", 60.0)  # type: ignore[arg-type]
    there._open = Vanishing({1: queue.SimpleQueue()})
    os.write(feed, frame(id=1, ack=5) + frame(id=2, op="ping"))
    os.close(feed)
    there.serve()
    said = b""
    while b'{"id": 2, "done": {}}' not in said:
        said += os.read(answers, 1 << 16)
    for descriptor in (source, answers, sink):
        os.close(descriptor)


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


def test_a_host_whose_words_nobody_takes_notices_that_we_are_gone() -> None:
    """A cut link closes no connection: what is said there stays where it is."""
    request = frame(id=1, op="start", argv=["yes", f"{os.getpid()} nobody"], env={}, drop=[], keep=[], input=False)
    with subprocess.Popen(
        ["/bin/sh", "-c", hand._command(sys.executable, 3.0)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as host:
        assert host.stdin is not None
        host.stdin.write(b"".join(hand._pieces()) + request)
        host.stdin.flush()
        try:
            assert host.wait(60) == 0
        finally:
            host.kill()
    deadline = time.monotonic() + 60
    while left(f"{os.getpid()} nobody"):
        assert time.monotonic() < deadline
        time.sleep(0.02)


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
