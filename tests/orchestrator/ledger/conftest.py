from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

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
