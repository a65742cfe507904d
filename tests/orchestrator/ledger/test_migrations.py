"""Upgrades of a ledger with data in place, in SQLite and in PostgreSQL."""

from __future__ import annotations

import pytest
import sqlalchemy as sa
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext

from orc.orchestrator.engine import queueing
from orc.orchestrator.ledger import engine, schema
from orc.orchestrator.ledger.database import HEAD, LedgerError
from orc.orchestrator.ledger.engine import CoreDatabase
from orc.orchestrator.ledger.lifecycle import Event, Kind
from orc.orchestrator.ledger.opening import open_database
from orc.orchestrator.ledger.store import Ledger

OLD_JOB = """
INSERT INTO jobs (id, name, cluster, backend, state, reason, attempt, revision, created_at, updated_at, source, digests,
spec) VALUES ('old-1', 'digits', 'lab', 'fake', 'PREPARED', '', 1, 1, 5, 5, 'job.yaml', '{"code":"c"}', '{"name":"d"}')
"""
OLD_ATTEMPT = """
INSERT INTO attempts (job_id, number, marker, state, reason, plan_digest, prepared_at, restarts, hosts, progress)
VALUES ('old-1', 1, 'orc-old-1-a1', 'PREPARED', '', 'p', 5, 0, '[]', '{}')
"""
OLD_EVENT = "INSERT INTO events (job_id, at, kind, data) VALUES ('old-1', 5, 'queued', '{}')"


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request, tmp_path):
    """An empty database."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/ledger.db"
    return request.getfixturevalue("postgres_database")


def version(database):
    with database.read() as connection:
        return connection.tuples("SELECT version_num FROM alembic_version")


def test_a_job_of_an_older_orc_goes_on_after_the_upgrade(older, url, tmp_path, clock):
    older(url)
    before = CoreDatabase(url)
    with before.write() as connection:
        for statement in (OLD_JOB, OLD_ATTEMPT, OLD_EVENT):
            connection.execute(statement.replace(":", r"\:"))
    before.close()
    ledger = Ledger(open_database(tmp_path, url), clock)
    assert version(ledger.database) == [(HEAD,)]
    with ledger.transaction() as tx:
        tx.record(tx.find("old-1"), Event(Kind.SUBMITTING, 1))
        queueing.put_quota(tx.connection, queueing.Quota("user", "ann", "jobs", 1.0))
    assert [event.kind for event in ledger.events("old-1")] == ["queued", "submitting"]
    assert ledger.job("old-1").owner == ""
    ledger.close()
    engine = sa.create_engine(url)
    with engine.connect() as connection:
        assert compare_metadata(MigrationContext.configure(connection), schema.metadata) == []
    engine.dispose()


def test_a_migration_that_fails_changes_nothing(older, url, tmp_path):
    older(url)
    with (engine.MIGRATIONS / "versions/0007.py").open("a") as script:
        script.write("    op.execute('NONSENSE')\n")
    with pytest.raises(LedgerError, match="NONSENSE"):
        open_database(tmp_path, url)
    database = CoreDatabase(url)
    assert version(database) == [("0006",)]
    with pytest.raises(LedgerError, match="quotas"), database.read() as connection:
        connection.tuples("SELECT 1 FROM quotas")
    database.close()
