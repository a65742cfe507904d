"""Leases in tables of the ledger: a row is one process's, until it gives it back or its time is over.

Whoever has lost its lease changes nothing in the row any more. Such a table has the columns ``lease_owner`` and
``lease_expires_at``.
"""

from __future__ import annotations

from collections.abc import Mapping

from orc.orchestrator.ledger.database import Connection


def take(
    connection: Connection, table: str, key: Mapping[str, str], owner: str, now: float, ttl_s: float, due: str = "1 = 1"
) -> bool:
    """Take the row with *key* for *ttl_s*, and make it where there is none; False while another owner has it.

    *due* is what else has to be true of the row, in SQL; it may name ``:now``.
    """
    names = ", ".join(key)
    connection.execute(
        f"INSERT INTO {table} ({names}) VALUES ({', '.join(f':{name}' for name in key)}) "  # noqa: S608
        f"ON CONFLICT ({names}) DO NOTHING",
        key,
    )
    # A lease that ends later than any lease given now was given before the clock was set back.
    taken = connection.execute(
        f"UPDATE {table} SET lease_owner = :owner, lease_expires_at = :expires WHERE {_is(key)} AND {due} AND "  # noqa: S608
        "(lease_owner IS NULL OR lease_owner = :owner OR lease_expires_at <= :now OR lease_expires_at > :latest)",
        {**key, "owner": owner, "expires": now + ttl_s, "now": now, "latest": now + 10 * ttl_s},
    )
    return taken == 1


def give_back(connection: Connection, table: str, key: Mapping[str, str], owner: str, **changes: object) -> bool:
    """Give the row back with *changes* of its columns; False, and nothing is changed, where *owner* has lost it."""
    also = "".join(f", {name} = :{name}" for name in changes)
    given_back = connection.execute(
        f"UPDATE {table} SET lease_owner = NULL, lease_expires_at = NULL{also} "  # noqa: S608
        f"WHERE {_is(key)} AND lease_owner = :owner",
        {**key, "owner": owner, **changes},
    )
    return given_back == 1


def _is(key: Mapping[str, str]) -> str:
    return " AND ".join(f"{name} = :{name}" for name in key)
