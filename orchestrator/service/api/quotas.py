"""Routes for quotas."""

from __future__ import annotations

from typing import Any, Literal

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field

from orc.orchestrator.ledger import quotas
from orc.orchestrator.service.audit import note_subject
from orc.orchestrator.service.auth import needs_role
from orc.orchestrator.service.context import ServiceDep
from orc.orchestrator.service.models import QuotaList
from orc.orchestrator.service.rights import Kind, shows

router = APIRouter(tags=["quotas"])


class QuotaWanted(BaseModel):
    """Quota to be set; without an amount it is removed."""

    model_config = ConfigDict(extra="forbid")

    scope: Literal["user", "project"]
    name: str = Field(min_length=1, max_length=255, pattern=r"^[\w.@+-]+$")
    resource: Literal["gpus", "jobs", "cost"]
    amount: float | None = Field(None, ge=0, le=1e12)


@router.get("/quotas", response_model=QuotaList)
@shows(Kind.SERVICE)
def list_quotas(service: ServiceDep) -> Any:
    """Return what users and projects may use at a time."""
    with service.clients.client() as client, client.workspace.ledger.database.read() as connection:
        found = quotas.all_quotas(connection)
    return JSONResponse({"quotas": [quota._asdict() for quota in found]})


@router.put("/quotas", response_model=QuotaList)
@shows(Kind.SERVICE)
@needs_role("admin")
def set_quota(request: Request, service: ServiceDep, wanted: QuotaWanted) -> Any:
    """Set or remove a quota; return all."""
    with service.clients.client(writes=True) as client, client.workspace.ledger.database.write() as connection:
        if wanted.amount is None:
            quotas.remove(connection, wanted.scope, wanted.name, wanted.resource)
        else:
            quotas.put(connection, quotas.Quota(wanted.scope, wanted.name, wanted.resource, wanted.amount))
        found = quotas.all_quotas(connection)
    note_subject(request, f"{wanted.scope} {wanted.name}", resource=wanted.resource, amount=wanted.amount)
    return JSONResponse({"quotas": [quota._asdict() for quota in found]})
