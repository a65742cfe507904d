"""Audit log: user, action, time and address of each change. Append-only, as events are.

What may change something is written down before it begins (an *intent*), and gives way to its line in one transaction
when it is answered. An intent that stays behind is a change of a process that ended meanwhile: it becomes a line as it
is. So no change is without a line. What takes long says from time to time that it is worked on.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from orc.orchestrator.ledger.database import Connection, insert
from orc.orchestrator.ledger.records import dump

_COLUMNS = "id, at, username, token_id, address, action, subject, data"


@dataclass(frozen=True)
class AuditEntry:
    """Row of the audit log."""

    id: int
    at: float  # seconds since the epoch
    user: str
    token_id: str | None
    address: str
    action: str
    subject: str
    data: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def from_row(cls, row: tuple[Any, ...]) -> AuditEntry:
        """Return the entry of a row."""
        id_, at, user, token_id, address, action, subject, data = row
        return cls(id_, at, user, token_id, address, action, subject, json.loads(data))

    def to_dict(self) -> dict[str, Any]:
        """JSON-able form."""
        return {**vars(self), "data": dict(self.data)}


def append(
    connection: Connection,
    *,
    at: float,
    user: str,
    action: str,
    subject: str = "",
    token_id: str | None = None,
    address: str = "",
    data: Mapping[str, Any] | None = None,
) -> None:
    """Add an entry. *data* holds no secrets."""
    row = {"at": at, "username": user, "token_id": token_id, "address": address, "action": action, "subject": subject}
    insert(connection, "audit", {**row, "data": dump(data or {})})


def intend(connection: Connection, intent: str, *, at: float, **line: Any) -> None:
    """Write down what is about to be done; *intent* is an id of its own, *line* the arguments of `append`."""
    insert(connection, "audit_intents", {"id": intent, "at": at, "line": dump(line)})


def answer(connection: Connection, intent: str | None, *, at: float, **line: Any) -> None:
    """Add the entry of what was answered, in place of its intent, where it has one."""
    if intent is not None:
        connection.execute("DELETE FROM audit_intents WHERE id = :id", {"id": intent})
    append(connection, at=at, **line)


def keep_alive(connection: Connection, intents: Iterable[str], now: float) -> None:
    """Note that these changes are worked on."""
    connection.executemany(
        "UPDATE audit_intents SET alive_at = :now WHERE id = :id", [{"id": intent, "now": now} for intent in intents]
    )


def settle(connection: Connection, before: float) -> int:
    """Turn intents that have not been touched since that time into entries, with no status; return how many."""
    rows = connection.tuples(
        "SELECT id, at, line FROM audit_intents WHERE COALESCE(alive_at, at) < :before ORDER BY at", {"before": before}
    )
    settled = 0
    for intent, at, text in rows:
        if connection.execute("DELETE FROM audit_intents WHERE id = :id", {"id": intent}):  # nobody was faster
            append(connection, at=at, **{**json.loads(text), "data": {"status": None}})
            settled += 1
    return settled


def prune(connection: Connection, before: float, now: float, *, user: str) -> int:
    """Remove the entries of before that time, as *user*; return how many. It is an entry, too."""
    # Only what is older than a limit can be deleted, and no limit outlives its transaction.
    insert(connection, "audit_limits", {"before": before})
    removed = connection.execute("DELETE FROM audit WHERE at < :before", {"before": before})
    connection.execute("DELETE FROM audit_limits")
    if removed:
        append(connection, at=now, user=user, action="prune_audit", data={"before": before, "lines": removed})
    return removed


def count(connection: Connection, before: float) -> int:
    """Return how many entries are older than that time."""
    found: int = connection.tuples("SELECT count(*) FROM audit WHERE at < :before", {"before": before})[0][0]
    return found


def page(connection: Connection, limit: int, before: int | None = None, *, user: str | None = None) -> list[AuditEntry]:
    """Return the newest entries (of *user*) before the entry *before*, newest first, *limit* at most."""
    wanted = {"id < :before": ("before", before), "username = :user": ("user", user)}
    parts = [part for part, (_, value) in wanted.items() if value is not None] or ["1 = 1"]
    rows = connection.tuples(
        f"SELECT {_COLUMNS} FROM audit WHERE {' AND '.join(parts)} ORDER BY id DESC LIMIT {int(limit)}",  # noqa: S608
        {name: value for name, value in wanted.values() if value is not None},
    )
    return [AuditEntry.from_row(row) for row in rows]
