"""Remote procedure calls: `host_program` is sent to a host with a request, and its answer comes back."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from orc.launchers.backends.ssh.settings import DEFAULT_PYTHON
from orc.launchers.errors import BackendError, BackendUnreachable
from orc.launchers.remote.programs import Program
from orc.launchers.remote.transport import disk_hint
from orc.launchers.strict_modes import VARIABLE

if TYPE_CHECKING:
    from orc.launchers.backends.ssh.settings import Settings
    from orc.launchers.remote.transport import Transport

STATUS_TIMEOUT_S = 30.0
WRITE_TIMEOUT_S = 60.0
START_TIMEOUT_S = 60.0  # far more than a Python start takes, on a host that swaps
_PROGRAM = Program(
    "backends.ssh.host_program",
    ("strict_modes", "attempts.home", *(f"agent.{name}" for name in ("procfs", "cleanup", "records", "signals"))),
)


def call(
    transport: Transport, settings: Settings, do: str, request: Mapping[str, Any], *, timeout_s: float
) -> dict[str, Any]:
    """Return the answer of the host behind *transport* to one request.

    Raises `BackendUnreachable` (`CommandTimeout` when it may have been done), `BackendError` when it cannot be done.
    """
    python = settings.python_of(transport.name) or DEFAULT_PYTHON
    # The request goes to standard input: it may hold secrets, and a command line is there for everybody to see.
    trusted = os.environ.get(VARIABLE, "")
    stdin = json.dumps({"do": do, "host": transport.name, "trusted": trusted, **request}).encode()
    done = transport.run_program(_PROGRAM, python=python, timeout_s=timeout_s, stdin=stdin)
    said = done.stderr.strip()[-2000:]
    try:
        answer = json.loads(done.stdout.strip().rpartition("\n")[2]) if done.stdout.strip() else None
    except ValueError:
        answer = None
    if not isinstance(answer, dict):
        if done.status in (126, 127) and do != "start":
            raise BackendError(
                f"{python} cannot be run there: {said or f'exit status {done.status}'}",
                where=transport.name,
                hint="Set `python:` of the cluster, or of the host, to an interpreter (3.9 or later) that is there.",
            )
        if done.status <= 0:  # it was killed, or cut off: it may have done its work
            raise BackendUnreachable(
                f"{do} was cut off there (status {done.status}) {said}".rstrip(), where=transport.name
            )
        what = said or done.stdout.strip()[-2000:] or f"no answer, exit status {done.status}"
        raise BackendError(f"{do} failed: {what}", where=transport.name)
    if "error" in answer:
        path = f"{answer['path']}: " if answer.get("path") else ""
        raise BackendError(f"{path}{answer['error']}", where=transport.name, hint=disk_hint(answer.get("errno")))
    return {**answer, "status": done.status}
