"""A hand on this machine, at the other end of pipes instead of an SSH channel."""

from __future__ import annotations

import os
import select
import subprocess
import sys
import threading
from pathlib import Path
from typing import IO, Any, cast

from orc.launchers.remote.ssh.hand import Hand
from orc.launchers.remote.ssh.hosts import Access, HostSpec
from orc.launchers.remote.ssh.pool import Links
from orc.launchers.remote.ssh.transport import SshTransport


class Pipes:
    """What `Hand` needs of a `paramiko.Channel`."""

    def __init__(self, home: Path) -> None:
        self._home = home
        self.status_event = threading.Event()
        self.exit_status = -1

    def settimeout(self, seconds: float) -> None:
        self._timeout_s = seconds

    def exec_command(self, command: str) -> None:
        self.process = subprocess.Popen(
            ["/bin/sh", "-c", command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=self._home,
            env={**os.environ, "HOME": str(self._home)},
            start_new_session=True,  # as sshd does
        )
        self._in, self._out, self._err = (
            cast(IO[bytes], pipe).fileno() for pipe in (self.process.stdin, self.process.stdout, self.process.stderr)
        )

    def send(self, data: Any) -> int:
        return os.write(self._in, data)

    def send_ready(self) -> bool:
        return bool(select.select([], [self._in], [], 0)[1])

    def recv(self, size: int) -> bytes:
        if not select.select([self._out], [], [], self._timeout_s)[0]:
            raise TimeoutError
        return os.read(self._out, size)

    def recv_stderr_ready(self) -> bool:
        return bool(select.select([self._err], [], [], 0)[0]) and self.process.poll() is None

    def recv_stderr(self, size: int) -> bytes:
        return os.read(self._err, size)

    def close(self) -> None:
        """As when the laptop goes away."""
        cast(IO[bytes], self.process.stdin).close()
        self.process.wait(timeout=60)


class Here(SshTransport):
    """A transport to a hand on this machine, whose home is *home*."""

    def __init__(self, home: Path, python: str = sys.executable) -> None:
        spec = HostSpec("here", python=python)
        super().__init__(spec, Links(Access()))
        self._home = home
        self.pipes: list[Pipes] = []

    def _connect(self) -> Hand:
        pipes: Any = Pipes(self._home)
        self.pipes.append(pipes)
        return Hand(self.name, pipes, self.spec.python, 60.0, shut=pipes.close)

    @property
    def hand_pid(self) -> int:
        """The hand's process."""
        return int(self._connected()[0].hello["pid"])
