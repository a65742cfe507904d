"""Rows of the ledger as values, and the queries by which reads and transactions get them."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import lru_cache
from typing import Any, NamedTuple, TypeVar

from orc.launchers.ids import AttemptId
from orc.orchestrator.ledger.database import Connection, batches, one_of
from orc.orchestrator.ledger.lifecycle import AttemptState, Event, JobState, Position

R = TypeVar("R")


def dump(value: Any) -> str:
    """Canonical JSON text, as the ledger stores it."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)


def columns_of(record: type[Any]) -> str:
    """Return the columns of a table whose rows are *record*, a dataclass with their names."""
    return ", ".join(each.name for each in fields(record))


def decoded(record: type[R], row: Sequence[Any], *in_json: str) -> R:
    """Return the row of `columns_of` as *record*; the columns *in_json* hold JSON."""
    values = dict(zip((each.name for each in fields(record)), row, strict=True))  # type: ignore[arg-type]
    return record(**{name: json.loads(value) if name in in_json else value for name, value in values.items()})


@dataclass(frozen=True)
class Destination:
    """Place that an attempt is sent to, as its cluster is described at that time."""

    login: str = ""  # account of the job's owner there; empty: that of the process that sends it
    root: str | None = None  # of orc's files; empty: where the kind has them; `None`: it was not noted
    kind: str = ""  # of the cluster; empty: it was not noted
    addresses: Mapping[str, str] = field(default_factory=dict)  # what makes its machines (`Backend.addresses`)

    @property
    def place(self) -> Destination:
        """The same without the machines: attempts of one place are found with one connection."""
        return Destination(self.login, self.root, self.kind)

    def is_another_place(self, other: Destination) -> bool:
        """Return True where the two are certainly not one place."""
        roots, kinds = {self.root, other.root} - {None}, {self.kind, other.kind} - {""}
        return self.login != other.login or len(roots) > 1 or len(kinds) > 1

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON-able form."""
        found: dict[str, Any] = {"login": self.login}
        if self.root is not None:
            found["root"] = self.root
        if self.kind:
            found["kind"] = self.kind
        return {**found, "addresses": dict(self.addresses)} if self.addresses else found

    @classmethod
    @lru_cache(maxsize=100)  # those of many attempts are the same
    def from_text(cls, text: str | None) -> Destination | None:
        """Return the destination of which *text* is the JSON; `None` for none."""
        return cls(**json.loads(text)) if text else None

    def __str__(self) -> str:
        return f"{self.login} {self.root or ''}".strip()


@dataclass(frozen=True)
class AttemptRecord:
    """Row of an attempt. Times are seconds since the epoch."""

    job_id: str
    number: int
    marker: str
    state: AttemptState
    cause: str | None
    reason: str
    plan_digest: str
    handle: Mapping[str, Any] | None
    prepared_at: float
    submitted_at: float | None = None
    started_at: float | None = None
    ended_at: float | None = None
    first_negative_at: float | None = None
    cancel_sent_at: float | None = None
    restarts: int = 0
    hosts: tuple[str, ...] = ()
    progress: Mapping[str, Any] = field(default_factory=dict)
    exit: Mapping[str, Any] | None = None
    sent_to: Destination | None = None  # `None`: not sent

    @classmethod
    def from_row(cls, row: tuple[Any, ...]) -> AttemptRecord:
        """Return the record of a row of `ATTEMPT_COLUMNS`."""
        values: dict[str, Any] = dict(zip(ATTEMPT_COLUMNS, row, strict=True))
        values["state"] = AttemptState(values["state"])
        values["hosts"] = tuple(json.loads(values["hosts"])) if values["hosts"] != "[]" else ()
        values["progress"] = json.loads(values["progress"]) if values["progress"] != "{}" else {}
        for name in ("handle", "exit"):
            values[name] = json.loads(values[name]) if values[name] else None
        values["sent_to"] = Destination.from_text(values["sent_to"])
        return cls(**values)


@dataclass(frozen=True)
class JobRecord:
    """Row of a job without its specification, and its newest attempt. Times are seconds since the epoch."""

    id: str
    name: str
    cluster: str
    backend: str
    state: JobState
    reason: str
    number: int  # of the newest attempt, 0 before the first
    revision: int
    created_at: float
    updated_at: float
    ended_at: float | None
    next_attempt_at: float | None
    cancel_requested_at: float | None
    cancel_grace_s: float | None
    poll_error_at: float | None
    claim_owner: str | None
    claim_expires_at: float | None
    source: str
    digests: Mapping[str, str]
    attempt: AttemptRecord | None
    owner: str = ""  # login name of who submitted it
    project: str = ""
    priority: int = 0
    group_id: str | None = None  # sweep, array, pipeline or schedule that it belongs to
    group_index: int | None = None  # its place there
    not_before: float | None = None
    deadline_at: float | None = None

    @classmethod
    def from_row(cls, row: tuple[Any, ...], attempt: AttemptRecord | None) -> JobRecord:
        """Return the record of a row of `JOB_COLUMNS`."""
        values: dict[str, Any] = dict(zip(JOB_COLUMNS, row, strict=True))
        number = values.pop("attempt")
        state, digests = JobState(values.pop("state")), json.loads(values.pop("digests"))
        return cls(**values, number=number, state=state, digests=digests, attempt=attempt)

    @property
    def position(self) -> Position:
        """The job's states, for `orc.orchestrator.ledger.lifecycle.advance`."""
        return Position(self.state, self.number, self.attempt.state if self.attempt else None)


ATTEMPT_COLUMNS = [each.name for each in fields(AttemptRecord)]
JOB_COLUMNS = [
    "attempt" if each.name == "number" else each.name for each in fields(JobRecord) if each.name != "attempt"
]


class Reservation(NamedTuple):
    """Slots of one host that one attempt holds."""

    cluster: str
    host: str
    job: str
    attempt: int
    node: int  # which of the attempt's nodes the host is
    slots: int
    at: float  # seconds since the epoch

    @property
    def marker(self) -> str:
        """The attempt's marker."""
        return AttemptId(self.job, self.attempt).marker


@dataclass(frozen=True)
class NewJob:
    """New job, as it is written into the ledger."""

    id: str
    name: str
    cluster: str
    backend: str
    source: str
    spec: Mapping[str, Any]
    digests: Mapping[str, str]
    tags: Mapping[str, str]
    origin: str = ""  # host and state directory that hold its snapshots and secrets
    owner: str = ""  # login name of who submits it
    project: str = ""
    priority: int = 0
    group_id: str | None = None
    group_index: int | None = None
    not_before: float | None = None
    deadline_at: float | None = None


class QueueEntry(NamedTuple):
    """New job, and what is written beside it."""

    job: NewJob
    reason: str = ""  # for which it waits
    ciphertext: str = ""  # of its secrets
    request: str = ""  # digest of the key of the request that makes it


@dataclass(frozen=True)
class EventRecord:
    """Event in a job's history."""

    id: int
    job: str
    attempt: int | None
    at: float
    kind: str
    data: Mapping[str, Any]

    def to_dict(self) -> dict[str, Any]:
        """JSON-able form."""
        return {**vars(self), "data": dict(self.data)}


@dataclass(frozen=True)
class JobUpdate:
    """Update of one job: events, and columns of the job and of its newest attempt."""

    events: tuple[Event, ...] = ()
    job_set: Mapping[str, Any] = field(default_factory=dict)
    attempt_set: Mapping[str, Any] = field(default_factory=dict)
    failed_hosts: tuple[str, ...] = ()  # hosts to blame for the attempt's end
    vacate: bool = False  # the attempt gives its hosts back although it has not ended

    def __bool__(self) -> bool:
        return bool(self.events or self.job_set or self.attempt_set)


# What scripts call the length of a training, as the job file passes it on.
_STEPS = ("max_steps", "total_steps", "num_steps", "max_train_steps", "train_steps", "steps")
_EPOCHS = ("epochs", "num_epochs", "max_epochs", "num_train_epochs", "train_epochs")


class JobSize(NamedTuple):
    """Size of a job by its specification: the most that it takes where it is elastic."""

    nodes: int
    gpus_per_node: int
    ranks_per_node: int

    @classmethod
    def of(cls, spec: Mapping[str, Any]) -> JobSize:
        """Return the size that *spec* requests."""
        resources = spec.get("resources") or {}
        nodes, gpus = int(str(resources.get("nodes", 1)).rpartition(":")[2]), int(resources.get("gpus_per_node") or 0)
        return cls(nodes, gpus, int(resources.get("procs_per_node") or gpus or 1))

    @property
    def gpus(self) -> int:
        """GPUs on all nodes."""
        return self.nodes * self.gpus_per_node

    @property
    def ranks(self) -> int:
        """Processes on all nodes."""
        return self.nodes * self.ranks_per_node


def share_done(spec: Mapping[str, Any], progress: Mapping[str, Any]) -> float | None:
    """Return the share of the training that *progress* is, between 0 and 1; `None` where its end is not known.

    The end is what the arguments of the program say: steps (``--max-steps 1000``), or else epochs (``epochs: 12``).
    """
    step, epoch = progress.get("step"), progress.get("epoch")
    lengths: dict[str, float] = {}
    for name, value in _numbers(spec.get("args") or ()):
        lengths.setdefault(name, value)
    for name in _STEPS:
        if lengths.get(name, 0) > 0 and isinstance(step, (int, float)):
            return min(max(step / lengths[name], 0.0), 1.0)
    for name in _EPOCHS:
        if lengths.get(name, 0) > 0 and isinstance(epoch, (int, float)):
            samples, length = progress.get("samples"), progress.get("of")
            known = isinstance(samples, (int, float)) and isinstance(length, (int, float)) and length > 0
            part = min(samples / length, 1.0) if known else 0.0  # type: ignore[operator]
            return min(max((epoch + part) / lengths[name], 0.0), 1.0)
    return None


def _numbers(args: Any) -> Iterator[tuple[str, float]]:
    """Yield the flags of *args* that have a number, by their names with underscores."""
    words = [str(word) for word in args]
    for word, following in zip(words, [*words[1:], ""], strict=False):
        name, separator, value = word.partition("=")
        if not name.startswith("-"):
            name = f"--{name}" if separator else ""  # `lr=0.1`, as Hydra takes it
        try:
            number = float(value if separator else following)
        except ValueError:
            continue
        if name and number == number:
            yield name.lstrip("-").replace("-", "_"), number


_MACHINE_KEYS = ("instance_type", "accelerator_type", "type")


def machine_of(options: Mapping[str, Any]) -> str:
    """Return the type of machine that *options* of a job or a cluster name; empty where they name none."""
    named = (options.get(key) for key in _MACHINE_KEYS)
    return next((value[:255] for value in named if isinstance(value, str)), "")


def columns_of_attempt(job: Mapping[str, str], hosts: int) -> dict[str, Any]:
    """Return the columns by which the use of an attempt of *job* on *hosts* is added up: they are beside its times, so
    that no job and no specification is read for a sum. *job* is its row: cluster, backend, owner, project and spec.
    """
    resources = json.loads(job["spec"]).get("resources") or {}
    least = int(str(resources.get("nodes", 1)).partition(":")[0])
    return {
        **{name: job[name] for name in ("cluster", "owner", "project")},
        "nodes": hosts or least,
        "gpus_per_node": int(resources.get("gpus_per_node") or 0),
        "machine": machine_of(resources.get("options", {}).get(job["backend"], {})),
    }


_COLUMNS = ", ".join([*(f"j.{column}" for column in JOB_COLUMNS), *(f"a.{column}" for column in ATTEMPT_COLUMNS)])


def conditions(
    job_ids: Sequence[str] | None, states: Collection[JobState] = ()
) -> Iterator[tuple[str, dict[str, Any]]]:
    """SQL conditions, each with its parameters, that together choose these jobs (all of them without *job_ids*) in one
    of *states* (in any without)."""
    in_state, parameters = one_of("j.state", map(str, sorted(states))) if states else ("1 = 1", {})
    if job_ids is None:
        yield in_state, parameters
        return
    for some in batches(job_ids):
        chosen, ids = one_of("j.id", some)
        yield f"{in_state} AND {chosen}", parameters | ids


def read_jobs(connection: Connection, condition: str, parameters: Mapping[str, Any]) -> list[JobRecord]:
    """Return the jobs of ``j`` (with their newest attempts ``a``) that meet *condition*."""
    # One statement, so that the job and its attempt belong together on every database and isolation level. Only
    # column names and placeholders are put into the text; all values are parameters.
    rows = connection.tuples(
        f"SELECT {_COLUMNS} FROM jobs j LEFT JOIN attempts a ON a.job_id = j.id AND a.number = j.attempt "  # noqa: S608
        f"WHERE {condition}",
        parameters,
    )
    split = len(JOB_COLUMNS)
    return [
        JobRecord.from_row(row[:split], AttemptRecord.from_row(row[split:]) if row[split] is not None else None)
        for row in rows
    ]


def jobs_of(connection: Connection, job_ids: Sequence[str]) -> list[JobRecord]:
    """Return these jobs, in no order; unknown ids are left out."""
    found: list[JobRecord] = []
    for condition, parameters in conditions(job_ids):
        found += read_jobs(connection, condition, parameters)
    return found


def select_jobs(connection: Connection, columns: str, job_ids: Sequence[str]) -> list[tuple[Any, ...]]:
    """Return *columns* of these jobs ``j``, in no order."""
    found: list[tuple[Any, ...]] = []
    for condition, parameters in conditions(job_ids):
        found += connection.tuples(f"SELECT {columns} FROM jobs j WHERE {condition}", parameters)  # noqa: S608
    return found


def read_events(connection: Connection, condition: str, parameters: Mapping[str, Any]) -> list[EventRecord]:
    """Return the events that meet *condition*, in its order."""
    rows = connection.tuples(
        f"SELECT id, job_id, attempt, at, kind, data FROM events WHERE {condition}",  # noqa: S608
        parameters,
    )
    return [EventRecord(id_, job, attempt, at, kind, json.loads(data)) for id_, job, attempt, at, kind, data in rows]


def read_reservations(connection: Connection, cluster: str | None, job_id: str | None) -> list[Reservation]:
    """Reservations of a cluster, of a job, or all; those of a job by attempt and node."""
    wanted = {"cluster": cluster, "job_id": job_id}
    chosen = {name: value for name, value in wanted.items() if value is not None}
    where = " AND ".join(f"{name} = :{name}" for name in chosen) or "1 = 1"
    order = "attempt, node" if job_id is not None else "cluster, host, at, job_id, node"
    rows = connection.tuples(
        "SELECT cluster, host, job_id, attempt, node, slots, at FROM reservations "  # noqa: S608
        f"WHERE {where} ORDER BY {order}",
        chosen,
    )
    return [Reservation(*row) for row in rows]


def read_failed_hosts(connection: Connection, job_id: str) -> dict[int, tuple[str, ...]]:
    """Hosts to blame for node failures of the job, by attempt."""
    found: dict[int, tuple[str, ...]] = {}
    query = "SELECT attempt, host FROM culprits WHERE job_id = :id ORDER BY attempt, host"
    for number, host in connection.tuples(query, {"id": job_id}):
        found[number] = (*found.get(number, ()), host)
    return found
