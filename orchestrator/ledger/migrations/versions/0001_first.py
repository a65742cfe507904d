"""Jobs, attempts, events and tags."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None


def upgrade() -> None:
    """Make the first tables."""
    op.create_table(
        "jobs",
        sa.Column("id", sa.String(64), nullable=False),
        sa.Column("name", sa.String(255), nullable=False),
        sa.Column("cluster", sa.String(255), nullable=False),
        sa.Column("backend", sa.String(64), nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("reason", sa.Text, nullable=False),
        sa.Column("attempt", sa.Integer, nullable=False),
        sa.Column("revision", sa.Integer, nullable=False),
        sa.Column("created_at", sa.Double, nullable=False),
        sa.Column("updated_at", sa.Double, nullable=False),
        sa.Column("ended_at", sa.Double),
        sa.Column("next_attempt_at", sa.Double),
        sa.Column("cancel_requested_at", sa.Double),
        sa.Column("cancel_grace_s", sa.Double),
        sa.Column("poll_error_at", sa.Double),
        sa.Column("claim_owner", sa.String(255)),
        sa.Column("claim_expires_at", sa.Double),
        sa.Column("source", sa.Text, nullable=False),
        sa.Column("digests", sa.Text, nullable=False),
        sa.Column("spec", sa.Text, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_jobs"),
    )
    op.create_index("ix_jobs_created_at", "jobs", ["created_at"])
    op.create_index("ix_jobs_name_created_at", "jobs", ["name", "created_at"])
    op.create_index("ix_jobs_state_created_at", "jobs", ["state", "created_at"])
    op.create_table(
        "attempts",
        sa.Column("job_id", sa.String(64), nullable=False),
        sa.Column("number", sa.Integer, nullable=False, autoincrement=False),
        sa.Column("marker", sa.String(80), nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("cause", sa.String(16)),
        sa.Column("reason", sa.Text, nullable=False),
        sa.Column("plan_digest", sa.String(64), nullable=False),
        sa.Column("handle", sa.Text),
        sa.Column("prepared_at", sa.Double, nullable=False),
        sa.Column("submitted_at", sa.Double),
        sa.Column("started_at", sa.Double),
        sa.Column("ended_at", sa.Double),
        sa.Column("first_negative_at", sa.Double),
        sa.Column("cancel_sent_at", sa.Double),
        sa.Column("restarts", sa.Integer, nullable=False),
        sa.Column("hosts", sa.Text, nullable=False),
        sa.Column("progress", sa.Text, nullable=False),
        sa.Column("exit", sa.Text),
        sa.PrimaryKeyConstraint("job_id", "number", name="pk_attempts"),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name="fk_attempts_job_id"),
        sa.UniqueConstraint("marker", name="uq_attempts_marker"),
    )
    op.create_table(
        "events",
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer, "sqlite"), nullable=False),
        sa.Column("job_id", sa.String(64), nullable=False),
        sa.Column("attempt", sa.Integer),
        sa.Column("at", sa.Double, nullable=False),
        sa.Column("kind", sa.String(32), nullable=False),
        sa.Column("data", sa.Text, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_events"),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name="fk_events_job_id"),
    )
    op.create_index("ix_events_job_id_id", "events", ["job_id", "id"])
    op.create_table(
        "job_tags",
        sa.Column("job_id", sa.String(64), nullable=False),
        sa.Column("key", sa.String(255), nullable=False),
        sa.Column("value", sa.String(255), nullable=False),
        sa.PrimaryKeyConstraint("job_id", "key", name="pk_job_tags"),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name="fk_job_tags_job_id", ondelete="CASCADE"),
    )
    op.create_index("ix_job_tags_key_value", "job_tags", ["key", "value"])
    if op.get_bind().dialect.name == "postgresql":
        op.execute(
            "CREATE FUNCTION events_append_only() RETURNS trigger LANGUAGE plpgsql AS "
            "$$ BEGIN RAISE EXCEPTION 'events are append-only'; END $$"
        )
        op.execute(
            "CREATE TRIGGER events_append_only BEFORE UPDATE OR DELETE ON events "
            "FOR EACH ROW EXECUTE FUNCTION events_append_only()"
        )
    else:
        for verb in ("UPDATE", "DELETE"):
            op.execute(
                f"CREATE TRIGGER events_no_{verb.lower()} BEFORE {verb} ON events "
                "BEGIN SELECT RAISE(ABORT, 'events are append-only'); END"
            )


def downgrade() -> None:
    """Remove all tables, and with them the ledger."""
    for table in ("job_tags", "events", "attempts", "jobs"):
        op.drop_table(table)
    if op.get_bind().dialect.name == "postgresql":
        op.execute("DROP FUNCTION events_append_only()")
