"""Local state of an attempt whose TPU comes and goes: its progress, its end, its logs.

A TPU is deleted with all that is on it, so the logs are brought home before. None of this is needed to find a TPU
again: that is in the cloud, and in the ledger.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from orc.launchers.agent.records import read_json
from orc.launchers.attempts.reader import log_selectors, read_log
from orc.launchers.backends.base import Handle, LogChunk, Observation
from orc.launchers.errors import LaunchError
from orc.launchers.ids import AttemptId
from orc.launchers.paths import Layout
from orc.launchers.remote import files

if TYPE_CHECKING:
    from orc.launchers.backends.ssh.hosts import HostConnections
    from orc.launchers.backends.tpu.lifecycle import ZoneStatus

_LAST_WORDS_S = 300.0  # how long the end waits for logs that cannot be had
_JOB_FILES = (".jsonl",)  # beside the attempt: what the job measures


class LocalState:
    """Directory of one attempt on this machine."""

    def __init__(self, directory: Path, marker: str) -> None:
        self.directory = directory
        self.marker = marker

    # -- how far it got

    @property
    def started(self) -> bool:
        """True when the agents are known to have been started."""
        return (self.directory / "started").exists()

    def mark_started(self) -> None:
        """Record the start: a worker without the attempt has lost it from now on."""
        self._write("started", b"")

    @property
    def cancelled(self) -> bool:
        """True when it was cancelled before the agents were started."""
        return (self.directory / "cancelled").exists()

    def mark_cancelled(self) -> None:
        """Record the cancellation: it must not be started any more."""
        self._write("cancelled", b"")

    @property
    def zone(self) -> str:
        """Zone in which its TPU was last asked for, or seen; empty before."""
        try:
            return (self.directory / "zone").read_text()
        except FileNotFoundError:
            return ""

    @zone.setter
    def zone(self, name: str) -> None:
        self._write("zone", name.encode())

    def dated(self, statuses: Sequence[ZoneStatus]) -> list[ZoneStatus]:
        """Return *statuses*, and of the one that lacks its node since when it was seen so: the first look notes it."""
        lacking = next((status for status in statuses if status.lacks_node), None)
        if lacking is None:
            (self.directory / "lacks-node").unlink(missing_ok=True)
            return list(statuses)
        zone, at = lacking.zone, time.time()
        with suppress(FileNotFoundError):
            noted_zone, _, noted_at = (self.directory / "lacks-node").read_text().partition(" ")
            at = float(noted_at) if noted_zone == zone else at
        self._write("lacks-node", f"{zone} {at}".encode())
        return [replace(status, since=at) if status is lacking else status for status in statuses]

    # -- how it ended

    def end(self) -> tuple[Observation, float] | None:
        """Return the attempt's end and the time of its recording; the deletion may still have to follow."""
        found = read_json(str(self.directory / "end.json"))
        return None if found is None else (Observation.from_dict(found["observation"]), float(found["at"]))

    @property
    def handle(self) -> Handle | None:
        """Handle of an attempt that has ended; its TPU may be gone."""
        found = read_json(str(self.directory / "end.json"))
        return None if found is None else Handle.from_dict(found["handle"])

    def record_end(self, handle: Handle, seen: Observation) -> None:
        """Record the end: no worker is polled any more."""
        record = {"handle": handle.to_dict(), "observation": seen.to_dict(), "at": time.time()}
        self._write("end.json", json.dumps(record).encode())

    # -- what it left behind

    @property
    def attempt_directory(self) -> str:
        """Copy of the attempt's directory."""
        return str(self._layout.attempt(AttemptId.from_marker(self.marker)))

    @property
    def _layout(self) -> Layout:
        return Layout.at(PurePosixPath(self.directory / "copy"))

    @property
    def has_logs(self) -> bool:
        """True when its logs are here."""
        return (self.directory / "copied").exists()

    def fetch_logs(self, hosts: HostConnections, names: Iterable[str], ended_at: float | None) -> str:
        """Copy the logs of all workers and the job's metrics; return the reason when that fails.

        What cannot be had is waited for by the caller's next look; a while after the end it is left behind.
        """
        if self.has_logs:
            return ""
        ordered = list(names)
        results = hosts.each(ordered, lambda name: self._copy(hosts, name, name == ordered[0]))
        failed = [result for result in results.values() if isinstance(result, LaunchError)]
        if failed and ended_at is not None and time.time() - ended_at < _LAST_WORDS_S:
            return failed[0].what
        self._write("copied", b"")
        return ""

    def _copy(self, hosts: HostConnections, name: str, first: bool) -> None:
        transport = hosts.transport(name)
        directory = transport.expand(hosts.directory(name, self.marker))
        own = Path(self.attempt_directory)
        for selector in log_selectors(transport, directory):
            kind, number = ("rank", selector.rank) if selector.rank is not None else ("node", selector.node)
            _save(own / "logs" / f"{kind}-{number}.log", read_log(transport, directory, selector))
        if first:
            job = str(PurePosixPath(directory).parent)
            for file in transport.names(job):
                if file.endswith(_JOB_FILES):
                    files.write_file(str(own.parent / file), transport.read(f"{job}/{file}"), 0o600)

    def _write(self, name: str, data: bytes) -> None:
        files.write_file(str(self.directory / name), data, 0o600)


def _save(path: Path, chunks: Iterable[LogChunk]) -> None:
    files.write_file(str(path), (chunk.data for chunk in chunks), 0o600)
