"""The ledger's `Database` on anything SQLAlchemy can reach, PostgreSQL first of all."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import sqlalchemy as sa
from sqlalchemy.exc import OperationalError, SQLAlchemyError

from orc.orchestrator.ledger.database import BUSY_TIMEOUT_S, Connection
from orc.orchestrator.ledger.errors import LedgerError

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


def _hint(error: SQLAlchemyError) -> str:
    """Return what to do about *error*; empty where only its text can tell."""
    if isinstance(error, OperationalError):  # not there, starting, stopping, cut, or a lock was held for too long
        return "nothing was half written; the same works again once the server answers: see its log if it does not"
    return ""


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
            # The statement and its parameters stay out of the message: they are long and not for users.
            reason = str(getattr(error, "orig", None) or error).strip().splitlines()[0]
            raise LedgerError(f"cannot use the ledger: {reason}", where=self.url, hint=_hint(error)) from error

    def unwritable(self) -> str:
        """Return nothing: a server's errors show when it is used."""
        return ""

    def close(self) -> None:
        """Give up all connections."""
        self.engine.dispose()
