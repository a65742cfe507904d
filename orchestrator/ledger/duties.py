"""Duties: work that one process at a time does, and not before its time."""

from __future__ import annotations

from orc.orchestrator.ledger.database import Connection


def take(connection: Connection, name: str, owner: str, now: float, ttl_s: float) -> bool:
    """Take the duty *name* for *ttl_s*, where it is due; False while it is not, or while another process has it."""
    connection.execute(
        "INSERT INTO duties (name) VALUES (:name) ON CONFLICT (name) DO NOTHING",
        {"name": name},
    )
    # A lease or a time that is later than any given now was written before the clock was set back.
    taken = connection.execute(
        "UPDATE duties SET lease_owner = :owner, lease_expires_at = :expires WHERE name = :name "
        "AND (next_at IS NULL OR next_at <= :now OR done_at > :now) "
        "AND (lease_owner IS NULL OR lease_expires_at <= :now OR lease_expires_at > :latest)",
        {"name": name, "owner": owner, "expires": now + ttl_s, "now": now, "latest": now + 10 * ttl_s},
    )
    return taken == 1


def done(connection: Connection, name: str, owner: str, now: float, next_at: float) -> bool:
    """Give the duty back until *next_at*; False where *owner* has lost it meanwhile."""
    given_back = connection.execute(
        "UPDATE duties SET lease_owner = NULL, lease_expires_at = NULL, next_at = :next, done_at = :now "
        "WHERE name = :name AND lease_owner = :owner",
        {"name": name, "owner": owner, "next": next_at, "now": now},
    )
    return given_back == 1
