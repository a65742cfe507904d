"""Hosts that attempts hold, and hosts that have failed a job."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    """Make the tables."""
    op.create_table(
        "reservations",
        sa.Column("cluster", sa.String(255), nullable=False),
        sa.Column("host", sa.String(255), nullable=False),
        sa.Column("job_id", sa.String(64), nullable=False),
        sa.Column("attempt", sa.Integer, nullable=False, autoincrement=False),
        sa.Column("node", sa.Integer, nullable=False, autoincrement=False),
        sa.Column("slots", sa.Integer, nullable=False),
        sa.Column("at", sa.Double, nullable=False),
        sa.PrimaryKeyConstraint("job_id", "attempt", "node", name="pk_reservations"),
        sa.ForeignKeyConstraint(
            ["job_id", "attempt"], ["attempts.job_id", "attempts.number"], name="fk_reservations_job_id_attempt"
        ),
    )
    op.create_index("ix_reservations_cluster_host", "reservations", ["cluster", "host"])
    op.create_table(
        "culprits",
        sa.Column("job_id", sa.String(64), nullable=False),
        sa.Column("attempt", sa.Integer, nullable=False, autoincrement=False),
        sa.Column("host", sa.String(255), nullable=False),
        sa.PrimaryKeyConstraint("job_id", "attempt", "host", name="pk_culprits"),
        sa.ForeignKeyConstraint(
            ["job_id", "attempt"], ["attempts.job_id", "attempts.number"], name="fk_culprits_job_id_attempt"
        ),
    )


def downgrade() -> None:
    """Remove the tables."""
    op.drop_table("culprits")
    op.drop_table("reservations")
