"""The ledger behind a URL, PostgreSQL first of all: its connections by SQLAlchemy, and its migrations by alembic."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy.exc import OperationalError, SQLAlchemyError

from orc.orchestrator.ledger.database import BUSY_TIMEOUT_S, HEAD, Connection, LedgerError
from orc.orchestrator.ledger.schema import metadata

CONNECT_TIMEOUT_S = 10


class _CoreConnection:
    def __init__(self, raw: sa.Connection) -> None:
        self._raw = raw

    def execute(self, sql: str, parameters: Mapping[str, Any] | None = None) -> int:
        return self._raw.execute(sa.text(sql), dict(parameters or {})).rowcount

    def executemany(self, sql: str, parameters: Sequence[Mapping[str, Any]]) -> None:
        if parameters:
            self._raw.execute(sa.text(sql), [dict(p) for p in parameters])

    def lock(self, name: str) -> None:
        if self._raw.dialect.name == "postgresql":
            # The database hashes the name: two names that collide wait for each other and are otherwise right.
            self._raw.execute(sa.text("SELECT pg_advisory_xact_lock(hashtext(:name))"), {"name": f"orc:{name}"})
        else:  # SQLite: a statement that writes takes the lock on the whole file, even if it changes nothing
            self._raw.execute(sa.text("UPDATE jobs SET id = id WHERE 1 = 0"))

    def tuples(self, sql: str, parameters: Mapping[str, Any] | None = None) -> list[tuple[Any, ...]]:
        return [tuple(row) for row in self._raw.execute(sa.text(sql), dict(parameters or {}))]


def _engine(url: str) -> sa.Engine:
    """Return an engine that makes cut connections again, and waits for nothing for ever."""
    parsed = sa.make_url(url)
    if parsed.get_backend_name() != "postgresql":
        return sa.create_engine(parsed, pool_pre_ping=True)
    limits = {} if "connect_timeout" in parsed.query else {"connect_timeout": CONNECT_TIMEOUT_S}
    engine = sa.create_engine(parsed, pool_pre_ping=True, connect_args=limits)

    def set_limits(raw: Any, _record: object) -> None:
        with raw.cursor() as cursor:
            # Who stops in the middle of a transaction loses it, before those who wait for its locks give up.
            cursor.execute(f"SET idle_in_transaction_session_timeout = {BUSY_TIMEOUT_S * 500:.0f}")
            cursor.execute(f"SET lock_timeout = {BUSY_TIMEOUT_S * 1000:.0f}")
        raw.commit()

    sa.event.listen(engine, "connect", set_limits)
    return engine


class CoreDatabase:
    """A ledger behind a SQLAlchemy URL."""

    def __init__(self, url: str) -> None:
        try:
            self.engine = _engine(url)
        except (SQLAlchemyError, ImportError, ValueError) as error:
            # A ValueError is about a part of the URL, and may quote it.
            why = "ORC_LEDGER_URL is no URL" if isinstance(error, ValueError) else str(error).splitlines()[0]
            raise LedgerError(
                f"cannot open the ledger: {why}",
                where="ORC_LEDGER_URL",
                hint="a URL looks like postgresql+psycopg://user@host/database; its driver must be installed",
            ) from error
        self.url = self.engine.url.render_as_string(hide_password=True)

    @contextmanager
    def read(self) -> Iterator[Connection]:
        """Open a consistent read: all its queries see the same moment."""
        with self._transaction("REPEATABLE READ" if self.engine.dialect.name == "postgresql" else None) as connection:
            yield connection

    @contextmanager
    def write(self) -> Iterator[Connection]:
        """Open a transaction."""
        with self._transaction() as connection:
            yield connection

    @contextmanager
    def _transaction(self, isolation: str | None = None) -> Iterator[Connection]:
        try:
            with self.engine.connect() as connection:
                if isolation:
                    connection.execution_options(isolation_level=isolation)
                with connection.begin():
                    yield _CoreConnection(connection)
        except SQLAlchemyError as error:
            raise _failed(self.engine, error) from error

    def unwritable(self) -> str:
        """Return nothing: a server's errors show when it is used."""
        return ""

    def close(self) -> None:
        """Give up all connections."""
        self.engine.dispose()


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
    # The statement and its parameters stay out of the message: they are long and not for users.
    reason, hint = str(getattr(error, "orig", None) or error).strip().splitlines()[0], ""
    # A server that is not there, starting, stopping or cut off, or where a lock was held for too long.
    if engine.dialect.name != "sqlite" and isinstance(error, OperationalError):
        hint = "nothing was half written; the same works again once the server answers: see its log if it does not"
    where = engine.url.render_as_string(hide_password=True)
    return LedgerError(f"cannot use the ledger: {reason}", where=where, hint=hint)
