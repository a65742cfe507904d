"""Lookup of attempts by their markers (in the queue, in accounting, in the agents' leases) and their submission.

One attempt is submitted by itself, many as an array. The order of the steps makes it exactly once.

An array has one script, one name and one set of options, and attempts have their own. So the array is a directory
``<root>/arrays/<name>`` with a link to the attempt directory of each element, and its script runs the script of the
element that Slurm starts. Which element it is in which array, an attempt's directory tells in ``array.json``.
"""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

from orc.launchers.agent.records import parse_object, parse_record
from orc.launchers.attempts.confidential import remove_confidential
from orc.launchers.attempts.home import at_home
from orc.launchers.backends.base import Handle, require_secrets
from orc.launchers.backends.slurm.queue_rows import job_number
from orc.launchers.errors import AmbiguousSubmit, BackendError, BackendUnreachable
from orc.launchers.ids import AttemptId
from orc.launchers.remote.transport import NO_LINKS, WholeFile

if TYPE_CHECKING:
    from orc.launchers.backends.slurm.client import SlurmClient
    from orc.launchers.backends.slurm.options import SlurmSettings
    from orc.launchers.backends.slurm.queue_rows import JobRow
    from orc.launchers.paths import Layout
    from orc.launchers.plan import Plan
    from orc.launchers.remote.transport import Transport

KIND = "slurm"
SECRETS_NAME = "secrets.json"
_JOB_ID = re.compile(r"[0-9]{1,12}(_[0-9]{1,12})?")
RECORD_NAME = "array.json"
SCRIPT_NAME = "array.sbatch"
_NAME = re.compile(r"orc-array-[0-9a-f]{1,64}")
_MOST_ARRAYS = 100  # that one attempt was submitted in
# Options of sbatch that every attempt has for itself.
_OWN = ("job-name", "comment", "chdir", "output")


@dataclass(frozen=True)
class ArrayElement:
    """Index of an attempt in an array."""

    array: str  # its name in Slurm
    index: int


@dataclass(frozen=True)
class SlurmJobs:
    """Jobs and directories of attempts on one cluster."""

    client: SlurmClient
    transport: Transport
    layout: Layout
    settings: SlurmSettings
    cluster: str

    def directory(self, marker: str) -> str:
        """Return the attempt's directory on the cluster."""
        return self.transport.expand(str(self.layout.attempt(AttemptId.from_marker(marker))))

    def find_job(self, marker: str) -> Handle | None:
        """Return the handle of the marker from the queue, accounting or the attempt directory."""
        elements = self._elements([marker])
        found = self._queued([marker], elements)
        if marker not in found:
            rows = self.client.accounted_named(*_names([marker], elements)) or ()
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
        rows = self.client.queue_named(*_names(markers, elements))
        found, double = {}, []
        for marker, own in _by_marker(rows, elements, markers):
            first = _oldest(own)
            found[marker] = self._handle(marker, first)
            double += [row.job_id for row in own if row.job_id != first.job_id and not row.ended]
        if double:
            self.client.cancel(double)
        return found

    def _elements(self, markers: Iterable[str]) -> dict[str, list[ArrayElement]]:
        """Return the arrays that attempts were submitted in, from their directories."""
        paths = {f"{self.directory(marker)}/{RECORD_NAME}": marker for marker in markers}
        return {paths[path]: elements_of(data) for path, data in self.transport.read_many(list(paths)).items()}

    def by_lease(self, markers: Iterable[str]) -> dict[str, Handle]:
        """Return the handles in the agents' leases, of jobs that controller and accounting have forgotten."""
        paths = {f"{self.directory(marker)}/node-0/lease.json": marker for marker in markers}
        leases = self.transport.read_many(list(paths))
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
            return Handle(self.cluster, KIND, marker, job_id, at)
        index = int(job_id.partition("_")[2])
        names = [element.array for element in self._elements([marker]).get(marker, ()) if element.index == index]
        return Handle(self.cluster, KIND, marker, job_id, at, group=names[-1] if names else "")

    def _handle(self, marker: str, row: JobRow) -> Handle:
        at = row.submitted_at or time.time()
        return Handle(self.cluster, KIND, marker, row.job_id, at, group=row.name if row.name != marker else "")

    # -- submission

    def submit(self, plan: Plan, secrets: Mapping[str, str]) -> Handle:
        """Submit one attempt; see `Backend.submit`."""
        require_secrets(plan, secrets)
        if found := self.known([plan.marker]).get(plan.marker):
            return found
        self._write([plan], secrets)
        at = time.time()
        (command,) = plan.commands
        *words, script = (self._expand_home(word) for word in command.argv)
        job_id = self._sbatch([*words, script], [plan.marker])
        handle = Handle(plan.cluster, KIND, plan.marker, job_id, at)
        return self._oldest_jobs([handle])[0]

    def submit_array(self, plans: Sequence[Plan], secrets: Mapping[str, str], at_once: int | None) -> list[Handle]:
        """Submit attempts as one array; see `SupportsArrays.submit_array`."""
        if at_once is not None and at_once < 1:
            raise BackendError(f"an array runs at least one of its elements at once, not {at_once}")
        for plan in plans:
            require_secrets(plan, secrets)
        known = self.known([plan.marker for plan in plans])
        if new := [plan for plan in plans if plan.marker not in known]:
            check_alike(new)
            name = array_name(plan.marker for plan in new)
            directory = self._write_array(name, new, secrets)
            at = time.time()
            array = array_options(name, len(new), at_once, directory)
            program = (self.settings.program("sbatch"), "--parsable")
            job_id = self._sbatch([*program, *array, f"{directory}/{SCRIPT_NAME}"], [plan.marker for plan in new])
            made = [
                Handle(plan.cluster, KIND, plan.marker, f"{job_id}_{index}", at, group=name)
                for index, plan in enumerate(new)
            ]
            known.update((handle.marker, handle) for handle in self._oldest_jobs(made))
        return [known[plan.marker] for plan in plans]

    def _write(
        self,
        plans: Sequence[Plan],
        secrets: Mapping[str, str],
        others: Sequence[WholeFile] = (),
        links: Mapping[str, str] = NO_LINKS,
    ) -> None:
        """Write the directories of attempts for their agents, with *others* and *links*."""
        files, counted = list(others), []
        directories = [self.directory(plan.marker) for plan in plans]
        for plan, directory in zip(plans, directories, strict=True):
            if plan.secrets:
                own = json.dumps({name: secrets[name] for name in plan.secrets}).encode()
                files.append(WholeFile(f"{directory}/{SECRETS_NAME}", own, 0o600))
            for file in plan.files:
                path, content = self.transport.expand(file.path), file.content
                if path.endswith("/agent.json"):
                    if self.settings.login:
                        content = _at_home(content, self.transport)
                    if "nnodes_from" in json.loads(content):
                        counted.append(path)
                files.append(WholeFile(path, content.encode(), file.mode))
        kept = (
            self.transport.read_many(counted) if counted else {}
        )  # jobs may have put their real number of nodes there
        logs = [f"{directory}/logs" for directory in directories]  # Slurm makes no directories for its output
        self.transport.write_many([file for file in files if file.path not in kept], logs, links)

    def _write_array(self, name: str, plans: Sequence[Plan], secrets: Mapping[str, str]) -> str:
        """Write the directories of all attempts and of their array, with links between them; return the array's."""
        directory = self.transport.expand(str(array_dir(self.layout, name)))
        places = [self.directory(plan.marker) for plan in plans]
        paths = [f"{place}/{RECORD_NAME}" for place in places]
        earlier = self.transport.read_many(paths)
        script = array_script(plans[0], directory).encode()
        own = [WholeFile(f"{directory}/{SCRIPT_NAME}", script, 0o600)]
        for index, path in enumerate(paths):
            before = [element for element in elements_of(earlier.get(path, b"")) if element.array != name]
            record = record_of([*before, ArrayElement(name, index)])
            own.append(WholeFile(path, record, 0o600))
        links = {f"{directory}/{index}": place for index, place in enumerate(places)}
        self._write(plans, secrets, own, links)
        return directory

    def _sbatch(self, argv: Sequence[str], markers: Sequence[str]) -> str:
        try:
            return self.client.submit(argv)
        except AmbiguousSubmit:
            raise
        except BackendError:  # nothing will ever read them
            remove_confidential(self.transport, [self.directory(marker) for marker in markers])
            raise

    def _oldest_jobs(self, handles: Sequence[Handle]) -> list[Handle]:
        """Return the oldest job of each marker: concurrent submissions agree on it."""
        try:
            first = self.queued([handle.marker for handle in handles])
        except BackendUnreachable:
            return list(handles)
        found = [(handle, first.get(handle.marker, handle)) for handle in handles]
        return [own if own.native_id == other.native_id else other for own, other in found]

    def _expand_home(self, word: str) -> str:
        option, equals, value = word.rpartition("=")
        return f"{option}{equals}{self.transport.expand(value)}" if value.startswith("~/") else word


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


def _at_home(agent: str, transport: Transport) -> str:
    """Return the content of ``agent.json`` with paths that begin with ``~`` as they are over there."""
    return json.dumps(at_home(json.loads(agent), transport.expand), indent=2, ensure_ascii=False) + "\n"


# -- arrays


def array_name(markers: Iterable[str]) -> str:
    """Return the name of an array: the same for the same attempts, on every submission."""
    digest = hashlib.sha256("\n".join(markers).encode()).hexdigest()
    return f"orc-array-{digest[:16]}"


def array_dir(layout: Layout, name: str) -> PurePosixPath:
    """Return the array's directory; may begin with ``~``."""
    return layout.root / "arrays" / name


def elements_of(record: bytes) -> list[ArrayElement]:
    """Return the elements in an ``array.json``, oldest first."""
    try:
        elements = [
            ArrayElement(str(one["array"]), int(one["index"])) for one in (parse_object(record) or {})["elements"]
        ]
    except (ValueError, KeyError, TypeError):  # a crashed machine has lost its content, or somebody else has written it
        return []
    return [element for element in elements[-_MOST_ARRAYS:] if _NAME.fullmatch(element.array)]


def record_of(elements: Sequence[ArrayElement]) -> bytes:
    """Return the ``array.json`` of *elements*; the inverse of `elements_of`."""
    return json.dumps({"elements": [{"array": one.array, "index": one.index} for one in elements]}).encode() + b"\n"


def check_alike(plans: Sequence[Plan]) -> None:
    """Check that one array can hold *plans*. Raises `BackendError`."""
    first = directives(script_of(plans[0]))
    if "hetjob" in first:
        hint = "Submit them one by one, or without `heterogeneous`."
        raise BackendError("Slurm makes no arrays of heterogeneous jobs", where=plans[0].marker, hint=hint)
    for plan in plans[1:]:
        other = directives(script_of(plan))
        for one, two in zip([*first, "nothing"], [*other, "nothing"], strict=False):
            if one != two:
                raise BackendError(
                    f"the elements of an array ask Slurm for the same, and {plan.marker} asks for {two}, "
                    f"not for {one} like {plans[0].marker}",
                    where=plan.marker,
                    hint="Submit it by itself.",
                )


def script_of(plan: Plan) -> str:
    """Return the batch script of one attempt."""
    return next(file.content for file in plan.files if file.path.endswith(".sbatch"))


def directives(script: str) -> list[str]:
    """Return the first line of a script and its options, without those that name the job."""
    lines = script.splitlines()
    options = [line.removeprefix("#SBATCH ") for line in lines if line.startswith("#SBATCH ")]
    own = re.compile(rf"--(?:{'|'.join(_OWN)})(?:=.*)?")
    return [lines[0], *(option for option in options if not own.fullmatch(option))]


def array_script(plan: Plan, directory: str) -> str:
    """Return the script of the array in *directory* (absolute), with the options of *plan*."""
    from orc.templates.render import render

    shebang, *options = directives(script_of(plan))
    return render("slurm/array.sbatch.j2", shebang=shebang, directives=options, directory=directory)


def array_options(name: str, count: int, at_once: int | None, directory: str) -> list[str]:
    """Return the options of sbatch for the array itself."""
    limit = f"%{at_once}" if at_once is not None else ""
    return [
        f"--array=0-{count - 1}{limit}",
        f"--job-name={name}",
        f"--comment={name}",
        f"--chdir={directory}",
        f"--output={directory.replace('%', '%%')}/%a/logs/launcher.log",
    ]
