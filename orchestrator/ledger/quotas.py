"""Quotas: how much one user or project may use at a time."""

from __future__ import annotations

from typing import NamedTuple

from orc.orchestrator.ledger.database import Connection


class Quota(NamedTuple):
    """Limit of one resource."""

    scope: str  # user, project
    name: str
    resource: str  # gpus, jobs, cost
    amount: float


def all_quotas(connection: Connection) -> list[Quota]:
    """Return all quotas."""
    rows = connection.tuples("SELECT scope, name, resource, amount FROM quotas ORDER BY scope, name, resource")
    return [Quota(*row) for row in rows]


def put(connection: Connection, quota: Quota) -> None:
    """Store a quota, in place of the one that there may be."""
    connection.execute(
        "INSERT INTO quotas (scope, name, resource, amount) VALUES (:scope, :name, :resource, :amount) "
        "ON CONFLICT (scope, name, resource) DO UPDATE SET amount = excluded.amount",
        quota._asdict(),
    )


def remove(connection: Connection, scope: str, name: str, resource: str) -> bool:
    """Forget a quota; False where there is none."""
    gone = "DELETE FROM quotas WHERE scope = :scope AND name = :name AND resource = :resource"
    return connection.execute(gone, {"scope": scope, "name": name, "resource": resource}) == 1
