"""Migrations up and down with data in place, in SQLite and in PostgreSQL."""

from __future__ import annotations

from pathlib import Path

import pytest
import sqlalchemy as sa
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.migration import MigrationContext

from orc.orchestrator.ledger import schema
from orc.orchestrator.ledger.lifecycle import Event, Kind
from orc.orchestrator.ledger.opening import open_database
from orc.orchestrator.ledger.store import Ledger
from orc.orchestrator.ledger.version import HEAD

OLD_JOB = """
INSERT INTO jobs (id, name, cluster, backend, state, reason, attempt, revision, created_at, updated_at, source, digests,
spec) VALUES ('old-1', 'digits', 'lab', 'fake', 'PREPARED', '', 1, 1, 5, 5, 'job.yaml', '{"code":"c"}', '{"name":"d"}')
"""
OLD_ATTEMPT = """
INSERT INTO attempts (job_id, number, marker, state, reason, plan_digest, prepared_at, restarts, hosts, progress)
VALUES ('old-1', 1, 'orc-old-1-a1', 'PREPARED', '', 'p', 5, 0, '[]', '{}')
"""
SENT = "SELECT handle, sent_to FROM attempts"
AT_HOME = r'{"login"\:"","root"\:""}'
INTENT = r'{"action"\:"cancel","address"\:"","subject"\:"old-1","token_id"\:null,"user"\:"ann"}'
OLD_EVENT = "INSERT INTO events (job_id, at, kind, data) VALUES ('old-1', 5, 'queued', '{}')"


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request, tmp_path):
    """An empty database."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/ledger.db"
    return request.getfixturevalue("postgres_database")


@pytest.fixture
def engine(url):
    made = sa.create_engine(url)
    yield made
    made.dispose()


def migrate(engine, revision):
    config = Config()
    config.set_main_option("script_location", str(Path(schema.__file__).with_name("migrations")))
    with engine.connect() as connection:
        config.attributes["connection"] = connection
        now = MigrationContext.configure(connection).get_current_revision() or ""
        newer = revision != "base" and revision > now
        (command.upgrade if newer else command.downgrade)(config, revision)
        connection.commit()


def run(engine, *statements):
    with engine.begin() as connection:
        for statement in statements:
            connection.execute(sa.text(statement))


def rows(engine, query):
    with engine.connect() as connection:
        return [tuple(row) for row in connection.execute(sa.text(query))]


def shape(engine):
    """Tables with their columns, and indexes; without the types, of which databases have names of their own."""
    looking = sa.inspect(engine)
    return {
        table: (
            sorted(column["name"] for column in looking.get_columns(table)),
            sorted(str(index["name"]) for index in looking.get_indexes(table)),
        )
        for table in looking.get_table_names()
    }


def test_each_migration_goes_up_and_down_again_with_what_is_in_it(engine):
    migrate(engine, "0001")
    run(engine, OLD_JOB, OLD_ATTEMPT, OLD_EVENT)
    shapes = {"0001": shape(engine)}
    for revision in ("0002", "0003", "0004", "0005", HEAD):
        migrate(engine, revision)
        shapes[revision] = shape(engine)
        if revision == "0005":
            run(engine, """UPDATE attempts SET handle = '{"native_id":"7","account":"hopper /navy"}'""")
    assert rows(engine, SENT) == [('{"native_id":"7"}', '{"login":"hopper","root":"/navy"}')]
    told = rows(engine, "SELECT id, spec, owner, project, priority, group_id, not_before FROM jobs")
    assert told == [("old-1", '{"name":"d"}', "", "", 0, None, None)]
    run(
        engine,
        "UPDATE jobs SET owner = 'ann'",
        f"INSERT INTO late_copies VALUES ('old-1', 1, '', '[]', 1, 2), ('old-1', 1, '{AT_HOME}', '[\"n1\"]', 1, 3)",
        f"INSERT INTO audit_intents (id, at, line) VALUES ('i', 7, '{INTENT}')",
        "INSERT INTO content_holders (username, digest, at) VALUES ('ann', 'd', 1)",
        "INSERT INTO cluster_polls (cluster, account) VALUES ('lab', 'ann'), ('lab', 'bob')",
    )
    for revision in ("0005", "0004", "0003", "0002", "0001"):
        migrate(engine, revision)
        if revision == "0005":
            assert rows(engine, "SELECT handle FROM attempts") == [('{"account":"hopper /navy","native_id":"7"}',)]
            assert rows(engine, "SELECT hosts, until FROM late_copies") == [('["n1"]', 3)]
        if revision == "0004":
            assert rows(engine, "SELECT at, action, data FROM audit") == [(7, "cancel", '{"status":null}')]
        assert shape(engine) == shapes[revision]
        assert rows(engine, "SELECT id, spec, state FROM jobs") == [("old-1", '{"name":"d"}', "PREPARED")]
        assert rows(engine, "SELECT marker FROM attempts") == [("orc-old-1-a1",)]
        with pytest.raises(sa.exc.DBAPIError, match="append-only"):
            run(engine, "DELETE FROM events")
    migrate(engine, HEAD)
    assert shape(engine) == shapes[HEAD]
    with engine.connect() as connection:
        assert compare_metadata(MigrationContext.configure(connection), schema.metadata) == []
    migrate(engine, "base")
    assert set(shape(engine)) == {"alembic_version"}


def test_a_job_of_an_older_orc_goes_on_after_the_upgrade(engine, url, tmp_path, clock):
    migrate(engine, "0001")
    run(engine, OLD_JOB, OLD_ATTEMPT, OLD_EVENT)
    engine.dispose()
    ledger = Ledger(open_database(tmp_path, url), clock)
    with ledger.transaction() as tx:
        tx.record(tx.find("old-1"), Event(Kind.SUBMITTING, 1))
    assert [event.kind for event in ledger.events("old-1")] == ["queued", "submitting"]
    assert ledger.job("old-1").owner == ""
    ledger.close()
