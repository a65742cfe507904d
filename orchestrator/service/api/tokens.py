"""Routes for tokens and the audit log; for admins."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Path, Query, Request
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field

from orc.orchestrator.ledger import audit as audit_rows
from orc.orchestrator.service import audit, tokens
from orc.orchestrator.service.auth import needs_role
from orc.orchestrator.service.context import ServiceDep
from orc.orchestrator.service.models import AuditList, NewToken, TokenList, TokenModel
from orc.orchestrator.service.rights import Kind, shows

router = APIRouter(tags=["tokens"])
_YEARS_S = 10 * 366 * 86400


class TokenWanted(BaseModel):
    """Token to be made."""

    model_config = ConfigDict(extra="forbid")

    user: str = Field(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9_.@+-]+$")
    role: Literal["viewer", "user", "admin"] = "user"
    expires_s: float | None = Field(
        tokens.DEFAULT_EXPIRES_S,
        gt=0,
        le=_YEARS_S,
        description="seconds until it ends, null for never; else 90 days",
    )
    note: str = Field("", max_length=200)


@router.get("/tokens", response_model=TokenList)
@shows(Kind.ACCOUNTS)
@needs_role("admin")
def list_tokens(service: ServiceDep) -> Any:
    """Return all tokens without their secrets."""
    with service.clients.client() as client:
        found = tokens.every(client.workspace.ledger)
    return JSONResponse({"tokens": [vars(record) for record in found]})


@router.post("/tokens", response_model=NewToken, status_code=201)
@shows(Kind.ACCOUNTS)
@needs_role("admin")
def create_token(request: Request, service: ServiceDep, wanted: TokenWanted) -> Any:
    """Make a token. Its secret is in this answer and nowhere else."""
    with service.clients.client(writes=True) as client:
        token, record = tokens.create(
            client.workspace.ledger,
            wanted.user,
            wanted.role,
            service.clock(),
            expires_s=wanted.expires_s,
            note=wanted.note,
        )
    audit.note_subject(request, record.id, user=record.user, role=record.role)
    return JSONResponse({**vars(record), "token": token}, 201)


@router.delete("/tokens/{token_id}", response_model=TokenModel)
@shows(Kind.ACCOUNTS)
@needs_role("admin")
def revoke_token(service: ServiceDep, token_id: Annotated[str, Path(max_length=64)]) -> Any:
    """Revoke a token from now on."""
    with service.clients.client(writes=True) as client:
        return JSONResponse(vars(tokens.revoke(client.workspace.ledger, token_id, service.clock())))


@router.get("/audit", response_model=AuditList)
@shows(Kind.ACCOUNTS)
@needs_role("admin")
def read_audit(
    service: ServiceDep,
    user: Annotated[str | None, Query(max_length=255)] = None,
    before: Annotated[int | None, Query(ge=1, lt=1 << 62, description="Id of a line; older ones are shown")] = None,
    limit: Annotated[int, Query(ge=1, le=500)] = 100,
) -> Any:
    """Return who has changed what, newest first."""
    with service.clients.client() as client, client.workspace.ledger.database.read() as connection:
        lines = [line.to_dict() for line in audit_rows.page(connection, limit, before, user=user)]
    return JSONResponse({"lines": lines, "next": lines[-1]["id"] if len(lines) == limit else None})
