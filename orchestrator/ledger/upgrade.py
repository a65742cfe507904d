"""Making a ledger behind a URL, and bringing an older one to this version with alembic."""

from __future__ import annotations

from pathlib import Path

import sqlalchemy as sa
from sqlalchemy.exc import SQLAlchemyError

from orc.orchestrator.ledger.database import BUSY_TIMEOUT_S
from orc.orchestrator.ledger.errors import LedgerError
from orc.orchestrator.ledger.schema import metadata
from orc.orchestrator.ledger.version import HEAD

MIGRATIONS = Path(__file__).with_name("migrations")

# Any number: all that migrate one PostgreSQL ledger take the same lock.
_ADVISORY_LOCK = 0x6F7263


def stored_version(engine: sa.Engine) -> str | None:
    """Return the schema version of the database, `None` when it holds no ledger. Raises `LedgerError`."""
    from alembic.migration import MigrationContext

    try:
        with engine.connect() as connection:
            return MigrationContext.configure(connection).get_current_revision()
    except SQLAlchemyError as error:
        raise _failed(engine, error) from error


def upgrade(url: str, version: str | None) -> None:
    """Make the tables where *version* is `None`; else run the migrations to `HEAD`, all in one transaction.

    Raises `LedgerError`.
    """
    from alembic import command
    from alembic.config import Config
    from alembic.migration import MigrationContext
    from alembic.script import ScriptDirectory

    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS).replace("%", "%%"))
    known = {script.revision for script in ScriptDirectory.from_config(config).walk_revisions()}
    engine = sa.create_engine(url)
    try:
        if version is not None and version not in known:
            raise LedgerError(
                f"the ledger has schema version {version!r}, this orc has {HEAD!r}",
                where=engine.url.render_as_string(hide_password=True),
                hint=f"{_writer_of(version)}, or point ORC_STATE_DIR to another directory",
            )
        with engine.connect() as connection:
            _lock(connection)
            config.attributes["connection"] = connection
            if MigrationContext.configure(connection).get_current_revision() is None:
                metadata.create_all(connection)
            else:  # of an older orc, or another process has been faster
                command.upgrade(config, "head")
            connection.commit()
    except SQLAlchemyError as error:
        raise _failed(engine, error) from error
    finally:
        engine.dispose()


def _writer_of(version: str) -> str:
    if version.isdecimal() and version < HEAD:  # migrations begin with the first release
        return "a development version from before the first release wrote it: let that end its jobs"
    return "a newer orc wrote it: upgrade orc"


def _lock(connection: sa.Connection) -> None:
    """Block all other migrations until this transaction ends."""
    if connection.dialect.name == "postgresql":
        connection.execute(sa.text("SELECT pg_advisory_xact_lock(:key)"), {"key": _ADVISORY_LOCK})
    elif connection.dialect.name == "sqlite":
        connection.execute(sa.text(f"PRAGMA busy_timeout = {BUSY_TIMEOUT_S * 1000:.0f}"))
        connection.execute(sa.text("BEGIN IMMEDIATE"))


def _failed(engine: sa.Engine, error: SQLAlchemyError) -> LedgerError:
    reason = str(getattr(error, "orig", None) or error).strip().splitlines()[0]
    return LedgerError(f"cannot use the ledger: {reason}", where=engine.url.render_as_string(hide_password=True))
