"""Errors of the API: one form for all of them, ``{"error": {"what", "where", "hint"}}``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from starlette.exceptions import HTTPException as StarletteHTTPException

from orc.launchers.errors import LaunchError
from orc.orchestrator.api.call import SnapshotMissing
from orc.orchestrator.clients.errors import kind_of
from orc.orchestrator.workspace import OutOfReach


class ErrorText(BaseModel):
    """Description of what went wrong, where, and what to do about it."""

    what: str
    where: str
    hint: str
    kind: str = ""


class ErrorBody(BaseModel):
    """Body of every answer that is an error."""

    error: ErrorText


class ApiError(Exception):
    """A request that is refused."""

    def __init__(
        self, status: int, what: str, *, where: str = "", hint: str = "", headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(what)
        self.status, self.what, self.where, self.hint, self.headers = status, what, where, hint, headers


# Names of exception classes; the first match in the class's MRO counts.
_STATUS = {
    "JobNotFound": 404,
    "GroupNotFound": 404,
    "NotAllowed": 403,
    "LedgerError": 503,
    "BackendUnreachable": 503,
    "SpecError": 422,
    "RenderError": 422,
    "BundleError": 409,
    "BackendError": 409,
    "LaunchError": 400,
}
_DESCRIPTIONS = {
    400: "The request is wrong",
    401: "No token, or one that does not count",
    403: "The token may not do this",
    404: "There is no such thing",
    409: "The state of things forbids it",
    413: "The body is too large",
    422: "A parameter or the body does not have the form that is wanted",
    429: "Too many requests; Retry-After says when to come again",
    503: "The ledger or a cluster cannot be reached",
}
# What every route may answer beside its own.
ERROR_RESPONSES: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorBody, "description": text} for status, text in _DESCRIPTIONS.items()
}


def status_of(error: LaunchError) -> int:
    """Return the HTTP status for an *error* of the layers below."""
    if type(error).__name__.startswith("NoSuch"):
        return 404
    return next(_STATUS[cls.__name__] for cls in type(error).__mro__ if cls.__name__ in _STATUS)


def error_response(
    status: int,
    what: str,
    *,
    where: str = "",
    hint: str = "",
    headers: Mapping[str, str] | None = None,
    kind: str = "",
    more: Mapping[str, Any] | None = None,
) -> JSONResponse:
    """Return the answer for an error; *kind* is the class that clients raise, *more* are keys beside the error."""
    body = {"error": {"what": what, "where": where, "hint": hint, **({"kind": kind} if kind else {})}, **(more or {})}
    return JSONResponse(body, status, headers=dict(headers or {}))


def install(app: FastAPI) -> None:
    """Give every error of *app* the one form."""

    @app.exception_handler(ApiError)
    async def refused(_request: Request, error: ApiError) -> JSONResponse:
        return error_response(error.status, error.what, where=error.where, hint=error.hint, headers=error.headers)

    @app.exception_handler(LaunchError)
    async def failed(_request: Request, error: LaunchError) -> JSONResponse:
        # Who may read a job may not know the accounts of its owner.
        hint = error.advice if isinstance(error, OutOfReach) and not error.is_public else error.hint
        more = {"missing": list(error.digests)} if isinstance(error, SnapshotMissing) else {}
        status, kind = status_of(error), kind_of(error)
        return error_response(status, error.what, where=error.where, hint=hint, kind=kind, more=more)

    @app.exception_handler(RequestValidationError)
    async def invalid(_request: Request, error: RequestValidationError) -> JSONResponse:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        return error_response(422, str(first["msg"]), where=where, hint="/openapi.json says what is wanted")

    @app.exception_handler(StarletteHTTPException)
    async def http(_request: Request, error: StarletteHTTPException) -> JSONResponse:
        return error_response(error.status_code, str(error.detail), headers=error.headers)
