"""Calls about who may use a service, and what each has sent and changed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from orc.orchestrator.api.call import Bounds, Name, call
from orc.orchestrator.api.rights import Kind
from orc.orchestrator.api.session import LedgerSession
from orc.orchestrator.api.submissions import Digest
from orc.orchestrator.ledger.audit import AuditEntry
from orc.orchestrator.schema import View

_MOST_HASHES = 500_000


@dataclass(frozen=True)
class Me(View):
    """Holder of the token of a request."""

    user: str
    role: str
    token_id: str


@dataclass(frozen=True)
class AuditPage(View):
    """Lines of the audit log, newest first; ``next`` is the `before` of the page after it."""

    lines: list[AuditEntry]
    next: int | None


@dataclass(frozen=True)
class MissingContents(View):
    """Contents that are to be sent, and the bytes that one upload may have."""

    missing: list[str]
    limit: int


@call("GET", "/me", shows=Kind.OWN)
def who_am_i(session: LedgerSession) -> Me:
    """Return the caller's identity."""
    return Me(session.caller.user, session.caller.role, session.caller.token_id)


@call("GET", "/audit", shows=Kind.ACCOUNTS, role="admin")
def read_audit(
    session: LedgerSession,
    user: Name | None = None,
    before: Annotated[int | None, Bounds("Id of a line; older ones are shown", ge=1, lt=1 << 62)] = None,
    limit: Annotated[int, Bounds(ge=1, le=500)] = 100,
) -> AuditPage:
    """Return who has changed what, newest first."""
    from orc.orchestrator.ledger import audit

    with session.workspace.ledger.database.read() as connection:
        lines = audit.page(connection, limit, before, user=user)
    return AuditPage(lines, lines[-1].id if len(lines) == limit else None)


@call("POST", "/bundles/missing", shows=Kind.OWN)
def find_missing(
    session: LedgerSession, hashes: Annotated[Sequence[Digest], Bounds(max_length=_MOST_HASHES)]
) -> MissingContents:
    """Return the contents that are to be sent: they are not here, or the caller has never sent them."""
    from orc.orchestrator.api.submitting import missing_contents

    caller = session.caller
    return MissingContents(missing_contents(session.workspace, caller.user, hashes), caller.max_upload)
