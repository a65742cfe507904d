from __future__ import annotations

import hashlib
import sqlite3
from pathlib import Path

import pytest
import sqlalchemy as sa
from alembic.script import ScriptDirectory

from orc.orchestrator.ledger import engine, schema
from orc.orchestrator.ledger.database import HEAD

# Digests of the tables of each version: a change of them is a new version with a migration.
TABLES = {"0007": "523523867e2707443ff6fd6c4b9b0a327c6d21a24437cb535e53fcc60affd886"}


@pytest.fixture
def made(tmp_path) -> Path:
    with sqlite3.connect(tmp_path / "made.db") as connection:
        connection.executescript(";".join(schema.sqlite_statements()))
    return tmp_path / "made.db"


def test_the_tables_of_a_version_stay_as_they_are():
    text = "\n".join(sorted(" ".join(statement.split()) for statement in schema.sqlite_statements()))
    assert hashlib.sha256(text.encode()).hexdigest() == TABLES[HEAD]


def test_the_newest_revision_is_the_one_this_code_works_with():
    assert ScriptDirectory(str(engine.MIGRATIONS)).get_heads() == [HEAD]


def test_the_schema_compiles_for_postgresql():
    made: list[str] = []
    engine = sa.create_mock_engine(
        "postgresql+psycopg://", lambda sql, *_, **__: made.append(str(sql.compile(dialect=engine.dialect)))
    )
    schema.metadata.create_all(engine, checkfirst=False)
    text = "\n".join(made)
    assert "DOUBLE PRECISION" in text
    assert "BIGSERIAL" in text
    assert "EXECUTE FUNCTION events_append_only()" in text
    assert "RAISE(ABORT" not in text


@pytest.mark.parametrize("statement", ["UPDATE events SET kind = 'x'", "DELETE FROM events"])
def test_events_cannot_be_changed_or_removed(made, statement):
    with sqlite3.connect(made) as connection:
        columns = [row[1] for row in connection.execute("PRAGMA table_info(jobs)")]
        values = ", ".join("'1'" for _ in columns)
        connection.execute(f"INSERT INTO jobs ({', '.join(columns)}) VALUES ({values})")
        connection.execute("INSERT INTO events (job_id, at, kind, data) VALUES ('1', 1.0, 'queued', '{}')")
        with pytest.raises(sqlite3.IntegrityError, match="append-only"):
            connection.execute(statement)
