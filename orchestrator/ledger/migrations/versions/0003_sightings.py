"""Time at which the cluster of a job last reported it."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    """Make the table."""
    op.create_table(
        "sightings",
        sa.Column("job_id", sa.String(64), nullable=False),
        sa.Column("at", sa.Double, nullable=False),
        sa.PrimaryKeyConstraint("job_id", name="pk_sightings"),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name="fk_sightings_job_id"),
    )


def downgrade() -> None:
    """Remove the table."""
    op.drop_table("sightings")
