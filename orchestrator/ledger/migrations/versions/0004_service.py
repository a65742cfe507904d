"""Owners, groups, dependencies, schedules, and what a service keeps: tokens, an audit log, notifications, quotas."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"

_SERIAL = sa.BigInteger().with_variant(sa.Integer, "sqlite")
_FILTERS = ("state", "name", "owner", "cluster", "project")
_TABLES = (
    *("quotas", "notifications", "sealed_secrets", "audit", "tokens", "cluster_polls", "schedules", "groups"),
    *("dependencies", "pruned_jobs"),
)


def upgrade() -> None:
    """Add the columns, in place, and make the tables."""
    _extend_jobs()
    _make_tables_of_jobs()
    _make_tables_of_the_service()
    if op.get_bind().dialect.name == "postgresql":
        _guard_postgresql()
    else:
        _guard_sqlite()


def downgrade() -> None:
    """Remove the tables and columns with their contents."""
    if op.get_bind().dialect.name == "postgresql":
        op.execute(
            "CREATE OR REPLACE FUNCTION events_append_only() RETURNS trigger LANGUAGE plpgsql AS "
            "$$ BEGIN RAISE EXCEPTION 'events are append-only'; END $$"
        )
    else:
        op.execute("DROP TRIGGER events_no_delete")
        op.execute(
            "CREATE TRIGGER events_no_delete BEFORE DELETE ON events "
            "BEGIN SELECT RAISE(ABORT, 'events are append-only'); END"
        )
    for table in _TABLES:
        op.drop_table(table)
    if op.get_bind().dialect.name == "postgresql":
        op.execute("DROP FUNCTION pruned_jobs_have_ended()")
        op.execute("DROP FUNCTION audit_append_only()")
    op.drop_index("ix_jobs_group_id_group_index", "jobs")
    for column in _FILTERS:
        op.drop_index(f"ix_jobs_{column}_created_at_id", "jobs")
    op.drop_index("ix_jobs_newest", "jobs")
    for column in ("owner", "project", "priority", "group_id", "group_index", "not_before", "deadline_at"):
        op.drop_column("jobs", column)
    op.create_index("ix_jobs_created_at", "jobs", ["created_at"])
    for column in ("name", "state"):
        op.create_index(f"ix_jobs_{column}_created_at", "jobs", [column, "created_at"])


def _extend_jobs() -> None:
    for column in (
        sa.Column("owner", sa.String(255), nullable=False, server_default=""),
        sa.Column("project", sa.String(255), nullable=False, server_default=""),
        sa.Column("priority", sa.Integer, nullable=False, server_default="0"),
        sa.Column("group_id", sa.String(64)),
        sa.Column("group_index", sa.Integer),
        sa.Column("not_before", sa.Double),
        sa.Column("deadline_at", sa.Double),
    ):
        op.add_column("jobs", column)
    for name in ("ix_jobs_created_at", "ix_jobs_name_created_at", "ix_jobs_state_created_at"):
        op.drop_index(name, "jobs")
    op.create_index("ix_jobs_newest", "jobs", ["created_at", "id", "name", "owner", "cluster", "project"])
    for column_name in _FILTERS:
        op.create_index(f"ix_jobs_{column_name}_created_at_id", "jobs", [column_name, "created_at", "id"])
    op.create_index("ix_jobs_group_id_group_index", "jobs", ["group_id", "group_index"])


def _make_tables_of_jobs() -> None:
    op.create_table(
        "pruned_jobs",
        sa.Column("job_id", sa.String(64), nullable=False),
        sa.Column("at", sa.Double, nullable=False),
        sa.PrimaryKeyConstraint("job_id", name="pk_pruned_jobs"),
    )
    op.create_table(
        "dependencies",
        sa.Column("job_id", sa.String(64), nullable=False),
        sa.Column("on_job", sa.String(64), nullable=False),
        sa.Column("condition", sa.String(16), nullable=False),
        sa.PrimaryKeyConstraint("job_id", "on_job", name="pk_dependencies"),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name="fk_dependencies_job_id"),
        sa.ForeignKeyConstraint(["on_job"], ["jobs.id"], name="fk_dependencies_on_job"),
    )
    op.create_index("ix_dependencies_on_job", "dependencies", ["on_job"])
    op.create_table(
        "groups",
        sa.Column("id", sa.String(64), nullable=False),
        sa.Column("kind", sa.String(16), nullable=False),
        sa.Column("name", sa.String(255), nullable=False),
        sa.Column("owner", sa.String(255), nullable=False),
        sa.Column("created_at", sa.Double, nullable=False),
        sa.Column("max_parallel", sa.Integer),
        sa.Column("spec", sa.Text, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_groups"),
    )
    op.create_index("ix_groups_created_at_id", "groups", ["created_at", "id"])
    op.create_table(
        "schedules",
        sa.Column("id", sa.String(64), nullable=False),
        sa.Column("name", sa.String(255), nullable=False),
        sa.Column("owner", sa.String(255), nullable=False),
        sa.Column("cron", sa.String(255), nullable=False),
        sa.Column("timezone", sa.String(64), nullable=False),
        sa.Column("enabled", sa.Boolean, nullable=False),
        sa.Column("next_at", sa.Double),
        sa.Column("last_at", sa.Double),
        sa.Column("last_job", sa.String(64)),
        sa.Column("spec", sa.Text, nullable=False),
        sa.Column("digests", sa.Text, nullable=False),
        sa.Column("source", sa.Text, nullable=False),
        sa.Column("revision", sa.Integer, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_schedules"),
        sa.UniqueConstraint("owner", "name", name="uq_schedules_owner_name"),
    )
    op.create_index("ix_schedules_next_at", "schedules", ["next_at"])
    op.create_table(
        "cluster_polls",
        sa.Column("cluster", sa.String(255), nullable=False),
        sa.Column("lease_owner", sa.String(255)),
        sa.Column("lease_expires_at", sa.Double),
        sa.Column("next_at", sa.Double),
        sa.Column("interval_s", sa.Double),
        sa.Column("polled_at", sa.Double),
        sa.Column("answered_at", sa.Double),
        sa.Column("error", sa.Text),
        sa.PrimaryKeyConstraint("cluster", name="pk_cluster_polls"),
    )
    op.create_table(
        "sealed_secrets",
        sa.Column("job_id", sa.String(64), nullable=False),
        sa.Column("sealed", sa.Text, nullable=False),
        sa.Column("at", sa.Double, nullable=False),
        sa.PrimaryKeyConstraint("job_id", name="pk_sealed_secrets"),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name="fk_sealed_secrets_job_id"),
    )


def _make_tables_of_the_service() -> None:
    op.create_table(
        "tokens",
        sa.Column("id", sa.String(64), nullable=False),
        sa.Column("hash", sa.String(128), nullable=False),
        sa.Column("username", sa.String(255), nullable=False),
        sa.Column("role", sa.String(16), nullable=False),
        sa.Column("note", sa.Text, nullable=False),
        sa.Column("created_at", sa.Double, nullable=False),
        sa.Column("expires_at", sa.Double),
        sa.Column("revoked_at", sa.Double),
        sa.Column("last_used_at", sa.Double),
        sa.PrimaryKeyConstraint("id", name="pk_tokens"),
        sa.UniqueConstraint("hash", name="uq_tokens_hash"),
    )
    op.create_table(
        "audit",
        sa.Column("id", _SERIAL, nullable=False),
        sa.Column("at", sa.Double, nullable=False),
        sa.Column("username", sa.String(255), nullable=False),
        sa.Column("token_id", sa.String(64)),
        sa.Column("address", sa.String(255), nullable=False),
        sa.Column("action", sa.String(64), nullable=False),
        sa.Column("subject", sa.Text, nullable=False),
        sa.Column("data", sa.Text, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_audit"),
    )
    op.create_index("ix_audit_username_id", "audit", ["username", "id"])
    op.create_table(
        "notifications",
        sa.Column("id", _SERIAL, nullable=False),
        sa.Column("event_id", sa.BigInteger, nullable=False),
        sa.Column("job_id", sa.String(64), nullable=False),
        sa.Column("target", sa.String(255), nullable=False),
        sa.Column("kind", sa.String(32), nullable=False),
        sa.Column("payload", sa.Text, nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("tries", sa.Integer, nullable=False),
        sa.Column("next_at", sa.Double, nullable=False),
        sa.Column("last_error", sa.Text, nullable=False),
        sa.Column("created_at", sa.Double, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_notifications"),
        sa.UniqueConstraint("event_id", "target", name="uq_notifications_event_id_target"),
    )
    op.create_index("ix_notifications_job_id", "notifications", ["job_id"])
    op.create_index("ix_notifications_state_next_at", "notifications", ["state", "next_at"])
    op.create_table(
        "quotas",
        sa.Column("scope", sa.String(16), nullable=False),
        sa.Column("name", sa.String(255), nullable=False),
        sa.Column("resource", sa.String(16), nullable=False),
        sa.Column("amount", sa.Double, nullable=False),
        sa.PrimaryKeyConstraint("scope", "name", "resource", name="pk_quotas"),
    )


def _guard_sqlite() -> None:
    op.execute("DROP TRIGGER events_no_delete")
    op.execute(
        "CREATE TRIGGER events_no_delete BEFORE DELETE ON events "
        "WHEN NOT EXISTS (SELECT 1 FROM pruned_jobs WHERE job_id = OLD.job_id) "
        "BEGIN SELECT RAISE(ABORT, 'events are append-only'); END"
    )
    op.execute(
        "CREATE TRIGGER pruned_jobs_have_ended BEFORE INSERT ON pruned_jobs "
        "WHEN EXISTS (SELECT 1 FROM jobs WHERE id = NEW.job_id "
        "AND state NOT IN ('SUCCEEDED', 'FAILED', 'CANCELLED')) "
        "BEGIN SELECT RAISE(ABORT, 'a live job cannot be pruned'); END"
    )
    for verb in ("UPDATE", "DELETE"):
        op.execute(
            f"CREATE TRIGGER audit_no_{verb.lower()} BEFORE {verb} ON audit "
            "BEGIN SELECT RAISE(ABORT, 'the audit log is append-only'); END"
        )


def _guard_postgresql() -> None:
    op.execute(
        "CREATE OR REPLACE FUNCTION events_append_only() RETURNS trigger LANGUAGE plpgsql AS "
        "$$ BEGIN "
        "IF TG_OP = 'DELETE' AND EXISTS (SELECT 1 FROM pruned_jobs WHERE job_id = OLD.job_id) THEN RETURN OLD; END IF; "
        "RAISE EXCEPTION 'events are append-only'; END $$"
    )
    op.execute(
        "CREATE FUNCTION pruned_jobs_have_ended() RETURNS trigger LANGUAGE plpgsql AS "
        "$$ BEGIN "
        "IF EXISTS (SELECT 1 FROM jobs WHERE id = NEW.job_id AND state NOT IN ('SUCCEEDED', 'FAILED', 'CANCELLED')) "
        "THEN RAISE EXCEPTION 'a live job cannot be pruned'; END IF; RETURN NEW; END $$"
    )
    op.execute(
        "CREATE TRIGGER pruned_jobs_have_ended BEFORE INSERT ON pruned_jobs "
        "FOR EACH ROW EXECUTE FUNCTION pruned_jobs_have_ended()"
    )
    op.execute(
        "CREATE FUNCTION audit_append_only() RETURNS trigger LANGUAGE plpgsql AS "
        "$$ BEGIN RAISE EXCEPTION 'the audit log is append-only'; END $$"
    )
    op.execute(
        "CREATE TRIGGER audit_append_only BEFORE UPDATE OR DELETE ON audit "
        "FOR EACH ROW EXECUTE FUNCTION audit_append_only()"
    )
