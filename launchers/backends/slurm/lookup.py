"""Lookup of attempts by their markers: in the queue, in accounting, in the agents' leases."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from orc.launchers.agent.records import parse_record
from orc.launchers.backends.base import Handle
from orc.launchers.backends.slurm.arrays import RECORD_NAME, ArrayElement, elements_of
from orc.launchers.backends.slurm.queue_rows import job_number
from orc.launchers.ids import AttemptId

if TYPE_CHECKING:
    from orc.launchers.backends.slurm.client import SlurmClient
    from orc.launchers.backends.slurm.queue_rows import JobRow
    from orc.launchers.paths import Layout
    from orc.launchers.remote.transport import Transport

KIND = "slurm"
_JOB_ID = re.compile(r"[0-9]{1,12}(_[0-9]{1,12})?")


class JobLookup:
    """Lookup of the jobs and directories of markers on one cluster."""

    def __init__(self, client: SlurmClient, transport: Transport, layout: Layout, cluster: str) -> None:
        self._client = client
        self._transport = transport
        self._layout = layout
        self._cluster = cluster

    def directory(self, marker: str) -> str:
        """Return the attempt's directory on the cluster."""
        return self._transport.expand(str(self._layout.attempt(AttemptId.from_marker(marker))))

    def find_job(self, marker: str) -> Handle | None:
        """Return the handle of the marker from the queue, accounting or the attempt directory."""
        elements = self._elements([marker])
        found = self._queued([marker], elements)
        if marker not in found:
            rows = self._client.accounted_named(*_names([marker], elements)) or ()
            found = {name: self._handle(name, _oldest(own)) for name, own in _by_marker(rows, elements, [marker])}
        return found.get(marker) or self.by_lease([marker]).get(marker)

    def known(self, markers: Sequence[str]) -> dict[str, Handle]:
        """Return the handles of markers without accounting: the check of a submission that it happens once."""
        found = self.queued(markers)
        missing = [marker for marker in markers if marker not in found]
        return {**found, **self.by_lease(missing)} if missing else found

    def queued(self, markers: Sequence[str]) -> dict[str, Handle]:
        """Return the handles of the jobs that the controller remembers.

        Of several jobs with one marker (a submission that was cut off and repeated) the oldest is the attempt, and the
        others are cancelled; should they run for a moment, the agents' lease keeps them from doing anything.
        """
        return self._queued(markers, self._elements(markers))

    def _queued(self, markers: Sequence[str], elements: Mapping[str, Sequence[ArrayElement]]) -> dict[str, Handle]:
        rows = self._client.queue_named(*_names(markers, elements))
        found, double = {}, []
        for marker, own in _by_marker(rows, elements, markers):
            first = _oldest(own)
            found[marker] = self._handle(marker, first)
            double += [row.job_id for row in own if row.job_id != first.job_id and not row.ended]
        if double:
            self._client.cancel(double)
        return found

    def _elements(self, markers: Iterable[str]) -> dict[str, list[ArrayElement]]:
        """Return the arrays that attempts were submitted in, from their directories."""
        paths = {f"{self.directory(marker)}/{RECORD_NAME}": marker for marker in markers}
        return {paths[path]: elements_of(data) for path, data in self._transport.read_many(list(paths)).items()}

    def by_lease(self, markers: Iterable[str]) -> dict[str, Handle]:
        """Return the handles in the agents' leases, of jobs that controller and accounting have forgotten."""
        paths = {f"{self.directory(marker)}/node-0/lease.json": marker for marker in markers}
        leases = self._transport.read_many(list(paths))
        found = {paths[path]: self._of_lease(paths[path], data) for path, data in leases.items()}
        return {marker: handle for marker, handle in found.items() if handle is not None}

    def _of_lease(self, marker: str, data: bytes) -> Handle | None:
        lease = parse_record(data)
        if lease is None:  # renames are atomic, so this is a file that a crashed machine has lost the content of
            return None
        job_id = job_of_owner(lease.get("owner", ""))
        if not job_id or lease.get("marker") != marker:
            return None
        at = float(lease.get("at") or 0.0)
        if "_" not in job_id:
            return Handle(self._cluster, KIND, marker, job_id, at)
        index = int(job_id.partition("_")[2])
        arrays = [element.array for element in self._elements([marker]).get(marker, ()) if element.index == index]
        return Handle(self._cluster, KIND, marker, job_id, at, group=arrays[-1] if arrays else "")

    def _handle(self, marker: str, row: JobRow) -> Handle:
        at = row.submitted_at or time.time()
        return Handle(self._cluster, KIND, marker, row.job_id, at, group=row.name if row.name != marker else "")


def job_of_owner(owner: str) -> str:
    """Return the Slurm job (``7`` or ``7_1``) that a lease names as its owner; empty where it names none."""
    kind, _, job_id = owner.partition(":")
    return job_id if kind == KIND and _JOB_ID.fullmatch(job_id) else ""


def of_handles(rows: Sequence[JobRow], handles: Sequence[Handle]) -> dict[Handle, JobRow]:
    """Return the rows by handle. After a reset of the controller a job of another name may have the number of ours."""
    by_id: dict[tuple[str, str], JobRow] = {}
    for row in sorted(rows, key=lambda row: row.submitted_at or 0.0):  # the newest run of a requeued job counts
        by_id[row.job_id, row.name] = row
    wanted = {handle: (handle.native_id, handle.group or handle.marker) for handle in handles}
    return {handle: by_id[key] for handle, key in wanted.items() if key in by_id}


def _names(markers: Iterable[str], elements: Mapping[str, Sequence[ArrayElement]]) -> list[str]:
    """Return the names that jobs of *markers* may have."""
    arrays = [element.array for own in elements.values() for element in own]
    return list(dict.fromkeys([*markers, *arrays]))


def _by_marker(
    rows: Iterable[JobRow], elements: Mapping[str, Sequence[ArrayElement]], markers: Iterable[str]
) -> list[tuple[str, list[JobRow]]]:
    """Yield each marker with the rows of its jobs and array elements.

    One that Slurm has refused is none. One that has run and ended is: sent again, it would run twice.
    """
    found: dict[str, list[JobRow]] = {marker: [] for marker in markers}
    places = {(one.array, str(one.index)): marker for marker, own in elements.items() for one in own}
    for row in rows:
        if row.refused:
            continue
        _, underscore, index = row.job_id.partition("_")
        marker = places.get((row.name, index)) if underscore else row.name
        if marker in found:
            found[marker].append(row)
    return [(marker, own) for marker, own in found.items() if own]


def _oldest(rows: Sequence[JobRow]) -> JobRow:
    return min(rows, key=lambda row: job_number(row.job_id))
