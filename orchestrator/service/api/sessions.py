"""Sessions of the web page: a token, kept by the browser in a cookie that scripts cannot read."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field, SecretStr

from orc.orchestrator.api.access import Me
from orc.orchestrator.api.schedules import Done
from orc.orchestrator.service.auth import COOKIE, address_of, authenticate, public
from orc.orchestrator.service.context import ServiceDep
from orc.orchestrator.service.errors import ApiError

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
