"""Opening the ledger: find it, make it when there is none, bring it up to this version, refuse what is not ours."""

from __future__ import annotations

from pathlib import Path

from orc.orchestrator.ledger.database import Database, SqliteDatabase
from orc.orchestrator.ledger.errors import LedgerError
from orc.orchestrator.ledger.version import HEAD

FILE_NAME = "ledger.db"


def open_database(state_dir: Path, url: str | None = None) -> Database:
    """The ledger named by *url* (``ORC_LEDGER_URL``), or the file ``ledger.db`` in *state_dir*, ready for use.

    Raises `LedgerError` when it cannot be opened, is damaged, is not a ledger, or was written by a newer orc.
    """
    file = _file_of(url) if url else state_dir / FILE_NAME
    if file is None:
        return _open_core(url or "")
    if url is None:
        _make_private_dir(state_dir)
    database = SqliteDatabase(file)
    try:
        version = _version_in_file(database)
        if version is None:
            _create_in_file(database)
        elif version != HEAD:
            _upgrade(database, version)
    except BaseException:
        database.close()
        raise
    return database


def _file_of(url: str) -> Path | None:
    """The file that a ``sqlite:///`` URL names; `None` for every other database."""
    prefix = "sqlite:///"
    if not url.startswith(prefix):
        return None
    path = url.removeprefix(prefix)
    if not path or path == ":memory:":
        raise LedgerError("the ledger must outlive the process", where="ORC_LEDGER_URL", hint="name a file")
    return Path(path)


def _make_private_dir(state_dir: Path) -> None:
    try:
        state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise LedgerError(
            f"cannot make the state directory: {error.strerror or error}",
            where=str(state_dir),
            hint="point ORC_STATE_DIR to a directory that you can write to",
        ) from error


def _version_in_file(database: SqliteDatabase) -> str | None:
    """The schema version of the file, `None` when it is empty."""
    with database.read() as connection:
        tables = {row[0] for row in connection.tuples("SELECT name FROM sqlite_master WHERE type = 'table'")}
        if not tables:
            return None
        versions = connection.tuples("SELECT version_num FROM alembic_version") if "alembic_version" in tables else []
    if len(versions) != 1 or "jobs" not in tables:
        raise LedgerError(
            "this is a SQLite database, but not an orc ledger",
            where=str(database.path),
            hint="move the file away, or point ORC_STATE_DIR to another directory",
        )
    return str(versions[0][0])


def _create_in_file(database: SqliteDatabase) -> None:
    statements = Path(__file__).with_name("schema.sql").read_text(encoding="utf-8").split(";\n\n")
    with database.write() as connection:
        # Another first user may have been faster; the lock is ours now, so a second look is final.
        if connection.tuples("SELECT 1 FROM sqlite_master WHERE name = 'alembic_version'"):
            return
        for statement in statements:
            connection.execute(statement)


def _upgrade(database: SqliteDatabase, version: str) -> None:
    from orc.orchestrator.ledger.upgrade import upgrade

    upgrade(database.url, version)


def _open_core(url: str) -> Database:
    from orc.orchestrator.ledger.engine import CoreDatabase
    from orc.orchestrator.ledger.upgrade import stored_version, upgrade

    database = CoreDatabase(url)
    try:
        version = stored_version(database.engine)
        if version != HEAD:
            upgrade(url, version)
    except BaseException:
        database.close()
        raise
    return database
