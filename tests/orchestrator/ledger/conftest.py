from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa

from orc.orchestrator.ledger import engine
from orc.orchestrator.ledger.database import Database
from orc.orchestrator.ledger.engine import CoreDatabase
from orc.orchestrator.ledger.opening import open_database
from orc.orchestrator.ledger.store import Ledger

DRIVERS = ["sqlite3", "sqlalchemy", "postgresql"]
if "MUTANT_UNDER_TEST" in os.environ:  # each mutant would start a server of its own
    DRIVERS.remove("postgresql")


@pytest.fixture(params=DRIVERS)
def database(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Database]:
    """An empty ledger: through the standard library's driver, the same through SQLAlchemy, and in PostgreSQL."""
    if request.param == "postgresql":
        made = open_database(tmp_path, request.getfixturevalue("postgres_url"))
    else:
        made = open_database(tmp_path)
        if request.param == "sqlalchemy":
            made.close()
            made = CoreDatabase(f"sqlite+pysqlite:///{tmp_path}/ledger.db")
    yield made
    made.close()


@pytest.fixture
def ledger(database: Database, clock) -> Ledger:
    return Ledger(database, clock)


@pytest.fixture
def older(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """``older(url)`` makes a ledger of version 0006, to which this version adds the table of quotas."""
    migrations = tmp_path / "migrations"
    shutil.copytree(engine.MIGRATIONS, migrations, ignore=shutil.ignore_patterns("0*.py"))
    (migrations / "versions/0006.py").write_text("revision, down_revision = '0006', None")
    (migrations / "versions/0007.py").write_text(
        "from alembic import op\nfrom orc.orchestrator.ledger import schema\nrevision, down_revision = '0007', '0006'\n"
        "def upgrade():\n    schema.quotas.create(op.get_bind())\n"
    )
    monkeypatch.setattr(engine, "MIGRATIONS", migrations)

    def make(url: str) -> None:
        engine.upgrade(url, None)
        made = sa.create_engine(url)
        with made.begin() as connection:
            connection.execute(sa.text("DROP TABLE quotas"))
            connection.execute(sa.text("UPDATE alembic_version SET version_num = '0006'"))
        made.dispose()

    return make
