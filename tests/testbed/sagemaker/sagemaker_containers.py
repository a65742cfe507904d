"""The containers of one incarnation of a training job, and how they are told things."""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

MACHINE = Path(__file__).with_name("sagemaker_namespaces.py")
_CHECK_S = 60.0  # far more than a Python start takes, on a machine that swaps


class Containers:
    """Hosts that run until they end or are told to; one process holds them all, see `sagemaker_namespaces`.

    Leaving the context ends what is left.
    """

    def __init__(self, path: Path, hosts: Sequence[Mapping[str, Any]]) -> None:
        """Write *hosts* to *path*, and start them."""
        path.write_text(json.dumps(hosts))
        path.chmod(0o600)
        self.running = {str(host["name"]) for host in hosts}
        self.ended: dict[str, int] = {}  # status by host, in the order of the ends
        self.error = ""  # why they could not be run
        self.process = subprocess.Popen(
            [sys.executable, "-I", "-S", MACHINE, path],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # a terminal's Ctrl-C is not for it
        )
        self._said = b""
        self._selector = selectors.DefaultSelector()
        assert self.process.stdout is not None  # both are pipes
        self._selector.register(self.process.stdout, selectors.EVENT_READ)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing survives this: without its standard input the machine ends, and with it all that it holds."""
        self._selector.close()
        assert self.process.stdin is not None  # see above
        assert self.process.stdout is not None
        self.process.stdin.close()
        self.process.stdout.close()
        self.process.wait()

    def send(self, command: str) -> None:
        """``term`` or ``kill`` to every host that runs."""
        assert self.process.stdin is not None
        lines = "".join(f"{command} {host}\n" for host in sorted(self.running))
        try:
            os.write(self.process.stdin.fileno(), lines.encode())
        except BrokenPipeError:
            return  # they have just ended

    def wait(self, timeout_s: float) -> None:
        """Take note of what has happened, waiting for *timeout_s* at most."""
        if not self._selector.select(timeout_s):
            return
        assert self.process.stdout is not None
        data = os.read(self.process.stdout.fileno(), 65536)
        *lines, self._said = (self._said + data).split(b"\n")
        for event in map(json.loads, lines):
            if "ended" in event:
                self.ended[event["ended"]] = int(event["status"])
                self.running.discard(event["ended"])
            self.error = event.get("error", self.error)
        if not data:  # it has ended: by itself, or somebody has killed it
            self.error = self.error or ("" if not self.running else "the containers were killed")
            self.running.clear()


def unsupported_reason() -> str:
    """Return the reason why this machine cannot run containers made of namespaces; empty when it can."""
    done = subprocess.run(
        [sys.executable, "-I", "-S", MACHINE, "--check"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=_CHECK_S,
        check=False,
    )
    if done.returncode == 0:
        return ""
    lines = done.stdout.splitlines()
    return str(json.loads(lines[-1])["error"]) if lines else done.stderr.strip() or f"exit status {done.returncode}"
