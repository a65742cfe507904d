"""Tokens of the service: 256 random bits each, of which the ledger keeps the SHA-256 alone."""

from __future__ import annotations

import hashlib
import secrets

from orc.launchers.errors import LaunchError
from orc.orchestrator.ledger import content_holders
from orc.orchestrator.ledger import tokens as rows
from orc.orchestrator.ledger.store import Ledger
from orc.orchestrator.ledger.tokens import TokenRecord

PREFIX = "orc_"
ROLES = ("viewer", "user", "admin")  # each may do what those before it may
DEFAULT_EXPIRES_S = 90 * 86400.0  # of a token for which nothing else was said, by the command or by REST
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
