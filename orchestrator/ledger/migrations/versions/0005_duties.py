"""Holders of contents, copies of jobs that may come late, duties that one process does, and polls for each account."""

from __future__ import annotations

import json

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"


def upgrade() -> None:
    """Make the tables. What was seen of clusters is seen again with the next poll."""
    op.create_table(
        "content_holders",
        sa.Column("username", sa.String(255), nullable=False),
        sa.Column("digest", sa.String(64), nullable=False),
        sa.Column("at", sa.Double, nullable=False),
        sa.PrimaryKeyConstraint("username", "digest", name="pk_content_holders"),
    )
    op.create_table(
        "late_copies",
        sa.Column("job_id", sa.String(64), nullable=False),
        sa.Column("attempt", sa.Integer, nullable=False),
        sa.Column("hosts", sa.Text, nullable=False),
        sa.Column("next_at", sa.Double, nullable=False),
        sa.Column("until", sa.Double, nullable=False),
        sa.PrimaryKeyConstraint("job_id", "attempt", name="pk_late_copies"),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name="fk_late_copies_job_id"),
    )
    op.create_index("ix_late_copies_next_at", "late_copies", ["next_at"])
    op.create_table(
        "duties",
        sa.Column("name", sa.String(64), nullable=False),
        sa.Column("lease_owner", sa.String(255)),
        sa.Column("lease_expires_at", sa.Double),
        sa.Column("next_at", sa.Double),
        sa.Column("done_at", sa.Double),
        sa.PrimaryKeyConstraint("name", name="pk_duties"),
    )
    op.create_table(
        "audit_intents",
        sa.Column("id", sa.String(64), nullable=False),
        sa.Column("at", sa.Double, nullable=False),
        sa.Column("line", sa.Text, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_audit_intents"),
    )
    _make_polls("cluster", "account")


def downgrade() -> None:
    """Remove the tables with their contents. Changes that were let in become lines of the audit log."""
    _settle()
    _make_polls("cluster")
    for table in ("audit_intents", "duties", "late_copies", "content_holders"):
        op.drop_table(table)


def _settle() -> None:
    connection = op.get_bind()
    for at, text in connection.execute(sa.text("SELECT at, line FROM audit_intents ORDER BY at")).all():
        line = json.loads(text)
        connection.execute(
            sa.text(
                "INSERT INTO audit (at, username, token_id, address, action, subject, data) "
                "VALUES (:at, :user, :token_id, :address, :action, :subject, :data)"
            ),
            {
                "token_id": None,
                "address": "",
                "subject": "",
                **{name: line[name] for name in ("user", "token_id", "address", "action", "subject") if name in line},
                "at": at,
                "data": '{"status":null}',
            },
        )


def _make_polls(*key: str) -> None:
    op.drop_table("cluster_polls")
    op.create_table(
        "cluster_polls",
        *(sa.Column(name, sa.String(255), nullable=False) for name in key),
        sa.Column("lease_owner", sa.String(255)),
        sa.Column("lease_expires_at", sa.Double),
        sa.Column("next_at", sa.Double),
        sa.Column("interval_s", sa.Double),
        sa.Column("polled_at", sa.Double),
        sa.Column("answered_at", sa.Double),
        sa.Column("error", sa.Text),
        sa.PrimaryKeyConstraint(*key, name="pk_cluster_polls"),
    )
