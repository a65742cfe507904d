"""Specifications of jobs, as the ledger keeps them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from orc.launchers.errors import SpecError
from orc.orchestrator.workspace import Workspace

if TYPE_CHECKING:
    from orc.launchers.spec import JobSpec


def stored_spec(ws: Workspace, job_id: str) -> JobSpec:
    """Return the job's specification from the ledger. Raises `SpecError` for one of another version of orc."""
    from orc.launchers.spec import JobSpec

    try:
        return JobSpec.model_validate(ws.ledger.spec(job_id))
    except ValueError as error:
        raise SpecError(
            f"the stored specification does not fit this version of orc: {error}",
            where=job_id,
            hint="submit the job file again",
        ) from None
