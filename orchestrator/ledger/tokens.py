"""Tokens of a service: whose they are and what they allow. Only their hashes are stored."""

from __future__ import annotations

from dataclasses import dataclass

from orc.orchestrator.ledger.database import Connection, insert

_COLUMNS = "id, username, role, note, created_at, expires_at, revoked_at, last_used_at"


@dataclass(frozen=True)
class TokenRecord:
    """Row of a token without its hash. Times are seconds since the epoch."""

    id: str
    user: str
    role: str  # viewer, user, admin
    note: str
    created_at: float
    expires_at: float | None = None
    revoked_at: float | None = None
    last_used_at: float | None = None

    def valid(self, now: float) -> bool:
        """Return True when it may be used."""
        return self.revoked_at is None and (self.expires_at is None or now < self.expires_at)


def create(connection: Connection, token: TokenRecord, hashed: str) -> None:
    """Store a new token by its hash."""
    insert(connection, "tokens", {**dict(zip(_COLUMNS.split(", "), vars(token).values(), strict=True)), "hash": hashed})


def find(connection: Connection, hashed: str) -> TokenRecord | None:
    """Return the token of this hash, whether it is still valid or not."""
    rows = connection.tuples(f"SELECT {_COLUMNS} FROM tokens WHERE hash = :hash", {"hash": hashed})  # noqa: S608
    return TokenRecord(*rows[0]) if rows else None


def all_tokens(connection: Connection) -> list[TokenRecord]:
    """Return all tokens, newest first."""
    rows = connection.tuples(f"SELECT {_COLUMNS} FROM tokens ORDER BY created_at DESC, id")  # noqa: S608
    return [TokenRecord(*row) for row in rows]


def revoke(connection: Connection, token_id: str, now: float) -> bool:
    """End a token's life; False where there is none, or it was revoked before."""
    revoked = "UPDATE tokens SET revoked_at = :now WHERE id = :id AND revoked_at IS NULL"
    return connection.execute(revoked, {"now": now, "id": token_id}) == 1


def note_used(connection: Connection, token_id: str, now: float) -> None:
    """Remember when a token was used."""
    connection.execute("UPDATE tokens SET last_used_at = :now WHERE id = :id", {"now": now, "id": token_id})
