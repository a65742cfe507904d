"""Tables of the ledger in SQLAlchemy: every new ledger is made from them, and migrations bring older ones to them."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa

from orc.orchestrator.ledger.database import HEAD

metadata = sa.MetaData(
    naming_convention={
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "fk": "fk_%(table_name)s_%(column_0_N_name)s",
        "pk": "pk_%(table_name)s",
    }
)

# Columns by which lists of jobs are chosen.
LIST_FILTERS = ("state", "name", "owner", "cluster", "project")

_JSON = sa.Text  # canonical JSON text: read as a whole, never queried into, the same on every database
_TIME = sa.Double  # seconds since the epoch

jobs = sa.Table(
    "jobs",
    metadata,
    sa.Column("id", sa.String(64), primary_key=True),
    sa.Column("name", sa.String(255), nullable=False),
    sa.Column("cluster", sa.String(255), nullable=False),
    sa.Column("backend", sa.String(64), nullable=False),
    sa.Column("state", sa.String(16), nullable=False),
    sa.Column("reason", sa.Text, nullable=False),
    sa.Column("attempt", sa.Integer, nullable=False),  # number of the newest attempt, 0 before the first
    sa.Column("revision", sa.Integer, nullable=False),  # counts the changes; every change names the one it has seen
    sa.Column("created_at", _TIME, nullable=False),
    sa.Column("updated_at", _TIME, nullable=False),
    sa.Column("ended_at", _TIME),
    sa.Column("next_attempt_at", _TIME),
    sa.Column("cancel_requested_at", _TIME),
    sa.Column("cancel_grace_s", _TIME),
    sa.Column("poll_error_at", _TIME),  # last recorded one since the last answer
    sa.Column("claim_owner", sa.String(255)),
    sa.Column("claim_expires_at", _TIME),
    sa.Column("owner", sa.String(255), nullable=False, server_default=""),  # login name of who submitted it
    sa.Column("project", sa.String(255), nullable=False, server_default=""),
    sa.Column("priority", sa.Integer, nullable=False, server_default="0"),
    sa.Column("group_id", sa.String(64)),
    sa.Column("group_index", sa.Integer),
    sa.Column("not_before", _TIME),
    sa.Column("deadline_at", _TIME),
    sa.Column("source", sa.Text, nullable=False),
    sa.Column("digests", _JSON, nullable=False),
    sa.Column("spec", _JSON, nullable=False),
    # Lists are ordered by (created_at, id): each of their filters has an index that gives this order.
    # The first has all that a search looks into as well, so that it need not read the rows.
    sa.Index("ix_jobs_newest", "created_at", "id", "name", "owner", "cluster", "project"),
    *(sa.Index(None, column, "created_at", "id") for column in LIST_FILTERS),
    sa.Index(None, "group_id", "group_index"),
)

job_tags = sa.Table(
    "job_tags",
    metadata,
    sa.Column("job_id", sa.ForeignKey("jobs.id", ondelete="CASCADE"), primary_key=True),
    sa.Column("key", sa.String(255), primary_key=True),
    sa.Column("value", sa.String(255), nullable=False),
    sa.Index(None, "key", "value"),
)

attempts = sa.Table(
    "attempts",
    metadata,
    sa.Column("job_id", sa.ForeignKey("jobs.id"), primary_key=True),
    sa.Column("number", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("marker", sa.String(80), nullable=False, unique=True),
    sa.Column("state", sa.String(16), nullable=False),
    sa.Column("cause", sa.String(16)),
    sa.Column("reason", sa.Text, nullable=False),
    sa.Column("plan_digest", sa.String(64), nullable=False),
    sa.Column("handle", _JSON),
    sa.Column("prepared_at", _TIME, nullable=False),
    sa.Column("submitted_at", _TIME),
    sa.Column("started_at", _TIME),
    sa.Column("ended_at", _TIME),
    sa.Column("first_negative_at", _TIME),  # when `find` first saw nothing since the attempt became ambiguous
    sa.Column("cancel_sent_at", _TIME),
    sa.Column("restarts", sa.Integer, nullable=False),
    sa.Column("hosts", _JSON, nullable=False),
    sa.Column("progress", _JSON, nullable=False),
    sa.Column("exit", _JSON),
    sa.Column("sent_to", _JSON),  # as its cluster was described when it was sent
    # What its hours are added up by: the job's own, and the hosts that it has or else the nodes that it requests.
    sa.Column("cluster", sa.String(255), nullable=False, server_default=""),
    sa.Column("owner", sa.String(255), nullable=False, server_default=""),
    sa.Column("project", sa.String(255), nullable=False, server_default=""),
    sa.Column("gpus_per_node", sa.Integer, nullable=False, server_default="0"),
    sa.Column("machine", sa.String(255), nullable=False, server_default=""),
    sa.Column("nodes", sa.Integer, nullable=False, server_default="1"),
    # It has all of that, so that a sum over years need not read the rows.
    sa.Index(
        "ix_attempts_use",
        "started_at",
        "ended_at",
        "cluster",
        "owner",
        "project",
        "gpus_per_node",
        "machine",
        "nodes",
        "job_id",
        "number",
    ),
)

reservations = sa.Table(
    "reservations",
    metadata,
    sa.Column("cluster", sa.String(255), nullable=False),
    sa.Column("host", sa.String(255), nullable=False),  # by its name in the cluster
    sa.Column("job_id", sa.String(64), primary_key=True),
    sa.Column("attempt", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("node", sa.Integer, primary_key=True, autoincrement=False),  # which of the attempt's nodes the host is
    sa.Column("slots", sa.Integer, nullable=False),
    sa.Column("at", _TIME, nullable=False),
    sa.ForeignKeyConstraint(["job_id", "attempt"], ["attempts.job_id", "attempts.number"]),
    sa.Index(None, "cluster", "host"),
)

# Hosts that are to blame for an attempt's node failure: the job's next attempts keep away from them.
failed_hosts = sa.Table(
    "culprits",
    metadata,
    sa.Column("job_id", sa.String(64), primary_key=True),
    sa.Column("attempt", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("host", sa.String(255), primary_key=True),
    sa.ForeignKeyConstraint(["job_id", "attempt"], ["attempts.job_id", "attempts.number"]),
)

# When a job's cluster last said something about it. Apart from the job, because it is no change of the job.
sightings = sa.Table(
    "sightings",
    metadata,
    sa.Column("job_id", sa.ForeignKey("jobs.id"), primary_key=True),
    sa.Column("at", _TIME, nullable=False),
)

events = sa.Table(
    "events",
    metadata,
    sa.Column("id", sa.BigInteger().with_variant(sa.Integer, "sqlite"), primary_key=True),
    sa.Column("job_id", sa.ForeignKey("jobs.id"), nullable=False),
    sa.Column("attempt", sa.Integer),
    sa.Column("at", _TIME, nullable=False),
    sa.Column("kind", sa.String(32), nullable=False),
    sa.Column("data", _JSON, nullable=False),
    sa.Index(None, "job_id", "id"),
)

# Jobs that retention has removed. Only the events of these can be deleted, and only ended jobs can be put here.
pruned_jobs = sa.Table(
    "pruned_jobs",
    metadata,
    sa.Column("job_id", sa.String(64), primary_key=True),
    sa.Column("at", _TIME, nullable=False),
)

# What has to have ended, and how, before a job may start.
dependencies = sa.Table(
    "dependencies",
    metadata,
    sa.Column("job_id", sa.ForeignKey("jobs.id"), primary_key=True),
    sa.Column("on_job", sa.ForeignKey("jobs.id"), primary_key=True, index=True),
    sa.Column("condition", sa.String(16), nullable=False),  # success, any, failure
)

groups = sa.Table(
    "groups",
    metadata,
    sa.Column("id", sa.String(64), primary_key=True),
    sa.Column("kind", sa.String(16), nullable=False),  # sweep, array, pipeline, schedule
    sa.Column("name", sa.String(255), nullable=False),
    sa.Column("owner", sa.String(255), nullable=False),
    sa.Column("created_at", _TIME, nullable=False),
    sa.Column("max_parallel", sa.Integer),
    sa.Column("spec", _JSON, nullable=False),
    sa.Index(None, "created_at", "id"),
)

schedules = sa.Table(
    "schedules",
    metadata,
    sa.Column("id", sa.String(64), primary_key=True),
    sa.Column("name", sa.String(255), nullable=False),
    sa.Column("owner", sa.String(255), nullable=False),
    sa.Column("cron", sa.String(255), nullable=False),
    sa.Column("timezone", sa.String(64), nullable=False),
    sa.Column("enabled", sa.Boolean, nullable=False),
    sa.Column("next_at", _TIME),
    sa.Column("last_at", _TIME),
    sa.Column("last_job", sa.String(64)),
    sa.Column("spec", _JSON, nullable=False),
    sa.Column("digests", _JSON, nullable=False),
    sa.Column("source", sa.Text, nullable=False),
    sa.Column("revision", sa.Integer, nullable=False),  # counts the changes, as that of a job
    sa.UniqueConstraint("owner", "name"),
    sa.Index(None, "next_at"),
)

# Lease of the process that polls a cluster about the jobs of an account there, and what is known of its answers.
cluster_polls = sa.Table(
    "cluster_polls",
    metadata,
    sa.Column("cluster", sa.String(255), primary_key=True),
    sa.Column("account", sa.String(255), primary_key=True),  # "": that of the process that runs the passes
    sa.Column("lease_owner", sa.String(255)),
    sa.Column("lease_expires_at", _TIME),
    sa.Column("next_at", _TIME),
    sa.Column("interval_s", _TIME),
    sa.Column("polled_at", _TIME),
    sa.Column("answered_at", _TIME),
    sa.Column("error", sa.Text),
)

# Work that one process at a time does, and not before its time.
duties = sa.Table(
    "duties",
    metadata,
    sa.Column("name", sa.String(64), primary_key=True),
    sa.Column("lease_owner", sa.String(255)),
    sa.Column("lease_expires_at", _TIME),
    sa.Column("next_at", _TIME),
    sa.Column("done_at", _TIME),
)

# Attempts that were given up while a copy of them may still have been on its way to their cluster.
late_copies = sa.Table(
    "late_copies",
    metadata,
    sa.Column("job_id", sa.ForeignKey("jobs.id"), primary_key=True),
    sa.Column("attempt", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("sent_to", _JSON, primary_key=True),  # where it is looked for; empty: where it would be sent now
    sa.Column("hosts", _JSON, nullable=False),  # on which it may appear
    sa.Column("next_at", _TIME, nullable=False, index=True),  # when it is looked for again
    sa.Column("until", _TIME, nullable=False),  # after that nobody looks any more
)

# Users of a service who have had a content or a tree in their hands: uploaded it, or collected it for a job of theirs.
content_holders = sa.Table(
    "content_holders",
    metadata,
    sa.Column("username", sa.String(255), primary_key=True),
    sa.Column("digest", sa.String(64), primary_key=True),
    sa.Column("at", _TIME, nullable=False),
)

tokens = sa.Table(
    "tokens",
    metadata,
    sa.Column("id", sa.String(64), primary_key=True),
    sa.Column("hash", sa.String(128), nullable=False, unique=True),  # the token itself is nowhere
    sa.Column("username", sa.String(255), nullable=False),
    sa.Column("role", sa.String(16), nullable=False),  # viewer, user, admin
    sa.Column("note", sa.Text, nullable=False),
    sa.Column("created_at", _TIME, nullable=False),
    sa.Column("expires_at", _TIME),
    sa.Column("revoked_at", _TIME),
    sa.Column("last_used_at", _TIME),
)

audit = sa.Table(
    "audit",
    metadata,
    sa.Column("id", sa.BigInteger().with_variant(sa.Integer, "sqlite"), primary_key=True),
    sa.Column("at", _TIME, nullable=False),
    sa.Column("username", sa.String(255), nullable=False),
    sa.Column("token_id", sa.String(64)),
    sa.Column("address", sa.String(255), nullable=False),
    sa.Column("action", sa.String(64), nullable=False),
    sa.Column("subject", sa.Text, nullable=False),
    sa.Column("data", _JSON, nullable=False),
    sa.Index(None, "username", "id"),
)

# Time before which the audit log is removed: a row in the transaction that does it, none at any other time.
audit_limits = sa.Table(
    "audit_limits",
    metadata,
    sa.Column("before", _TIME, primary_key=True, autoincrement=False),
)

# Changes that were let in and not answered yet; each gives way to its line in the audit log.
audit_intents = sa.Table(
    "audit_intents",
    metadata,
    sa.Column("id", sa.String(64), primary_key=True),
    sa.Column("at", _TIME, nullable=False),
    sa.Column("line", _JSON, nullable=False),
    sa.Column("alive_at", _TIME),  # when it was last known to be worked on
)

# Secrets of a job, encrypted: the key is not in the ledger.
sealed_secrets = sa.Table(
    "sealed_secrets",
    metadata,
    sa.Column("job_id", sa.ForeignKey("jobs.id"), primary_key=True),
    sa.Column("sealed", sa.Text, nullable=False),
    sa.Column("at", _TIME, nullable=False),
)

# Messages that have to leave; each event reaches a target once.
notifications = sa.Table(
    "notifications",
    metadata,
    sa.Column("id", sa.BigInteger().with_variant(sa.Integer, "sqlite"), primary_key=True),
    sa.Column("event_id", sa.BigInteger, nullable=False),
    sa.Column("job_id", sa.String(64), nullable=False, index=True),
    sa.Column("target", sa.String(255), nullable=False),
    sa.Column("kind", sa.String(32), nullable=False),
    sa.Column("payload", _JSON, nullable=False),
    sa.Column("state", sa.String(16), nullable=False),  # due, sent, dead
    sa.Column("tries", sa.Integer, nullable=False),
    sa.Column("next_at", _TIME, nullable=False),
    sa.Column("last_error", sa.Text, nullable=False),
    sa.Column("created_at", _TIME, nullable=False),
    sa.UniqueConstraint("event_id", "target"),
    sa.Index(None, "state", "next_at"),
)

quotas = sa.Table(
    "quotas",
    metadata,
    sa.Column("scope", sa.String(16), primary_key=True),  # user, project
    sa.Column("name", sa.String(255), primary_key=True),
    sa.Column("resource", sa.String(16), primary_key=True),  # gpus, jobs, cost
    sa.Column("amount", sa.Double, nullable=False),
)

# The version of the schema, where alembic looks for it.
alembic_version = sa.Table("alembic_version", metadata, sa.Column("version_num", sa.String(32), primary_key=True))

# What keeps the history append-only, whatever program writes.
_APPEND_ONLY = {
    "sqlite": (
        "CREATE TRIGGER events_no_update BEFORE UPDATE ON events "
        "BEGIN SELECT RAISE(ABORT, 'events are append-only'); END",
        "CREATE TRIGGER events_no_delete BEFORE DELETE ON events "
        "WHEN NOT EXISTS (SELECT 1 FROM pruned_jobs WHERE job_id = OLD.job_id) "
        "BEGIN SELECT RAISE(ABORT, 'events are append-only'); END",
        "CREATE TRIGGER pruned_jobs_have_ended BEFORE INSERT ON pruned_jobs "
        "WHEN EXISTS (SELECT 1 FROM jobs WHERE id = NEW.job_id "
        "AND state NOT IN ('SUCCEEDED', 'FAILED', 'CANCELLED')) "
        "BEGIN SELECT RAISE(ABORT, 'a live job cannot be pruned'); END",
        "CREATE TRIGGER audit_no_update BEFORE UPDATE ON audit "
        "BEGIN SELECT RAISE(ABORT, 'the audit log is append-only'); END",
        "CREATE TRIGGER audit_no_delete BEFORE DELETE ON audit "
        "WHEN NOT EXISTS (SELECT 1 FROM audit_limits WHERE before > OLD.at) "
        "BEGIN SELECT RAISE(ABORT, 'the audit log is append-only'); END",
    ),
    "postgresql": (
        "CREATE OR REPLACE FUNCTION events_append_only() RETURNS trigger LANGUAGE plpgsql AS "
        "$$ BEGIN "
        "IF TG_OP = 'DELETE' AND EXISTS (SELECT 1 FROM pruned_jobs WHERE job_id = OLD.job_id) THEN RETURN OLD; END IF; "
        "RAISE EXCEPTION 'events are append-only'; END $$",
        "CREATE TRIGGER events_append_only BEFORE UPDATE OR DELETE ON events "
        "FOR EACH ROW EXECUTE FUNCTION events_append_only()",
        "CREATE FUNCTION pruned_jobs_have_ended() RETURNS trigger LANGUAGE plpgsql AS "
        "$$ BEGIN "
        "IF EXISTS (SELECT 1 FROM jobs WHERE id = NEW.job_id AND state NOT IN ('SUCCEEDED', 'FAILED', 'CANCELLED')) "
        "THEN RAISE EXCEPTION 'a live job cannot be pruned'; END IF; RETURN NEW; END $$",
        "CREATE TRIGGER pruned_jobs_have_ended BEFORE INSERT ON pruned_jobs "
        "FOR EACH ROW EXECUTE FUNCTION pruned_jobs_have_ended()",
        "CREATE OR REPLACE FUNCTION audit_append_only() RETURNS trigger LANGUAGE plpgsql AS "
        "$$ BEGIN "
        "IF TG_OP = 'DELETE' AND EXISTS (SELECT 1 FROM audit_limits WHERE before > OLD.at) THEN RETURN OLD; END IF; "
        "RAISE EXCEPTION 'the audit log is append-only'; END $$",
        "CREATE TRIGGER audit_append_only BEFORE UPDATE OR DELETE ON audit "
        "FOR EACH ROW EXECUTE FUNCTION audit_append_only()",
    ),
}


def _after_create(made: sa.MetaData | sa.Table, statement: str, dialect: str | None = None) -> None:
    ddl = sa.DDL(statement)  # type: ignore[no-untyped-call]
    sa.event.listen(made, "after_create", ddl.execute_if(dialect=dialect))


_after_create(alembic_version, f"INSERT INTO alembic_version VALUES ('{HEAD}')")  # noqa: S608
for _dialect, _statements in _APPEND_ONLY.items():
    for _statement in _statements:
        _after_create(metadata, _statement, _dialect)


def sqlite_statements() -> list[str]:
    """Return the statements that make an empty ledger of this version in SQLite."""
    made: list[str] = []

    def keep(statement: Any, *_: Any, **__: Any) -> None:
        made.append(str(statement.compile(dialect=engine.dialect)))

    engine = sa.create_mock_engine("sqlite://", keep)
    metadata.create_all(engine, checkfirst=False)
    return made
