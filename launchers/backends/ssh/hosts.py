"""Hosts of one cluster: connections by name, and requests to several of them at a time."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from orc.launchers.agent.records import parse_object
from orc.launchers.backends.ssh.settings import DEFAULT_PYTHON
from orc.launchers.backends.ssh.verdict import HostStatus
from orc.launchers.errors import BackendError, BackendUnreachable, LaunchError
from orc.launchers.ids import AttemptId
from orc.launchers.paths import Layout
from orc.launchers.remote.programs import Program
from orc.launchers.remote.transport import disk_hint
from orc.launchers.strict_modes import VARIABLE

if TYPE_CHECKING:
    from orc.launchers.backends.ssh.settings import Settings
    from orc.launchers.remote.transport import Transport
    from orc.launchers.spec.clusters import Cluster


T = TypeVar("T")
Open = Callable[[], Mapping[str, "Transport"]]
STATUS_TIMEOUT_S = 30.0
WRITE_TIMEOUT_S = 60.0
START_TIMEOUT_S = 60.0  # far more than a Python start takes, on a host that swaps
_PROGRAM = Program(
    "backends.ssh.host_program",
    ("strict_modes", "attempts.home", *(f"agent.{name}" for name in ("errors", "procfs", "processes", "records"))),
)


class HostConnections:
    """Connections to the hosts of a cluster, made when they are first needed and then kept."""

    def __init__(self, settings: Settings, open_all: Open) -> None:
        self.settings = settings
        self._open = open_all
        self._transports: Mapping[str, Transport] | None = None
        self._opening = threading.Lock()

    def transport(self, name: str) -> Transport:
        """Return the transport of one host. Raises `BackendError` for one that the cluster does not have (any more)."""
        with self._opening:
            if self._transports is None:
                self._transports = self._open()
            transports = self._transports
        if name not in transports:
            hint = "Put it back into clusters.yaml until the jobs that ran there are over."
            raise BackendError(f"the cluster has no host {name} any more", where=name, hint=hint)
        return transports[name]

    def close(self) -> None:
        """Close all connections."""
        for transport in (self._transports or {}).values():
            transport.close()

    def each(self, names: Iterable[str], work: Callable[[str], T]) -> dict[str, T | LaunchError]:
        """Return the result or the error of *work* for each host, many at a time; errors name their host."""
        from orc.launchers.remote.ssh.fanout import each

        results = each({name: name for name in names}, work)
        return {name: r.of(name) if isinstance(r, LaunchError) else r for name, r in results.items()}

    def call(self, name: str, do: str, request: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
        """Return the answer of `host_program` on one host to a request.

        Raises `BackendUnreachable` (`CommandTimeout` when it may have been done), `BackendError` when it cannot be
        done.
        """
        # The request goes to standard input: it may hold secrets, and a command line is there for everybody to see.
        question = {"do": do, "host": name, "trusted": os.environ.get(VARIABLE, ""), **request}
        python = self.settings.python_of(name) or DEFAULT_PYTHON
        answer, done = self.transport(name).ask_program(_PROGRAM, question, python=python, timeout_s=timeout_s)
        if answer is None:
            said = done.stderr.strip()[-2000:]
            if done.status in (126, 127) and do != "start":  # a wrapper around an interpreter that is gone
                hint = "Set `python:` of the cluster, or of the host, to an interpreter (3.9 or later) that is there."
                what = f"{python} cannot be run there: {said or f'exit status {done.status}'}"
                raise BackendError(what, where=name, hint=hint)
            if done.status <= 0:  # it was killed, or cut off: it may have done its work
                what = f"{do} was cut off there (status {done.status}) {said}".rstrip()
                raise BackendUnreachable(what, where=name)
            what = said or done.stdout.strip()[-2000:] or f"no answer, exit status {done.status}"
            raise BackendError(f"{do} failed: {what}", where=name)
        if "error" in answer:
            path = f"{answer['path']}: " if answer.get("path") else ""
            raise BackendError(f"{path}{answer['error']}", where=name, hint=disk_hint(answer.get("errno")))
        return {**answer, "status": done.status}

    def directory(self, name: str, marker: str) -> str:
        """Return the attempt's directory on that host; may begin with ``~``."""
        root = self.settings.root_of(name) if name in self.settings.names else self.settings.root
        return str(Layout.at(root).attempt(AttemptId.from_marker(marker)))

    def token(self, name: str, marker: str) -> str:
        """Return the token of the link between the agents of an attempt, from a host that has it."""
        path = f"{self.directory(name, marker)}/link.json"
        transport = self.transport(name)
        found = transport.read_many([transport.expand(path)])
        try:
            (data,) = found.values()
            return str((parse_object(data) or {})["token"])
        except (ValueError, KeyError):
            raise BackendError(f"{path} is gone", where=name) from None

    def statuses(self, wanted: Mapping[str, Sequence[str]]) -> dict[str, dict[str, HostStatus]]:
        """Return the status of attempts (markers) on their hosts: ``{marker: {host: status}}``.

        One round trip per host, all at once; a host that does not answer has a status without an answer.
        """

        def ask(name: str) -> tuple[dict[str, Any], float]:
            directories = {marker: self.directory(name, marker) for marker in wanted[name]}
            began = time.time()
            answer = self.call(name, "status", {"directories": list(directories.values())}, STATUS_TIMEOUT_S)
            ahead = float(answer["now"]) - (began + time.time()) / 2
            return {marker: answer["attempts"][directory] for marker, directory in directories.items()}, ahead

        seen: dict[str, dict[str, HostStatus]] = {}
        for name, result in self.each(wanted, ask).items():
            for marker in wanted[name]:
                if isinstance(result, LaunchError):
                    status = HostStatus(name, why=result.what)
                elif why := result[0][marker].get("why"):
                    status = HostStatus(name, why=str(why))
                else:
                    status = HostStatus(name, result[0][marker], ahead_s=result[1])
                seen.setdefault(marker, {})[name] = status
        return seen


def open_transports(cluster: Cluster) -> dict[str, Transport]:
    """Return the transports of the cluster's hosts by name. They connect when they are first used.

    They share jump hosts; close each when done. Raises `SpecError` when the cluster's options are wrong.
    """
    from orc.launchers.backends.ssh.settings import read_settings
    from orc.launchers.remote.ssh.transport import ConnectionPool, SshTransport

    settings = read_settings(cluster)
    pool = ConnectionPool(settings.options.access)
    return {name: SshTransport(settings.spec(name), pool) for name in settings.names}
