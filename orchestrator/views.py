"""Views of jobs, groups and schedules for callers, the same from a ledger and from a service.

They are frozen. Times are seconds since the epoch. The types of their fields are the one schema: `encode` and `decode`,
the JSON form for writing and for reading, are derived from them; so is the OpenAPI description of the service, by
pydantic. A newer service may send keys that this version does not know: they are left out. What an older one does not
send has its default.
"""

from __future__ import annotations

import functools
import types
import typing
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from enum import Enum
from typing import TYPE_CHECKING, Annotated, Any, Union, cast

from orc.launchers.attempts.records import AttemptExit
from orc.orchestrator.ledger.records import EventRecord, share_done

if TYPE_CHECKING:
    from typing import Self

    from orc.orchestrator.ledger.records import AttemptRecord, JobRecord
    from orc.orchestrator.ledger.schedules import ScheduleRecord

_PLAIN: Mapping[Any, tuple[type, ...]] = {str: (str,), bool: (bool,), int: (int,), float: (int, float)}


class View:
    """Base of the frozen values that callers get: each has a JSON-able form."""

    __slots__ = ()

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON-able form."""
        encoded: dict[str, Any] = encode(self)
        return encoded

    @classmethod
    def from_record(cls, record: object, **given: Any) -> Self:
        """Return the view of *record*: its fields of the same names, but for those that are *given*."""
        return cls(
            **{name: getattr(record, name) for name in _names(cast(Hashable, cls)) if name not in given}, **given
        )


@functools.cache
def _names(kind: Hashable) -> tuple[str, ...]:
    return tuple(field.name for field in fields(cast(Any, kind)))


def encode(value: Any) -> Any:
    """Return the JSON-able form of *value*: of dataclasses, and of what holds them."""
    if value is None or isinstance(value, (str, int, float)):
        return value.value if isinstance(value, Enum) else value
    if is_dataclass(value):
        return {name: encode(getattr(value, name)) for name in _names(cast(Hashable, type(value)))}
    if isinstance(value, Mapping):
        return {str(key): encode(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [encode(item) for item in value]
    return value.value if isinstance(value, Enum) else value


def decode(kind: Any, data: Any) -> Any:
    """Return the value of type *kind* of which `encode` gave *data*.

    Raises:
        KeyError: A field without a default is missing.
        TypeError: *data* has another form.
        ValueError: A value is none that *kind* can have.
    """
    origin = typing.get_origin(kind)
    if origin is Annotated:
        return decode(typing.get_args(kind)[0], data)
    if origin in (Union, types.UnionType):
        return _decode_union(typing.get_args(kind), data)
    if origin is not None:
        return _decode_container(origin, typing.get_args(kind), data)
    if isinstance(kind, type) and is_dataclass(kind):
        return _decode_dataclass(kind, data)
    if isinstance(kind, type) and issubclass(kind, Enum):
        return kind(data)
    if kind in _PLAIN and (not isinstance(data, _PLAIN[kind]) or (isinstance(data, bool) and kind is not bool)):
        raise TypeError(f"{data!r:.80} is no {kind.__name__}")
    return data


def _decode_union(kinds: tuple[Any, ...], data: Any) -> Any:
    if data is None and type(None) in kinds:
        return None
    failure: Exception = TypeError("nothing of that")
    for kind in kinds:
        if kind is not type(None):
            try:
                return decode(kind, data)
            except (TypeError, ValueError, KeyError) as error:
                failure = error
    raise failure


def _decode_container(origin: Any, items: tuple[Any, ...], data: Any) -> Any:
    if issubclass(origin, Mapping):
        key, value = items
        return {(int(name) if key is int else name): decode(value, item) for name, item in dict(data).items()}
    if issubclass(origin, Sequence):
        if not isinstance(data, (list, tuple)):
            raise TypeError(f"{data!r:.80} is no list")
        decoded = [decode(items[0], item) for item in data]
        return tuple(decoded) if origin is tuple else decoded
    return data


def _decode_dataclass(kind: type, data: Any) -> Any:
    if not isinstance(data, Mapping):
        raise TypeError(f"{data!r:.80} is no object")
    given: dict[str, Any] = {}
    for member, hint in _fields(kind):
        if member.name in data:
            given[member.name] = decode(hint, data[member.name])
    try:
        return kind(**given)
    except TypeError as error:
        raise KeyError(str(error)) from None


@functools.cache
def _fields(kind: type) -> tuple[tuple[Any, Any], ...]:
    hints = typing.get_type_hints(kind, include_extras=True)
    return tuple((field, hints[field.name]) for field in fields(kind) if field.init)


TERMINAL = ("SUCCEEDED", "FAILED", "CANCELLED")


@dataclass(frozen=True)
class AttemptView(View):
    """Attempt at running a job."""

    number: int
    marker: str
    state: str
    cause: str | None  # crash, node_failure, preempted, timeout, cancelled, launch
    reason: str
    native_id: str | None  # the backend's own name for it
    hosts: tuple[str, ...]
    submitted_at: float | None
    started_at: float | None
    ended_at: float | None
    restarts: int  # times the backend itself requeued it
    progress: Mapping[str, Any]
    exit: AttemptExit | None
    failed_hosts: tuple[
        str, ...
    ] = ()  # hosts to blame for its node failure; the job's next attempts keep away from them

    @classmethod
    def of(cls, record: AttemptRecord, failed_hosts: tuple[str, ...] = ()) -> AttemptView:
        """Return the view of records of the ledger."""
        return cls.from_record(
            record,
            state=str(record.state),
            native_id=record.handle["native_id"] if record.handle else None,
            exit=AttemptExit.from_dict(record.exit) if record.exit is not None else None,
            failed_hosts=failed_hosts,
        )


@dataclass(frozen=True)
class JobView(View):
    """A job and all its attempts."""

    id: str
    name: str
    cluster: str
    backend: str
    state: str
    reason: str  # one line: why it waits, why it failed, why nothing can be said
    created_at: float
    updated_at: float
    ended_at: float | None
    next_attempt_at: float | None  # when a retry is due
    cancel_requested_at: float | None
    tags: Mapping[str, str]
    spec: Mapping[str, Any]
    digests: Mapping[str, str]  # {"code": ..., "runtime": ...}
    source: str  # the job file, or "job:<id>" for a resubmission
    attempts: tuple[AttemptView, ...] = field(default=())
    owner: str = ""  # login name of who submitted it
    project: str = ""
    priority: int = 0
    group_id: str | None = None  # sweep, array, pipeline or schedule that it belongs to
    group_index: int | None = None
    not_before: float | None = None
    deadline_at: float | None = None
    seen_at: float | None = None  # when its cluster last said something about it; seconds late at most
    share: float | None = None  # of its training that is done, where its arguments say how long it is

    @property
    def ended(self) -> bool:
        """True when the job will not change any more."""
        return self.state in TERMINAL

    @property
    def attempt(self) -> AttemptView | None:
        """The newest attempt."""
        return self.attempts[-1] if self.attempts else None

    @classmethod
    def of(
        cls,
        job: JobRecord,
        attempts: list[AttemptRecord],
        spec: Mapping[str, Any],
        tags: Mapping[str, str],
        failed_hosts: Mapping[int, tuple[str, ...]],
        seen_at: float | None = None,
    ) -> JobView:
        """Return the view of records of the ledger."""
        views = tuple(AttemptView.of(attempt, failed_hosts.get(attempt.number, ())) for attempt in attempts)
        done = share_done(spec, attempts[-1].progress) if attempts else None
        return cls.from_record(
            job, state=str(job.state), tags=tags, spec=spec, attempts=views, seen_at=seen_at, share=done
        )


@dataclass(frozen=True, slots=True)
class JobRow(View):
    """A job in a list. Its fields are in the order of `orc.orchestrator.ledger.store.read_rows`."""

    id: str
    name: str
    cluster: str
    backend: str
    state: str
    reason: str
    attempts: int
    created_at: float
    updated_at: float
    ended_at: float | None
    hosts: tuple[str, ...]  # of the newest attempt
    tags: Mapping[str, str]
    seen_at: float | None  # when its cluster last said something about it; seconds late at most
    owner: str = ""  # login name of who submitted it
    project: str = ""
    priority: int = 0
    group_id: str | None = None  # sweep, array, pipeline or schedule that it belongs to
    group_index: int | None = None
    not_before: float | None = None
    deadline_at: float | None = None
    started_at: float | None = None  # of the newest attempt
    nodes: int = 1
    gpus: int = 0  # on all nodes
    progress: Mapping[str, Any] = field(default_factory=dict)  # of the newest attempt: epoch, step, loss
    share: float | None = None  # of its training that is done, where its arguments say how long it is

    @property
    def age_from(self) -> float | None:
        """The time of which its state is; `None` where that is now: it has ended, or its cluster has not got it yet."""
        # Not `updated_at`: that its cluster cannot be reached is news of the job, too.
        return (self.seen_at or self.created_at) if self.state in ("PENDING", "RUNNING") else None


@dataclass(frozen=True)
class NotificationView(View):
    """Notification without anything secret."""

    id: int
    job: str
    event: str
    target: str  # of a URL, nothing behind its host
    state: str  # due, sent, dead
    tries: int
    next_at: float | None  # of one that is due
    error: str
    created_at: float


# An event is shown as it is stored.
EventView = EventRecord


@dataclass(frozen=True)
class MemberView(View):
    """Member of a group: its newest job, and the values in which it differs from the others."""

    index: int
    stage: str | None  # of a pipeline
    parameters: Mapping[str, str]
    job: JobRow
    submissions: int = 1  # how often it was submitted
    metrics: Mapping[str, float] = field(default_factory=dict)  # the newest of each, where they were asked for


@dataclass(frozen=True)
class GroupView(View):
    """Group of jobs as the ledger has it."""

    id: str
    kind: str
    name: str
    owner: str
    created_at: float
    max_parallel: int | None
    members: tuple[MemberView, ...] = ()  # in a list of groups none
    counts: Mapping[str, int] = field(default_factory=dict)  # of members in each state, in the order of the members

    @property
    def keys(self) -> list[str]:
        """The keys that its members differ in."""
        return list(dict.fromkeys(key for member in self.members for key in member.parameters))


@dataclass(frozen=True)
class ScheduleView(View):
    """Schedule of a job. Times are seconds since the epoch."""

    id: str
    name: str
    owner: str
    cron: str
    timezone: str
    enabled: bool
    next_at: float | None  # None while it is paused
    last_at: float | None
    last_job: str | None
    missed: str
    overlap: str
    source: str

    @classmethod
    def of(cls, record: ScheduleRecord) -> ScheduleView:
        """Return the view of a row."""
        odd = {name: record.spec[name] for name in ("missed", "overlap")}
        return cls.from_record(record, next_at=record.next_at if record.enabled else None, **odd)
