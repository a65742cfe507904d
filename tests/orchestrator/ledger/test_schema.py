from __future__ import annotations

import re
import sqlite3
from pathlib import Path

import pytest
import sqlalchemy as sa
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory

from orc.orchestrator.ledger import schema, upgrade
from orc.orchestrator.ledger.version import HEAD

LEDGER = Path(schema.__file__).parent


def statements(path: Path) -> set[str]:
    """Every object of the database as its creating SQL, without differences of layout."""
    with sqlite3.connect(path) as connection:
        rows = connection.execute("SELECT sql FROM sqlite_master WHERE sql IS NOT NULL").fetchall()
    texts = (re.sub(r"\s+", " ", row[0]).replace('"', "").replace("( ", "(").replace(" )", ")") for row in rows)
    return {in_any_order(text) if text.startswith("CREATE TABLE") else text for text in texts}


def in_any_order(text: str) -> str:
    """The statement with its columns sorted: columns that come later are last, and nothing depends on that."""
    head, _, body = text.partition(" (")
    return f"{head} ({', '.join(sorted(re.split(r', (?![^()]*[)])', body[:-1])))})"


@pytest.fixture
def migrated(tmp_path) -> Path:
    upgrade.upgrade(f"sqlite:///{tmp_path}/migrated.db", None)
    return tmp_path / "migrated.db"


@pytest.fixture
def from_text(tmp_path) -> Path:
    with sqlite3.connect(tmp_path / "text.db") as connection:
        connection.executescript((LEDGER / "schema.sql").read_text())
    return tmp_path / "text.db"


def test_the_text_is_what_the_tables_say():
    assert (LEDGER / "schema.sql").read_text() == schema.sqlite_schema(), (
        "run: python -m orc.orchestrator.ledger.schema > orchestrator/ledger/schema.sql"
    )


def test_a_fresh_file_equals_a_migrated_one(migrated, from_text):
    assert statements(from_text) == statements(migrated)


def test_the_tables_created_by_sqlalchemy_equal_the_migrated_ones(migrated, tmp_path):
    engine = sa.create_engine(f"sqlite:///{tmp_path}/core.db")
    schema.metadata.create_all(engine)
    engine.dispose()
    version = {s for s in statements(migrated) if "alembic_version" in s}
    assert len(version) == 1
    assert statements(tmp_path / "core.db") == statements(migrated) - version


def test_alembic_sees_no_difference_between_migrations_and_tables(migrated):
    engine = sa.create_engine(f"sqlite:///{migrated}")
    with engine.connect() as connection:
        assert compare_metadata(MigrationContext.configure(connection), schema.metadata) == []
    engine.dispose()


def test_the_newest_revision_is_the_one_this_code_works_with():
    assert ScriptDirectory(str(LEDGER / "migrations")).get_heads() == [HEAD]


def test_both_ways_stamp_the_same_version(migrated, from_text):
    for path in (migrated, from_text):
        with sqlite3.connect(path) as connection:
            assert connection.execute("SELECT version_num FROM alembic_version").fetchall() == [(HEAD,)]


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
def test_events_cannot_be_changed_or_removed(from_text, statement):
    with sqlite3.connect(from_text) as connection:
        columns = [row[1] for row in connection.execute("PRAGMA table_info(jobs)")]
        values = ", ".join("'1'" for _ in columns)
        connection.execute(f"INSERT INTO jobs ({', '.join(columns)}) VALUES ({values})")
        connection.execute("INSERT INTO events (job_id, at, kind, data) VALUES ('1', 1.0, 'queued', '{}')")
        with pytest.raises(sqlite3.IntegrityError, match="append-only"):
            connection.execute(statement)
