"""Opening the ledger: find it, make it when there is none, bring it up to this version, refuse what is not ours."""

from __future__ import annotations

import contextlib
import fcntl
import os
import sqlite3
from pathlib import Path

from orc.launchers.strict_modes import make_private
from orc.orchestrator.ledger.database import HEAD, Database, LedgerError, SqliteDatabase, explained, unwritable

FILE_NAME = "ledger.db"


def open_database(state_dir: Path, url: str | None = None, *, volatile: bool = False) -> Database:
    """Return the ledger named by *url* (``ORC_LEDGER_URL``), or the file ``ledger.db`` in *state_dir*, ready for use.

    With *volatile*, a file that cannot be written (its disk is full, its file system read-only) gives a copy in memory,
    `SqliteDatabase.volatile`. Raises `LedgerError` when it cannot be opened, is damaged or cut, is not a ledger, or was
    written by a newer orc.
    """
    file = _file_of(url) if url else state_dir / FILE_NAME
    if file is None:
        return _open_core(url or "")
    if url is None:
        _make_private_dir(state_dir)
    _make_file(file)
    why = unwritable(file)
    if why and volatile:
        return _checked(SqliteDatabase(file, why))
    try:
        return _checked(SqliteDatabase(file))
    except LedgerError as error:
        # A quota, or a disk that was filled just now.
        if volatile and isinstance(error.__cause__, sqlite3.OperationalError) and _is_of_space(error.__cause__):
            return _checked(SqliteDatabase(file, str(error.__cause__)))
        raise


def _is_of_space(error: sqlite3.OperationalError) -> bool:
    return any(words in str(error) for words in ("disk I/O error", "disk is full", "readonly"))


def _checked(database: SqliteDatabase) -> SqliteDatabase:
    """*database* at the version of this orc. Closes it otherwise, and raises `LedgerError`."""
    try:
        version = _version_in_file(database)
        if version != HEAD:
            if database.volatile:
                what = f"the ledger of an older orc cannot be brought up to this version: {database.volatile}"
                raise LedgerError(what, where=str(database.path), hint="free some space and try again")
            _upgrade(database, version)
    except BaseException:
        database.close()
        raise
    return database


def _file_of(url: str) -> Path | None:
    """Return the file that a ``sqlite:///`` URL names; `None` for every other database."""
    prefix = "sqlite:///"
    if not url.startswith(prefix):
        return None
    path = url.removeprefix(prefix)
    if not path or path == ":memory:":
        raise LedgerError("the ledger must outlive the process", where="ORC_LEDGER_URL", hint="name a file")
    return Path(path).absolute()  # so its name says the same in a process with another working directory


def _make_private_dir(state_dir: Path) -> None:
    try:
        make_private(state_dir)
    except OSError as error:
        raise LedgerError(
            f"cannot make the state directory: {error.strerror or error}",
            where=str(state_dir),
            hint="point ORC_STATE_DIR to a directory that you can write to",
        ) from error


def _version_in_file(database: SqliteDatabase) -> str:
    """Return the schema version of the file."""
    with database.read() as connection:
        tables = {row[0] for row in connection.tuples("SELECT name FROM sqlite_master WHERE type = 'table'")}
        versions = connection.tuples("SELECT version_num FROM alembic_version") if "alembic_version" in tables else []
    if len(versions) != 1 or "jobs" not in tables:
        raise LedgerError(
            "this is a SQLite database, but not an orc ledger",
            where=str(database.path),
            hint="move the file away, or point ORC_STATE_DIR to another directory",
        )
    return str(versions[0][0])


def _make_file(path: Path) -> None:
    """A new ledger where there is none; it appears complete, so that one without content is never a new one.

    Raises `LedgerError` for one that was cut to nothing.
    """
    with explained(path):
        if not path.exists():
            _make_ledger(path)
        if path.stat().st_size:
            return
    raise LedgerError(
        f"the ledger is cut: the file has 0 bytes{_beside(path)}",
        where=str(path),
        hint="restore it from a backup, or move it away to start a new one; "
        "`orc adopt` then finds jobs again from their directories",
    )


def _beside(path: Path) -> str:
    """Return the names of what lies beside the file, for people."""
    jobs = path.parent / "jobs"
    count = sum(entry.is_dir() for entry in jobs.iterdir()) if jobs.is_dir() else 0
    return f", and the directories of {count} jobs lie beside it" if count else ""


def _make_ledger(path: Path) -> None:
    """Make it aside and link it into place. First users wait for each other; none meets what a lost ledger has left."""
    from orc.orchestrator.ledger.schema import sqlite_statements

    statements = sqlite_statements()  # imports SQLAlchemy, which takes as long as a whole command: once
    new = path.with_name(f".{path.name}.{os.getpid()}.{os.urandom(4).hex()}")
    try:
        # Made here and not by SQLite, so that it is private from its first moment; -wal and -shm take its mode.
        os.close(os.open(new, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600))
        raw = sqlite3.connect(new, isolation_level=None)
        try:
            raw.execute("PRAGMA synchronous = FULL")
            raw.execute("BEGIN")
            for statement in statements:
                raw.execute(statement)
            raw.execute("COMMIT")
        finally:
            raw.close()
        lock = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            with contextlib.suppress(OSError):  # NFS locks no directories; the link alone decides there who is first
                fcntl.flock(lock, fcntl.LOCK_EX)
            if not path.exists():
                for suffix in ("-wal", "-shm", "-journal"):
                    path.with_name(path.name + suffix).unlink(missing_ok=True)
                with contextlib.suppress(FileExistsError):
                    os.link(new, path)
        finally:
            os.close(lock)
    finally:
        for leftover in (new, new.with_name(f"{new.name}-journal")):
            leftover.unlink(missing_ok=True)


def _upgrade(database: SqliteDatabase, version: str) -> None:
    from orc.orchestrator.ledger.engine import upgrade

    upgrade(database.url, version)


def _open_core(url: str) -> Database:
    from orc.orchestrator.ledger.engine import CoreDatabase, stored_version, upgrade

    database = CoreDatabase(url)
    try:
        version = stored_version(database.engine)
        if version != HEAD:
            upgrade(url, version)
    except BaseException:
        database.close()
        raise
    return database
