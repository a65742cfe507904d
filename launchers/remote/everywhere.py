"""One shell script on many machines at once, line by line as they say it."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from orc.launchers.errors import BackendError, BackendUnreachable, LaunchError

if TYPE_CHECKING:
    from orc.launchers.remote.transport import Transport

AT_A_TIME = 100  # machines
UNREACHED = 5  # what the commands end with for a cluster that does not answer


@dataclass(frozen=True)
class Script:
    """Shell lines that run one after the other, up to the first that fails.

    *env* is set before the first. With *sudo* they run as root, whose sudo must not ask for a password.
    """

    lines: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    sudo: bool = False

    def argv(self) -> tuple[str, ...]:
        """What is started on each machine; both of its streams go to standard output, in their order."""
        exports = [f"export {name}={shlex.quote(value)}" for name, value in self.env.items()]
        text = "\n".join(["exec 2>&1", *exports, *self.lines])
        return (*(("sudo", "-n") if self.sudo else ()), "/bin/sh", "-e", "-c", text)


@dataclass(frozen=True)
class Ending:
    """How the script ended on one machine: its status, 128 + n for signal n; `UNREACHED` and why nobody knows."""

    status: int
    problem: str = ""


def run_everywhere(
    transports: Mapping[str, Transport],
    script: Script,
    on_line: Callable[[str, str], None],
    *,
    silence_s: float,
) -> dict[str, Ending]:
    """Run *script* on all machines, `AT_A_TIME` of them at the same time; how it ended, by name and in their order.

    *on_line* gets a machine's name and one line of its output, without the end of the line; one call at a time.
    A machine that says nothing for *silence_s* seconds is given up, and so is its script.
    """
    from concurrent.futures import ThreadPoolExecutor
    from threading import Lock

    lock = Lock()

    def say(name: str, line: bytes) -> None:
        with lock:
            on_line(name, line.decode(errors="replace").rstrip("\r"))

    def run(name: str) -> Ending:
        try:
            return _run(transports[name], script.argv(), lambda line: say(name, line), silence_s)
        except BackendUnreachable as error:
            return Ending(UNREACHED, _told(error))
        except BackendError as error:
            return Ending(127, _told(error))

    if not transports:
        return {}
    with ThreadPoolExecutor(min(AT_A_TIME, len(transports))) as pool:
        return dict(zip(transports, pool.map(run, transports), strict=True))


def worst(endings: Mapping[str, Ending]) -> int:
    """The highest status."""
    return max((ending.status for ending in endings.values()), default=0)


def _run(transport: Transport, argv: Sequence[str], say: Callable[[bytes], None], silence_s: float) -> Ending:
    with transport.stream(argv, timeout_s=silence_s) as process:
        process.close_stdin()
        rest = b""
        while data := process.read(65536):
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                say(line)
        if rest:
            say(rest)
        done = process.wait()
    if done.stderr:  # of what starts the shell: sudo, the other side's ssh server
        for line in done.stderr.encode().splitlines():
            say(line)
    return Ending(done.status if done.status >= 0 else 128 - done.status)


def _told(error: LaunchError) -> str:
    return " ".join(filter(None, (error.what, error.hint)))
