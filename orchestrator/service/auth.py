"""The guard of the service: identity and role of the caller. Every route passes it, or is declared public."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, Any, TypeVar

import anyio.to_thread
from fastapi import APIRouter, Depends, Request, Security
from fastapi.responses import JSONResponse
from fastapi.security import APIKeyCookie, HTTPBearer
from pydantic import BaseModel, ConfigDict, Field, SecretStr

from orc.orchestrator.api import access
from orc.orchestrator.api.access import Me
from orc.orchestrator.api.call import RIGHTS, SAFE_METHODS, GroupNotFound, Kind, Principal, Reader, shown_kinds
from orc.orchestrator.api.groups import Done
from orc.orchestrator.client import Client, JobNotFound
from orc.orchestrator.ledger import groups, schedules
from orc.orchestrator.service.context import Service, ServiceDep, service_of
from orc.orchestrator.service.errors import ApiError
from orc.orchestrator.service.request_limits import too_many

COOKIE = "orc_session"
PAGE_HEADER = "X-Orc-Request"  # a page of another site cannot send it
_ENDPOINT = TypeVar("_ENDPOINT", bound=Callable[..., object])

# They declare the ways in for OpenAPI; `guard` reads both.
_bearer = HTTPBearer(auto_error=False, description="A token of `orc token create`")
_cookie = APIKeyCookie(
    name=COOKIE, auto_error=False, description="The token as a session of the web page; set by POST /api/v1/login"
)


def public(endpoint: _ENDPOINT) -> _ENDPOINT:
    """Mark a route that needs no token."""
    endpoint.__dict__["orc_public"] = True
    return endpoint


def needs_role(role: str) -> Callable[[_ENDPOINT], _ENDPOINT]:
    """Mark a route that needs another role than viewer (to read) or user (to change)."""

    def mark(endpoint: _ENDPOINT) -> _ENDPOINT:
        endpoint.__dict__["orc_role"] = role
        return endpoint

    return mark


def role_of_route(endpoint: object, method: str) -> str | None:
    """Return the role that a route needs; `None` for a public one."""
    if getattr(endpoint, "orc_public", False):
        return None
    role: str = getattr(endpoint, "orc_role", "viewer" if method in SAFE_METHODS else "user")
    return role


def address_of(request: Request) -> str:
    """Return the address that a request came from; behind a trusted proxy, the one that the proxy names."""
    return request.client.host if request.client else "?"


def authenticate(service: Service, token: str, address: str) -> Principal:
    """Return the holder of *token*. Raises `ApiError` for an invalid one, or too many of them from *address*.

    It is looked up first: who shares an address with somebody who guesses is not refused. A guess that is right would
    be told by its answer so, but 256 random bits are not guessed.
    """
    with service.clients.client() as client:
        record = access.find(client.workspace.ledger, token, service.clock())
    if record is None:
        service.rates.refuse_guessing(address)
        raise _unauthorized("this token does not count: it is unknown, expired or revoked")
    return Principal(record.user, record.role, record.id)


def _unauthorized(what: str) -> ApiError:
    hint = "send `Authorization: Bearer orc_...`; an admin makes tokens with `orc token create`"
    return ApiError(401, what, hint=hint, headers={"WWW-Authenticate": "Bearer"})


def token_of(request: Request) -> tuple[str, bool]:
    """Return the token that *request* brings (empty without one), and whether it is that of a session (a cookie)."""
    scheme, _, token = request.headers.get("authorization", "").partition(" ")
    if not scheme:
        return request.cookies.get(COOKIE, "").strip(), True
    return token.strip() if scheme.lower() == "bearer" else "", False


def admit(service: Service, request: Request, role: str) -> Principal:
    """Return the sender of *request*, who has *role*. Raises `ApiError`."""
    token, by_cookie = token_of(request)
    if not token:
        raise _unauthorized("a token is needed")
    principal = authenticate(service, token, address_of(request))
    request.state.principal = principal
    if by_cookie and request.method not in SAFE_METHODS and PAGE_HEADER not in request.headers:
        raise ApiError(403, f"requests of a session that change something need the header {PAGE_HEADER}")
    if not principal.has_role(role):
        raise ApiError(403, f"this needs the role {role}; this token has the role {principal.role}")
    return principal


async def guard(
    request: Request,
    service: Annotated[Service, Depends(service_of)],
    _shown: Annotated[object, Security(_bearer)] = None,
    _session: Annotated[object, Security(_cookie)] = None,
) -> None:
    """Let a request pass that its route allows; the `Principal` is ``request.state.principal`` from then on.

    Here alone it is decided who may do what: a route needs a role, what changes a job, a group or a schedule
    (``{job_id}``, ``{group_id}``, ``{schedule_id}`` in its path) needs its owner, and what it shows a right to that
    (`rights`).
    Raises `ApiError`.
    """
    role = role_of_route(request.scope.get("endpoint"), request.method)
    if role is not None:  # a public route answers when all threads are at work, too
        await anyio.to_thread.run_sync(_admit_to_route, service, request, role)


def _admit_to_route(service: Service, request: Request, role: str) -> None:
    principal = admit(service, request, role)
    if wait := service.rates.retry_after("token", principal.token_id):
        raise too_many(wait)
    endpoint = request.scope.get("endpoint")
    for kind in shown_kinds(endpoint):
        if RIGHTS[kind] != frozenset(Reader):
            _check_reader(service, request, principal, kind, getattr(endpoint, "orc_shows_of", ()))
    if request.method in SAFE_METHODS:
        return
    for parameter, owners_of in _OWNERS.items():
        if (name := request.path_params.get(parameter)) is not None:
            with service.clients.client() as client:
                _check_owners(principal, str(name), owners_of(client, str(name)))


def _check_reader(
    service: Service, request: Request, principal: Principal, kind: Kind, parameters: Iterable[str]
) -> None:
    given = {**request.query_params, **request.path_params}
    names = [str(given[parameter]) for parameter in parameters if given.get(parameter)]
    for name in names:
        with service.clients.client() as client:
            (owner,) = _owners_of_job(client, name)
        if not principal.may_see(kind, owner):
            what = f"{name} belongs to {owner or 'nobody'}: only its owner or an admin may read its {kind.name.lower()}"
            raise ApiError(403, what)
    if not names and not principal.may_see(kind):
        raise ApiError(403, f"this token has no right to see this: {kind}")


def _check_owners(principal: Principal, name: str, owners: set[str]) -> None:
    for owner in sorted(owners):
        if not principal.may_change(owner):
            what = f"{name} belongs to {owner or 'nobody'}" if len(owners) == 1 else f"{owner} has a job in {name}"
            raise ApiError(403, f"{what}: only its owner or an admin may change it")


def _owners_of_job(client: Client, job_id: str) -> set[str]:
    job = client.workspace.ledger.job(job_id)
    if job is None:
        raise JobNotFound(f"no such job: {job_id}", hint="GET /api/v1/jobs lists the jobs")
    return {job.owner}


def _owners_of_group(client: Client, group_id: str) -> set[str]:
    """Return the owners of the group and of its jobs: an admin may have resubmitted some."""
    with client.workspace.ledger.database.read() as connection:
        group = groups.find(connection, group_id)
        if group is None:
            raise GroupNotFound(f"no such group: {group_id}", hint="GET /api/v1/groups lists the groups")
        return {group.owner, *groups.owners(connection, group_id)}


def _owners_of_schedule(client: Client, schedule_id: str) -> set[str]:
    with client.workspace.ledger.database.read() as connection:
        schedule = schedules.find(connection, schedule_id)
    if schedule is None:
        raise ApiError(404, f"no such schedule: {schedule_id}", hint="GET /api/v1/schedules lists the schedules")
    return {schedule.owner}


_OWNERS: Mapping[str, Callable[[Client, str], set[str]]] = {
    "job_id": _owners_of_job,
    "group_id": _owners_of_group,
    "schedule_id": _owners_of_schedule,
}


def principal_of(request: Request) -> Principal:
    """Return the caller; for routes that are not public."""
    found: Principal = request.state.principal
    return found


PrincipalDep = Annotated[Principal, Depends(principal_of)]


router = APIRouter(tags=["sessions"])


class Login(BaseModel):
    """Token that opens a session."""

    model_config = ConfigDict(extra="forbid")

    token: SecretStr = Field(max_length=200)


@router.post("/login", response_model=Me)
@public
def login(request: Request, service: ServiceDep, shown: Login) -> Any:
    """Open a session of this browser with a token; sets a cookie."""
    if request.headers.get("sec-fetch-site", "same-origin") not in ("same-origin", "none"):
        raise ApiError(403, "a session is opened by this service's own page")
    token = shown.token.get_secret_value().strip()
    principal = authenticate(service, token, address_of(request))
    request.state.principal = principal
    answer = JSONResponse(vars(principal))
    answer.set_cookie(
        COOKIE, token, httponly=True, samesite="strict", secure=service.settings.https, path="/", max_age=30 * 86400
    )
    return answer


@router.post("/logout", response_model=Done)
@public
def logout(service: ServiceDep) -> Any:
    """Close the session of this browser. The token stays valid elsewhere."""
    answer = JSONResponse({"ok": True})
    answer.delete_cookie(COOKIE, httponly=True, samesite="strict", secure=service.settings.https, path="/")
    return answer
