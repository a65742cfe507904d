"""Commands on many hosts at once, its output line by line."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from threading import Lock
from typing import TYPE_CHECKING

from orc.launchers.errors import BackendUnreachable, LaunchError
from orc.launchers.remote.ssh.fanout import each

if TYPE_CHECKING:
    from orc.launchers.remote.transport import Transport

HOSTS_AT_ONCE = 100
UNREACHABLE = 5  # exit status of the commands for a cluster that does not answer


@dataclass(frozen=True)
class Script:
    """Shell lines that run one after the other, up to the first that fails.

    *env* is set before the first. With *sudo* they run as root, whose sudo must not ask for a password.
    """

    lines: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    sudo: bool = False

    def argv(self) -> tuple[str, ...]:
        """Return the command for each host, which reads `text`: a command line is there for everybody to see."""
        return (*(("sudo", "-n") if self.sudo else ()), "/bin/sh", "-e", "-c", 'eval "$(cat)"')

    def text(self) -> str:
        """Return what the shell runs; both of its streams go to standard output, in their order."""
        exports = [f"export {name}={shlex.quote(value)}" for name, value in self.env.items()]
        return "\n".join(["exec 2>&1 </dev/null", *exports, *self.lines])


@dataclass(frozen=True)
class CommandResult:
    """Exit status on one host, 128 + n for signal n; `UNREACHABLE` with the problem when it did not answer."""

    status: int
    problem: str = ""


def run_on_hosts(
    transports: Mapping[str, Transport],
    script: Script,
    on_line: Callable[[str, str], None],
    *,
    silence_s: float,
) -> dict[str, CommandResult]:
    """Run a script on all hosts, `HOSTS_AT_ONCE` of them at the same time.

    Args:
        transports: The hosts, by their names.
        script: What runs on each.
        on_line: Called with a host's name and one line of its output, by one thread at a time.
        silence_s: Seconds without output after which a host is given up and its script ended; with *sudo* only root
            can end it, and it may go on.

    Returns:
        The result of each host by its name, in the order of *transports*.
    """
    lock = Lock()

    def show(name: str, line: bytes) -> None:
        with lock:
            on_line(name, line.decode(errors="replace").rstrip("\r"))

    results = each(
        {name: name for name in transports},
        lambda name: _run(transports[name], script, lambda line: show(name, line), silence_s),
        limit=HOSTS_AT_ONCE,
    )
    return {name: _failure(found) if isinstance(found, LaunchError) else found for name, found in results.items()}


def worst_status(results: Mapping[str, CommandResult]) -> int:
    """Return the highest exit status."""
    return max((result.status for result in results.values()), default=0)


def _run(transport: Transport, script: Script, show: Callable[[bytes], None], silence_s: float) -> CommandResult:
    with transport.stream(script.argv(), timeout_s=silence_s) as process:
        process.write(script.text().encode())
        process.close_stdin()
        rest = b""
        while data := process.read(65536):
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                show(line)
        if rest:
            show(rest)
        done = process.wait()
    for line in done.stderr.encode().splitlines():  # of what starts the shell: sudo, the ssh server there
        show(line)
    return CommandResult(done.status if done.status >= 0 else 128 - done.status)


def _failure(error: LaunchError) -> CommandResult:
    status = UNREACHABLE if isinstance(error, BackendUnreachable) else 127
    return CommandResult(status, " ".join(filter(None, (error.what, error.hint))))
