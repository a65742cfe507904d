"""Routes that make and change jobs: submit, resubmit, cancel, tags."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from fastapi import APIRouter, Header, Request
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field, SecretStr

from orc.launchers.errors import SpecError
from orc.orchestrator.client import Client
from orc.orchestrator.service.api.jobs import JobId
from orc.orchestrator.service.audit import note_subject
from orc.orchestrator.service.auth import Principal, PrincipalDep
from orc.orchestrator.service.contents import missing_trees
from orc.orchestrator.service.context import ServiceDep
from orc.orchestrator.service.models import JobModel
from orc.orchestrator.service.rights import Kind, shows
from orc.orchestrator.service.submitting import Submitter

router = APIRouter(tags=["jobs"])
Digest = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
Text = Annotated[str, Field(max_length=4096)]
Secrets = Annotated[dict[str, SecretStr], Field(max_length=100)]
Key = Annotated[
    str | None,
    Header(alias="Idempotency-Key", min_length=8, max_length=200, description="The same key is the same job"),
]


class Body(BaseModel):
    """Body of a request; it has no other keys."""

    model_config = ConfigDict(extra="forbid")


class Digests(Body):
    """Trees that a job is made of."""

    code: Digest
    environment: Digest | None = None

    def given(self) -> dict[str, str]:
        """Return those that there are."""
        return {name: digest for name, digest in self.model_dump().items() if digest is not None}


class NewJob(Body):
    """Job to submit: its specification, as `orc render --json` shows it, and what was uploaded for it."""

    spec: dict[str, Any]
    digests: Digests
    source: Text = ""
    secrets: Secrets = {}


class Again(Body):
    """Changes of a job that is submitted again, ``key.path=VALUE`` each, and values of its secrets."""

    set: list[Text] | dict[str, Any] = Field(default=[], max_length=100)
    secrets: Secrets = {}


class Grace(Body):
    """Seconds between SIGTERM and SIGKILL; the job's own by default."""

    grace_s: float | None = Field(None, ge=0, le=30 * 86400)


class CancelledJob(JobModel):
    """Job whose cancellation was requested, and clusters that could not be reached yet."""

    unreachable: dict[str, str]


def values_of(secrets: Mapping[str, SecretStr]) -> dict[str, str]:
    """Return the values of secrets that came with a request."""
    return {name: value.get_secret_value() for name, value in secrets.items()}


def refusal_of_missing(
    client: Client, principal: Principal, digests: Sequence[Mapping[str, str]]
) -> JSONResponse | None:
    """Return the answer that names the trees which the caller has not uploaded; `None` where all are here."""
    trees = list(dict.fromkeys(digest for of_one in digests for digest in of_one.values()))
    missing = missing_trees(client, principal.user, trees)
    if not missing:
        return None
    error = {"what": "the service lacks the code of the job", "where": "digests", "hint": "upload it first"}
    return JSONResponse({"error": {**error, "kind": "SnapshotMissing"}, "missing": missing}, 409)


@router.post("/jobs", response_model=JobModel)
@shows(Kind.OWN)
def submit_job(
    request: Request, service: ServiceDep, principal: PrincipalDep, new: NewJob, idempotency_key: Key = None
) -> Any:
    """Submit a job; a second request with the same `Idempotency-Key` answers with the same job.

    Where a tree has not been uploaded by who asks it is 409, and ``missing`` names it.
    """
    digests = new.digests.given()
    with service.clients.client(writes=True) as client:
        if (missing := refusal_of_missing(client, principal, [digests])) is not None:
            return missing
        submitter = Submitter(client, principal.user, idempotency_key, principal.may_change)
        view = submitter.submit(new.spec, digests, new.source, values_of(new.secrets))
    note_subject(request, view.id)
    return JSONResponse(view.to_dict())


@router.post("/jobs/{job_id}/resubmit", response_model=JobModel)
@shows(Kind.OWN)
def resubmit_job(
    request: Request,
    service: ServiceDep,
    principal: PrincipalDep,
    job_id: JobId,
    again: Again,
    idempotency_key: Key = None,
) -> Any:
    """Submit a new job with the code of another one, and its specification after changes."""
    from orc.orchestrator.engine.changed_spec import as_overrides

    overrides = again.set if isinstance(again.set, list) else as_overrides(again.set)
    with service.clients.client(writes=True) as client:
        submitter = Submitter(client, principal.user, idempotency_key, principal.may_change)
        view = submitter.resubmit(job_id, overrides, values_of(again.secrets))
    note_subject(request, view.id, like=job_id)
    return JSONResponse(view.to_dict())


@router.post("/jobs/{job_id}/cancel", response_model=CancelledJob)
@shows(Kind.STATE, parts=(Kind.PLACES,))
def cancel_job(service: ServiceDep, job_id: JobId, how: Grace) -> Any:
    """Cancel a job; one that has ended stays as it is."""
    untold: dict[str, str] = {}
    with service.clients.client() as client:
        (view,) = client.cancel([job_id], grace_s=how.grace_s, on_unreachable=untold.update)
    return JSONResponse({**view.to_dict(), "unreachable": untold})


@router.patch("/jobs/{job_id}/tags", response_model=JobModel)
@shows(Kind.STATE, parts=(Kind.PLACES,))
def change_tags(service: ServiceDep, job_id: JobId, tags: dict[str, str | None]) -> Any:
    """Set tags of a job; null removes one, others stay."""
    if len(tags) > 100:
        raise SpecError("100 tags at most")
    with service.clients.client(writes=True) as client:
        return JSONResponse(client.set_tags(job_id, tags).to_dict())
