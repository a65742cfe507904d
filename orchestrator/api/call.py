"""Call of the API: a typed function, the route at which a service answers it, and who may see what it shows.

Imports nothing heavy.
"""

from __future__ import annotations

import functools
import inspect
import re
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated, Any, Concatenate, Generic, ParamSpec, Protocol, TypeVar

from orc.launchers.errors import BundleError, LaunchError
from orc.orchestrator.views import decode

P = ParamSpec("P")
R = TypeVar("R")
PREFIX = "/api/v1"
SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
SLOW_S = 300.0  # of a call that does something at a cluster, which may have to be reached first
_QUICK_S = 60.0


class JobNotFound(LaunchError):
    """No job, or more than one, answers to that name."""


class GroupNotFound(LaunchError):
    """No group, or more than one, answers to that name."""


class NotAllowed(LaunchError):
    """The user may not do that: another user's job, or a role without that right."""


class SnapshotMissing(BundleError):
    """The service lacks trees that a job is made of: they are uploaded, and the request is sent again."""

    digests: tuple[str, ...] = ()


class Bounds:
    """Bounds of an argument, in its type: ``Annotated[int, Bounds(ge=1, le=500)]``.

    The service checks them and describes them in OpenAPI. *header* is the header that brings the argument.
    """

    def __init__(self, text: str = "", *, choices: tuple[str, ...] = (), header: str = "", **limits: Any) -> None:
        self.description, self.choices, self.header = text, choices, header
        self.limits = limits  # of a field of pydantic: ge, gt, le, lt, min_length, max_length, pattern, ...


JobId = Annotated[str, Bounds("Id of the job", min_length=1, max_length=64)]
Key = Annotated[str, Bounds("The same key is the same job", header="Idempotency-Key", min_length=8, max_length=200)]
Name = Annotated[str, Bounds(max_length=255)]
Text = Annotated[str, Bounds(max_length=4096)]
Secret = Annotated[str, Bounds(json_schema_extra={"format": "password", "writeOnly": True})]
Secrets = Annotated[Mapping[str, Secret], Bounds("Values of the job's secrets by their names", max_length=100)]


class Session(Protocol):
    """Place where calls are carried out: a ledger, or a service."""

    def carry_out(self, call: Call[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
        """Return the result of *call*. Raises `LaunchError`."""
        ...

    def sleep(self, seconds: float) -> None:
        """Wait so many seconds."""
        ...


@dataclass(frozen=True)
class Parameter:
    """Argument of a call, and the part of a request that brings it: path, query, header or body."""

    name: str
    kind: Any  # its type
    default: Any  # `inspect.Parameter.empty` where it has to be given
    place: str

    @property
    def bounds(self) -> Bounds:
        """The bounds that its type names."""
        return next((one for one in getattr(self.kind, "__metadata__", ()) if isinstance(one, Bounds)), Bounds())


@dataclass(frozen=True)
class Call(Generic[P, R]):
    """Function over a ledger, and the route at which a service answers it."""

    function: Callable[Concatenate[Any, P], R]
    method: str
    path: str  # below `PREFIX`
    role: str  # that the caller needs
    writes: bool  # the ledger has to be writable
    whole_body: str  # the argument that is the body, instead of one of its keys
    shows: tuple[Kind, ...]  # what the result is about: without the right to one there is none
    parts: tuple[Kind, ...]  # what the function leaves out for callers who may not see it
    of: tuple[str, ...]  # arguments that are ids of the jobs that it shows
    asks_clusters: bool
    status: int

    @property
    def timeout_s(self) -> float:
        """Seconds that a client waits for the answer."""
        return SLOW_S if self.asks_clusters else _QUICK_S

    @property
    def name(self) -> str:
        """Name of its operation in OpenAPI, and of its action in the audit log."""
        return self.function.__name__

    @functools.cached_property
    def parameters(self) -> tuple[Parameter, ...]:
        """Arguments after the session."""
        hints = typing.get_type_hints(self.function, include_extras=True)
        in_path = re.findall(r"{(\w+)}", self.path)
        _, *given = inspect.signature(self.function).parameters.values()

        def parameter(one: inspect.Parameter) -> Parameter:
            made = Parameter(one.name, hints[one.name], one.default, "query")
            if one.name in in_path:
                place = "path"
            elif made.bounds.header:
                place = "header"
            else:
                place = "body" if self.method in ("POST", "PUT", "PATCH") else "query"
            return Parameter(one.name, made.kind, one.default, place)

        return tuple(parameter(one) for one in given)

    @functools.cached_property
    def result(self) -> Any:
        """Type of the result."""
        return typing.get_type_hints(self.function)["return"]

    def bind(self, *args: P.args, **kwargs: P.kwargs) -> dict[str, Any]:
        """Return the arguments by name, without those that were left out."""
        bound = inspect.signature(self.function).bind(None, *args, **kwargs).arguments
        return dict(list(bound.items())[1:])

    def read(self, data: Any) -> R:
        """Return the result from its JSON. Raises what `decode` raises."""
        result: R = decode(self.result, data)
        return result

    def __call__(self, session: Session, /, *args: P.args, **kwargs: P.kwargs) -> R:
        """Return the result of the call in *session*. Raises `LaunchError`."""
        return session.carry_out(self, *args, **kwargs)


CALLS: dict[str, Call[Any, Any]] = {}  # by name, in the order in which their modules are imported


def call(
    method: str,
    path: str,
    *,
    shows: Kind | tuple[Kind, ...],
    parts: tuple[Kind, ...] = (),
    of: tuple[str, ...] = ("job_id",),
    role: str = "",
    writes: bool | None = None,
    whole_body: str = "",
    asks_clusters: bool = False,
    status: int = 200,
) -> Callable[[Callable[Concatenate[Any, P], R]], Call[P, R]]:
    """Make a function over a session a call of the API.

    Args:
        method: HTTP method of its route.
        path: Path of its route, with arguments in braces.
        shows: What the result is about; a caller without the right to it gets none (`orc.orchestrator.api.call`).
        parts: What the function leaves out for callers who may not see it.
        of: Arguments that are ids of the jobs that it shows.
        role: Role that it needs; viewer to read and user to change unless given.
        writes: Whether the ledger has to be writable; where something is changed unless given.
        whole_body: Argument that is the body, instead of one of its keys.
        asks_clusters: Whether clusters may have to be reached first.
        status: HTTP status of the answer.

    Returns:
        The decorator.
    """
    reads = method in SAFE_METHODS

    def made(function: Callable[Concatenate[Any, P], R]) -> Call[P, R]:
        described = Call(
            function, method, path, role or ("viewer" if reads else "user"), not reads if writes is None else writes,
            whole_body, (shows,) if isinstance(shows, Kind) else shows, parts, of, asks_clusters, status,
        )  # fmt: skip
        if CALLS.setdefault(described.name, described) is not described:
            raise ValueError(f"two calls have the name {described.name}")
        return described

    return made


Digest = Annotated[str, Bounds(pattern="^[0-9a-f]{64}$")]
Stage = Annotated[str, Bounds(max_length=64, pattern=r"^([A-Za-z0-9][A-Za-z0-9_-]*)?$")]


@dataclass(frozen=True)
class Digests:
    """Trees that a job is made of."""

    code: Digest
    environment: Digest | None = None

    def given(self) -> dict[str, str]:
        """Return those that there are."""
        return {name: digest for name, digest in vars(self).items() if digest is not None}


@dataclass(frozen=True)
class NewMember:
    """Job as it is sent, by itself or as a member of a group: there without the keys that are `shared`."""

    index: Annotated[int, Bounds(ge=0, lt=1 << 31)]
    digests: Digests
    spec: Mapping[str, Any] = field(default_factory=dict)
    stage: Stage = ""
    parameters: Annotated[Mapping[Text, Text], Bounds(max_length=100)] = field(default_factory=dict)


ROLES = ("viewer", "user", "admin")  # each may do what those before it may
_Endpoint = TypeVar("_Endpoint", bound=Callable[..., Any])


class Reader(StrEnum):
    """Relation of a reader to the owner of a thing."""

    OWNER = "owner"
    SUBMITTER = "other submitter"
    VIEWER = "viewer"
    ADMIN = "admin"


class Kind(StrEnum):
    """Kind of thing that a service shows."""

    OWN = "what the request itself has brought, or whose it is"
    SERVICE = "the service: metrics of it, clusters, quotas, costs"
    STATE = "jobs, attempts, events, groups, schedules: their states, reasons and specifications"
    LOGS = "logs"
    METRICS = "what a job measures"
    CODE = "code of a job"
    PLAN = "plan of an attempt: paths, accounts and commands of its cluster"
    PLACES = "path of a job file on its owner's machine, and receivers of notifications"
    ACCOUNTS = "tokens, the audit log, and what went wrong with the accounts of others"


_EVERYBODY = frozenset(Reader)
_THEIRS = frozenset({Reader.OWNER, Reader.ADMIN})
RIGHTS: Mapping[Kind, frozenset[Reader]] = {
    Kind.OWN: _EVERYBODY,
    Kind.SERVICE: _EVERYBODY,
    Kind.STATE: _EVERYBODY,
    Kind.LOGS: _EVERYBODY,
    Kind.METRICS: _EVERYBODY,
    Kind.CODE: _THEIRS,
    Kind.PLAN: _THEIRS,
    Kind.PLACES: _THEIRS,
    Kind.ACCOUNTS: frozenset({Reader.ADMIN}),
}


def reader_of(user: str, role: str, owner: str) -> Reader:
    """Return who *user*, with a token of *role*, is to what belongs to *owner*."""
    if role == "admin":
        return Reader.ADMIN
    if owner and user == owner:
        return Reader.OWNER
    return Reader.SUBMITTER if role == "user" else Reader.VIEWER


@dataclass(frozen=True)
class Principal:
    """Holder of a valid token, or the user of this process."""

    user: str
    role: str = "admin"
    token_id: str = ""

    def has_role(self, role: str) -> bool:
        """Return True when this role includes *role*."""
        return ROLES.index(self.role) >= ROLES.index(role)

    def may_see(self, kind: Kind, owner: str = "") -> bool:
        """Return True when what is of *kind* and belongs to *owner* may be seen."""
        return reader_of(self.user, self.role, owner) in RIGHTS[kind]

    def may_change(self, owner: str) -> bool:
        """Return True when what belongs to *owner* may be changed: by an admin, or by its owner in the role user."""
        return self.role == "admin" or (self.role == "user" and self.user == owner)


def shows(
    *kinds: Kind, parts: tuple[Kind, ...] = (), of: tuple[str, ...] = ("job_id",)
) -> Callable[[_Endpoint], _Endpoint]:
    """Mark a route with what it shows: of the jobs whose ids are in its parameters *of*, where that matters.

    *kinds* are what the answer is about: without the right to one there is no answer. *parts* are left out for those
    who may not see them.
    """

    def mark(endpoint: _Endpoint) -> _Endpoint:
        endpoint.__dict__["orc_shows"], endpoint.__dict__["orc_parts"] = kinds, parts
        endpoint.__dict__["orc_shows_of"] = of
        return endpoint

    return mark


def shown_kinds(endpoint: object) -> tuple[Kind, ...]:
    """Return what a route is about; a route that says nothing is for admins."""
    found: tuple[Kind, ...] = getattr(endpoint, "orc_shows", (Kind.ACCOUNTS,))
    return found


def without_places(view: Mapping[str, Any]) -> dict[str, Any]:
    """Return the JSON form of a job, an event or a schedule without `Kind.PLACES`."""
    found = dict(view)
    if not str(found.get("source", "job:")).startswith("job:"):  # else it is another job
        found["source"] = ""
    for name in ("spec", "data"):
        if isinstance(found.get(name), Mapping):
            found[name] = without_places(found[name])
    return found | {"notify": []} if "notify" in found else found
