"""Rights: who may see what, as one table. Every route and every feed says which kinds of things it shows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, TypeVar

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
