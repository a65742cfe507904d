"""Destinations of attempts, which are found there when their cluster is described anew; limits of the audit log."""

from __future__ import annotations

import json
from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"

_ATTEMPTS = sa.table("attempts", *(sa.column(name) for name in ("job_id", "number", "handle", "sent_to")))


def upgrade() -> None:
    """Make the columns. What was known of accounts moves out of the handles."""
    op.add_column("attempts", sa.Column("sent_to", sa.Text))
    for row, handle in _with_handles():
        login, _, root = str(handle.pop("account", "")).partition(" ")
        sent_to = {"login": login, **({"root": root} if root else {})}
        _update(row, handle=_dump(handle), sent_to=_dump(sent_to))
    _make_copies("sent_to")
    op.add_column("audit_intents", sa.Column("alive_at", sa.Double))
    op.create_table(
        "audit_limits",
        sa.Column("before", sa.Double, nullable=False),
        sa.PrimaryKeyConstraint("before", name="pk_audit_limits"),
    )
    _guard("(SELECT 1 FROM audit_limits WHERE before > OLD.at)")


def downgrade() -> None:
    """Remove the columns. Accounts move back into the handles."""
    _guard("")
    op.drop_table("audit_limits")
    op.drop_column("audit_intents", "alive_at")
    _make_copies()
    for row, handle in _with_handles():
        sent_to = json.loads(row.sent_to) if row.sent_to else {}
        if sent_to.get("login"):
            _update(row, handle=_dump({**handle, "account": f"{sent_to['login']} {sent_to.get('root') or ''}".strip()}))
    op.drop_column("attempts", "sent_to")


def _with_handles() -> list[tuple[Any, dict[str, Any]]]:
    rows = op.get_bind().execute(sa.select(_ATTEMPTS).where(_ATTEMPTS.c.handle.is_not(None))).all()
    return [(row, json.loads(row.handle)) for row in rows]


def _update(row: Any, **values: str) -> None:
    there = (_ATTEMPTS.c.job_id == row.job_id) & (_ATTEMPTS.c.number == row.number)
    op.get_bind().execute(sa.update(_ATTEMPTS).where(there).values(**values))


def _dump(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)


def _make_copies(*more: str) -> None:
    """Make the table of late copies with these columns in its key, and what is in it."""
    names = ("job_id", "attempt", "hosts", "next_at", "until")
    held = op.get_bind().execute(sa.text(f"SELECT {', '.join(names)} FROM late_copies ORDER BY until")).all()  # noqa: S608
    op.drop_table("late_copies")
    made = op.create_table(
        "late_copies",
        sa.Column("job_id", sa.String(64), nullable=False),
        sa.Column("attempt", sa.Integer, nullable=False),
        *(sa.Column(name, sa.Text, nullable=False) for name in more),
        sa.Column("hosts", sa.Text, nullable=False),
        sa.Column("next_at", sa.Double, nullable=False),
        sa.Column("until", sa.Double, nullable=False),
        sa.PrimaryKeyConstraint("job_id", "attempt", *more, name="pk_late_copies"),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name="fk_late_copies_job_id"),
    )
    op.create_index("ix_late_copies_next_at", "late_copies", ["next_at"])
    last = {(row.job_id, row.attempt): dict(zip(names, row, strict=True)) for row in held}
    if last:
        op.bulk_insert(made, [{**row, **dict.fromkeys(more, "")} for row in last.values()])


def _guard(unless: str) -> None:
    """Let only those lines of the audit log be deleted of which *unless* exists."""
    if op.get_bind().dialect.name == "sqlite":
        op.execute("DROP TRIGGER audit_no_delete")
        op.execute(
            "CREATE TRIGGER audit_no_delete BEFORE DELETE ON audit "
            + (f"WHEN NOT EXISTS {unless} " if unless else "")
            + "BEGIN SELECT RAISE(ABORT, 'the audit log is append-only'); END"
        )
        return
    allowed = f"IF TG_OP = 'DELETE' AND EXISTS {unless} THEN RETURN OLD; END IF; " if unless else ""
    op.execute(
        "CREATE OR REPLACE FUNCTION audit_append_only() RETURNS trigger LANGUAGE plpgsql AS "
        f"$$ BEGIN {allowed}RAISE EXCEPTION 'the audit log is append-only'; END $$"
    )
