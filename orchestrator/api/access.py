"""Calls about who may use a service, and what each has sent and changed.

Tokens are 256 random bits each, of which the ledger keeps the SHA-256 alone.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from orc.launchers.errors import LaunchError
from orc.orchestrator.api.call import ROLES, Bounds, Digest, Kind, Name, call
from orc.orchestrator.api.session import LedgerSession
from orc.orchestrator.ledger import content_holders
from orc.orchestrator.ledger import tokens as rows
from orc.orchestrator.ledger.audit import AuditEntry
from orc.orchestrator.ledger.store import Ledger
from orc.orchestrator.ledger.tokens import TokenRecord
from orc.orchestrator.views import View

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


PREFIX = "orc_"
DEFAULT_EXPIRES_S = 90 * 86400.0  # of a token for which nothing else was said, by the command or by REST
_YEARS_S = 10 * 366 * 86400
_USED_EVERY_S = 60.0  # how exact `last_used_at` is: a write for every request would be most of its work


class NoSuchToken(LaunchError):
    """No token has that id."""


def digest(token: str) -> str:
    """Return the hash of *token* for the ledger. It is random, so a fast hash is enough, and comparing is no leak."""
    return hashlib.sha256(token.encode("utf-8", "surrogatepass")).hexdigest()


def create(
    ledger: Ledger, user: str, role: str, now: float, *, expires_s: float | None = None, note: str = ""
) -> tuple[str, TokenRecord]:
    """Write a new token into *ledger*; return it, which cannot be read again, and its record.

    Raises:
        LaunchError: The name or the role cannot be.
    """
    if not user or len(user) > 64 or not user.isprintable() or user != user.strip():
        raise LaunchError(f"{user!r} is no name of a user", hint="up to 64 printable characters")
    if role not in ROLES:
        raise LaunchError(f"there is no role {role!r}", hint=f"roles are {', '.join(ROLES)}")
    token = PREFIX + secrets.token_urlsafe(32)
    expires_at = None if expires_s is None else now + expires_s
    record = TokenRecord(f"tok-{secrets.token_hex(6)}", user, role, note, now, expires_at)
    with ledger.database.write() as connection:
        rows.create(connection, record, digest(token))
    return token, record


def find(ledger: Ledger, token: str, now: float) -> TokenRecord | None:
    """Return the record of a *token* that is valid now, and note its use; `None` for every other text."""
    # The database compares hashes: how long that takes says nothing about a token whose hash nobody can choose.
    with ledger.database.read() as connection:
        record = rows.find(connection, digest(token))
    if record is None or not record.valid(now):
        return None
    if now - (record.last_used_at or 0.0) > _USED_EVERY_S and not ledger.volatile:
        with ledger.database.write() as connection:
            rows.note_used(connection, record.id, now)
    return record


def still_counts(ledger: Ledger, token_id: str, now: float) -> bool:
    """Return True while the token of that id is valid: for what goes on after it was shown."""
    return any(record.id == token_id and record.valid(now) for record in every(ledger))


def every(ledger: Ledger) -> list[TokenRecord]:
    """Return all tokens, newest first, revoked and expired ones included."""
    with ledger.database.read() as connection:
        return rows.all_tokens(connection)


def any_valid(ledger: Ledger, now: float) -> bool:
    """Return True when there is a token that opens the service."""
    return any(record.valid(now) for record in every(ledger))


def revoke(ledger: Ledger, token_id: str, now: float) -> TokenRecord:
    """Revoke a token from now on; return its record. One that is revoked already stays as it is.

    With the last valid token of a user it is forgotten which contents the user has had.

    Raises:
        NoSuchToken: There is none of that id.
    """
    with ledger.database.write() as connection:
        rows.revoke(connection, token_id, now)
        every_token = rows.all_tokens(connection)
        found = [record for record in every_token if record.id == token_id]
        users = {record.user for record in every_token if record.valid(now)}
        for record in found:
            if record.user not in users:  # who gets the name next has not had the contents of who had it before
                content_holders.forget_user(connection, record.user)
    if not found:
        raise NoSuchToken(f"no such token: {token_id}", hint="`orc token list` shows them")
    return found[0]


@dataclass(frozen=True)
class Tokens(View):
    """All tokens without their secrets."""

    tokens: list[TokenRecord]


@dataclass(frozen=True)
class NewToken(TokenRecord, View):
    """New token; its secret is shown this once."""

    token: str = ""


@call("GET", "/tokens", shows=Kind.ACCOUNTS, role="admin")
def list_tokens(session: LedgerSession) -> Tokens:
    """Return all tokens without their secrets."""
    return Tokens(every(session.workspace.ledger))


@call("POST", "/tokens", shows=Kind.ACCOUNTS, role="admin", status=201)
def create_token(
    session: LedgerSession,
    user: Annotated[str, Bounds(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9_.@+-]+$")],
    role: Annotated[str, Bounds(choices=ROLES)] = "user",
    expires_s: Annotated[
        float | None, Bounds("Seconds until it ends, null for never; else 90 days", gt=0, le=_YEARS_S)
    ] = DEFAULT_EXPIRES_S,
    note: Annotated[str, Bounds(max_length=200)] = "",
) -> NewToken:
    """Make a token. Its secret is in this answer and nowhere else."""
    ws = session.workspace
    token, record = create(ws.ledger, user, role, ws.clock(), expires_s=expires_s, note=note)
    session.caller.note(record.id, user=record.user, role=record.role)
    return NewToken(**vars(record), token=token)


@call("DELETE", "/tokens/{token_id}", shows=Kind.ACCOUNTS, role="admin")
def revoke_token(session: LedgerSession, token_id: Annotated[str, Bounds(max_length=64)]) -> TokenRecord:
    """Revoke a token from now on."""
    ws = session.workspace
    return revoke(ws.ledger, token_id, ws.clock())
