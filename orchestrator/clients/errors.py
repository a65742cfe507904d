"""Errors of clients: the same classes whether a ledger or a service has raised them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from orc.launchers.errors import (
    BackendError,
    BackendUnreachable,
    BundleError,
    LaunchError,
    NoRoom,
    RenderError,
    SpecError,
)
from orc.orchestrator.api.call import GroupNotFound as GroupNotFound
from orc.orchestrator.api.call import JobNotFound as JobNotFound
from orc.orchestrator.api.call import NotAllowed as NotAllowed
from orc.orchestrator.api.call import SnapshotMissing as SnapshotMissing


class ServiceUnreachable(BackendUnreachable):
    """The service did not answer, or not as a service of orc does. Jobs may run all the same."""


class NotLoggedIn(LaunchError):
    """The service refuses the token: there is none, it has expired, or it was revoked."""


class NeedsLedger(LaunchError):
    """The command or method works on the ledger itself and cannot go through a service."""


_CLASSES: tuple[type[LaunchError], ...] = (
    LaunchError, SpecError, RenderError, BundleError, BackendError, BackendUnreachable, NoRoom, JobNotFound,
    GroupNotFound, ServiceUnreachable, NotLoggedIn, NotAllowed, NeedsLedger, SnapshotMissing,
)  # fmt: skip
_KINDS = {kind.__name__: kind for kind in _CLASSES}
_BY_STATUS = {401: NotLoggedIn, 403: NotAllowed, 422: SpecError, 503: ServiceUnreachable}
_OF_A_JOB = re.compile(r"/api/v1/jobs/[^/]+(/.*)?")
_HINTS = {
    401: "`orc login URL` stores a token; an administrator makes one with `orc token create`",
    429: "the service limits how often it is asked; try again in a moment",
}


def kind_of(error: LaunchError) -> str:
    """Return the name under which an error travels: its class, or the nearest one above that every client has."""
    return next((cls.__name__ for cls in type(error).__mro__ if cls.__name__ in _KINDS), "LaunchError")


def error_of(status: int, body: Any, *, path: str, url: str) -> LaunchError:
    """Return the error that a service has answered, of the class that the ledger's client would have raised.

    What, where and hint are those in *body*, the JSON of the answer, as far as it is some; the *url* of the service is
    for answers that say nothing.
    """
    said = body.get("error") if isinstance(body, Mapping) else None
    told = said if isinstance(said, Mapping) else {}
    kind = _KINDS.get(str(told.get("kind", "")))
    if kind is None:
        missing = JobNotFound if _OF_A_JOB.fullmatch(path) else LaunchError
        kind = missing if status == 404 else _BY_STATUS.get(status, LaunchError)
    what = str(told.get("what") or f"the service answered with status {status}")
    where = str(told.get("where") or ("" if told else url))
    error = kind(what, where=where, hint=str(told.get("hint") or _HINTS.get(status, "")))
    if isinstance(error, SnapshotMissing) and isinstance(body, Mapping):
        error.digests = tuple(str(digest) for digest in body.get("missing", ()))
    return error
