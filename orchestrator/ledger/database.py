"""Database of the ledger: a few portable SQL statements with ``:named`` parameters; the ledger in a file.

The file is served by the standard library's driver, because importing SQLAlchemy costs more time (0.15-0.2 s measured)
than a whole ``orc submit`` or ``orc list`` may take. Every other database goes through SQLAlchemy
(`orc.orchestrator.ledger.engine`), which also owns the schema and its migrations.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import shlex
import sqlite3
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, Protocol

from orc.launchers.errors import LaunchError

HEAD = "0007"  # version of the schema that this code works with: the newest below `migrations/versions`


class LedgerError(LaunchError):
    """The ledger cannot be used: unreadable, not writable, damaged or of another version. Nothing was changed."""


class Conflict(Exception):
    """The job was changed since it was read. Read it again; never shown to users."""


# SQLite does not serve those who wait in order of their coming: with eight at a disk that takes a second for each sync,
# one in fifty of their waits is longer than half a minute.
BUSY_TIMEOUT_S = 120.0
SILENT_S = 1.0  # a longer wait is reported
_turns: dict[Path, threading.Lock] = {}  # of the writers of this process, by file


class Connection(Protocol):
    """Statements of one transaction."""

    def execute(self, sql: str, parameters: Mapping[str, Any] | None = None) -> int:
        """Run one statement; the number of rows it changed."""
        ...

    def executemany(self, sql: str, parameters: Sequence[Mapping[str, Any]]) -> None:
        """Run one statement for each set of parameters."""
        ...

    def lock(self, name: str) -> None:
        """Wait until no other transaction holds the lock *name*, and hold it until this one ends."""
        ...

    def tuples(self, sql: str, parameters: Mapping[str, Any] | None = None) -> list[tuple[Any, ...]]:
        """Run one query; its rows."""
        ...


def insert(connection: Connection, table: str, *rows: Mapping[str, Any], conflict: str = "") -> None:
    """Insert *rows*, which have the same columns; *conflict* says what becomes of one that is there."""
    if rows:
        names, values = ", ".join(rows[0]), ", ".join(f":{name}" for name in rows[0])
        connection.executemany(f"INSERT INTO {table} ({names}) VALUES ({values}) {conflict}", rows)  # noqa: S608


def one_of(column: str, values: Iterable[Any]) -> tuple[str, dict[str, Any]]:
    """Return the condition that *column* has one of *values*, and its parameters."""
    found = {f"{column.replace('.', '_')}_{number}": value for number, value in enumerate(values)}
    return (f"{column} IN ({', '.join(f':{name}' for name in found)})" if found else "1 = 0"), found


def batches(values: Sequence[Any], size: int = 500) -> Iterator[Sequence[Any]]:
    """Yield *values*, so many at a time: databases bound the parameters of one statement."""
    return (values[start : start + size] for start in range(0, len(values), size))


class Database(Protocol):
    """A database that holds a ledger. Raises `LedgerError` for all that goes wrong."""

    url: str  # as SQLAlchemy writes it, without a password

    def read(self) -> AbstractContextManager[Connection]:
        """Return a context manager around one consistent read: gives a `Connection`."""
        ...

    def write(self) -> AbstractContextManager[Connection]:
        """Return a context manager around one transaction, durable when it is left: gives a `Connection`."""
        ...

    def unwritable(self) -> str:
        """Return the reason why nothing can be written now; empty without one."""
        ...

    def close(self) -> None:
        """Give up the connection."""
        ...


class _SqliteConnection:
    def __init__(self, raw: sqlite3.Connection) -> None:
        self._raw = raw

    def execute(self, sql: str, parameters: Mapping[str, Any] | None = None) -> int:
        return self._raw.execute(sql, parameters or {}).rowcount

    def executemany(self, sql: str, parameters: Sequence[Mapping[str, Any]]) -> None:
        self._raw.executemany(sql, parameters)

    def lock(self, name: str) -> None:
        """Nothing to do: a transaction that writes is the only one from its begin on."""

    def tuples(self, sql: str, parameters: Mapping[str, Any] | None = None) -> list[tuple[Any, ...]]:
        return self._raw.execute(sql, parameters or {}).fetchall()


class SqliteDatabase:
    """A ledger in one file, private to its owner (mode 0600), fully synchronous.

    In WAL mode, but on file systems that other machines write to as well: there, it has a rollback journal, because
    the memory that WAL shares between processes is not shared between machines. With *volatile*, why it cannot be
    written, it is a copy in memory instead: all can be read, and changes are forgotten.
    """

    def __init__(self, path: Path, volatile: str = "") -> None:
        self.path = path
        self.network = network_file_system(path.parent)  # its type, or None
        self.url = f"sqlite:///{path}"
        self.volatile = volatile
        with explained(path):
            # The file is there already: made by SQLite it would not be private. Never opened here: closing any
            # descriptor of a file drops all locks that the process holds on it, those of other connections included.
            self._raw = self._copy() if volatile else self._connect()
        if not volatile:
            keep_reserve(path)

    def _copy(self) -> sqlite3.Connection:
        """Return the content of the file, which is not changed in any way."""
        memory = sqlite3.connect(":memory:", isolation_level=None)
        # With files of a writer beside it, it can be read as any other; without, SQLite has to be told that nobody
        # changes it, because it cannot make them.
        for how in ("mode=ro", "mode=ro&immutable=1"):
            try:
                source = sqlite3.connect(f"{self.path.absolute().as_uri()}?{how}", uri=True, timeout=BUSY_TIMEOUT_S)
                try:
                    source.backup(memory)
                finally:
                    source.close()
            except sqlite3.OperationalError as error:
                failed = error
            else:
                return memory
        memory.close()
        raise failed

    def unwritable(self) -> str:
        """The reason why nothing can be written now; empty when it can."""
        return unwritable(self.path)

    def _connect(self) -> sqlite3.Connection:
        began = time.monotonic()
        announced = False
        while True:
            # One thread at a time, but not always the same one (`orc serve`): the owner of a ledger sees to that.
            raw = sqlite3.connect(
                f"{self.path.absolute().as_uri()}?mode=rw", uri=True, timeout=SILENT_S, check_same_thread=False
            )
            raw.isolation_level = None
            try:
                raw.execute("PRAGMA foreign_keys = ON")
                raw.execute("PRAGMA synchronous = FULL")
                # A switch, which several first users may attempt at once. The busy time-out does not cover it, and an
                # open connection in WAL mode is in the way of all others that want to leave it.
                raw.execute(f"PRAGMA journal_mode = {'DELETE' if self.network else 'WAL'}")
            except sqlite3.OperationalError as error:
                raw.close()
                waited = time.monotonic() - began
                if "locked" not in str(error) or waited > BUSY_TIMEOUT_S:
                    raise
                if not announced and waited > SILENT_S / 2:
                    announced = True
                    self._tell()
            except BaseException:
                raw.close()
                raise
            else:
                raw.execute(f"PRAGMA busy_timeout = {BUSY_TIMEOUT_S * 1000:.0f}")
                return raw
            time.sleep(random.uniform(0.005, 0.05))  # noqa: S311 - no secret: those who wait must not wait in step

    @contextmanager
    def read(self) -> Iterator[Connection]:
        """Open a consistent read."""
        with self._transaction("BEGIN") as connection:
            yield connection

    @contextmanager
    def write(self) -> Iterator[Connection]:
        """Open a transaction. The lock is taken at once, so that what was read in it still holds when it writes.

        Threads of this process take turns before that. At the file's lock they would sleep and look again, for longer
        and longer, while those that come later find it free.
        """
        turn = _turns.setdefault(self.path, threading.Lock())
        with explained(self.path):
            if not turn.acquire(timeout=BUSY_TIMEOUT_S):
                raise sqlite3.OperationalError("database is locked")
        try:
            with self._transaction("BEGIN IMMEDIATE") as connection:
                yield connection
        finally:
            turn.release()

    @contextmanager
    def _transaction(self, begin: str) -> Iterator[Connection]:
        with explained(self.path):
            self._begin(begin)
            try:
                yield _SqliteConnection(self._raw)
                self._raw.execute("COMMIT")
            except BaseException:
                if self._raw.in_transaction:
                    self._raw.execute("ROLLBACK")
                raise

    def _begin(self, statement: str) -> None:
        """Begin a transaction; a long wait is reported, with the processes that hold the lock."""
        try:
            self._raw.execute(f"PRAGMA busy_timeout = {SILENT_S * 1000:.0f}")
            self._take(statement)
        except sqlite3.OperationalError as error:
            if "locked" not in str(error):
                raise
            self._tell()
            self._raw.execute(f"PRAGMA busy_timeout = {BUSY_TIMEOUT_S * 1000:.0f}")
            self._take(statement)
        else:
            self._raw.execute(f"PRAGMA busy_timeout = {BUSY_TIMEOUT_S * 1000:.0f}")

    def _take(self, statement: str) -> None:
        self._raw.execute(statement)
        try:
            self._raw.execute("SELECT 1 FROM sqlite_master LIMIT 1").fetchall()  # a look takes its lock with this
        except BaseException:
            self._raw.execute("ROLLBACK")
            raise

    def _tell(self) -> None:
        import logging

        held = ", ".join(holders(self.path))
        logging.getLogger("orc").warning("waiting for the ledger %s%s", self.path, f", held by {held}" if held else "")

    def close(self) -> None:
        """Close the file."""
        self._raw.close()


@contextmanager
def explained(path: Path) -> Iterator[None]:
    """Turn the driver's errors about the file at *path* into one `LedgerError` with advice."""
    try:
        yield
    except LaunchError:
        raise
    except OSError as error:
        reason = error.strerror or str(error)
        raise LedgerError(f"cannot open the ledger: {reason}", where=str(path), hint=_hint(reason, path)) from error
    except sqlite3.Error as error:
        raise LedgerError(f"cannot use the ledger: {error}", where=str(path), hint=_hint(str(error), path)) from error


_HINTS = (
    (
        ("not a database", "malformed"),
        "the file is damaged or is not an orc ledger; restore it from a backup, or move it away to start an empty one",
    ),
    (("full", "no space", "too large", "disk i/o", "quota"), "free some space on this file system and try again"),
    (
        ("readonly", "read-only", "permission denied", "unable to open"),
        "make the directory writable for you, or point ORC_STATE_DIR to another one",
    ),
    (("locked",), "another process holds the ledger for long; see which with: fuser -v {path}"),
)


def _hint(message: str, path: Path) -> str:
    lowered = message.lower()
    for needles, hint in _HINTS:
        if any(needle in lowered for needle in needles):
            return hint.replace("{path}", shlex.quote(str(path)))
    return "check the directory, or point ORC_STATE_DIR to another one"


_NATIVE = "9p afs beegfs ceph cifs coda glusterfs gpfs lustre nfs nfs4 ocfs2 orangefs pvfs2 smb3 smbfs wekafs"
_FUSE = "ceph glusterfs juicefs s3fs sshfs"
_NETWORK = frozenset([*_NATIVE.split(), *(f"fuse.{name}" for name in _FUSE.split())])


def network_file_system(path: Path, mountinfo: Path = Path("/proc/self/mountinfo")) -> str | None:
    """Return the type of the file system that holds *path*, when other machines may write to it; else `None`."""
    try:
        table = mountinfo.read_text(encoding="utf-8", errors="surrogateescape")
    except OSError:
        return None  # no /proc: nothing can be told, and nothing is known to be wrong
    kind = kind_of(os.path.realpath(path), table)
    return kind if kind in _NETWORK else None


def kind_of(path: str, table: str) -> str:
    """Return the file system type of the mount in *table* (text of ``mountinfo``) that holds the absolute *path*."""
    found, longest = "", -1
    for line in table.splitlines():
        fields, _, rest = line.partition(" - ")
        columns = fields.split(" ")
        if len(columns) < 5 or not rest:
            continue
        point = re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), columns[4])
        below = path == point or path.startswith(point.rstrip("/") + "/")
        # Later lines lie on top of earlier ones at the same place.
        if below and len(point) >= longest:
            found, longest = rest.split(" ")[0], len(point)
    return found


def holders(path: Path, locks: Path = Path("/proc/locks")) -> list[str]:
    """Return ``process 4711 (orc)`` for each process of this machine that holds a lock on the ledger's file *path*.

    Empty where that is not visible.
    """
    inodes = set(_inodes(path))
    try:
        table = locks.read_text(encoding="ascii")
    except OSError:
        return []
    return [f"process {pid}{_named(pid)}" for pid in dict.fromkeys(pids(table, inodes))]


def pids(table: str, inodes: Iterable[int]) -> list[int]:
    """Return the holders of write locks on files of these *inodes*, in *table* (text of ``/proc/locks``)."""
    wanted = {str(inode) for inode in inodes}
    found = []
    for line in table.splitlines():
        words = line.split()
        # 1: POSIX ADVISORY WRITE 4711 08:01:131 0 EOF; those who wait ("->") hold nothing.
        if "->" not in line and len(words) >= 6 and words[3] == "WRITE" and words[5].rpartition(":")[2] in wanted:
            found.append(int(words[4]))
    return [pid for pid in found if pid > 0]


def _inodes(path: Path) -> Iterable[int]:
    for suffix in ("", "-shm"):
        try:
            yield path.with_name(path.name + suffix).stat().st_ino
        except OSError:
            continue


def _named(pid: int) -> str:
    try:
        return f" ({Path(f'/proc/{pid}/comm').read_text(encoding='utf-8', errors='replace').strip()})"
    except OSError:
        return ""


RESERVE_BYTES = 1 << 20
_ENOUGH_BYTES = 64 << 20  # only then is something kept back
_TRIAL_BYTES = 64 << 10
_NEEDED_BYTES = 256 << 10  # for the changes of one command, and the files that SQLite keeps beside the ledger


def unwritable(path: Path) -> str:
    """Return the reason why the ledger at *path* cannot be written now; empty when it can."""
    try:
        status = os.statvfs(path.parent)
    except OSError:
        return ""  # what is wrong shows when it is opened
    if status.f_flag & os.ST_RDONLY:
        return "its file system is read-only"
    if _free(status) < _NEEDED_BYTES:
        _give_up(path)
        if _free(os.statvfs(path.parent)) < _NEEDED_BYTES:
            return "its disk is full"
    if not path.exists():
        return ""
    if not (os.access(path, os.W_OK) and os.access(path.parent, os.W_OK)):
        return "you may not write it"
    if _try(path):
        _give_up(path)
        return _try(path)
    return ""


def _try(path: Path) -> str:
    """Return the reason why a small file beside *path* cannot be written; quotas and lack of inodes show here."""
    trial = path.with_name(f".{path.name}.{os.getpid()}.{os.urandom(4).hex()}")
    try:
        descriptor = os.open(trial, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600)
        try:
            trial.unlink()
            os.write(descriptor, bytes(_TRIAL_BYTES))
        finally:
            os.close(descriptor)
    except OSError as error:
        return f"nothing can be written beside it: {error.strerror or error}"
    return ""


def keep_reserve(path: Path) -> None:
    """Hold some space back beside *path* where there is plenty. Random bytes: no file system can compress them."""
    reserve = _reserve(path)
    with contextlib.suppress(OSError):
        if reserve.exists() or _free(os.statvfs(path.parent)) < _ENOUGH_BYTES:
            return
        descriptor = os.open(reserve, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600)
        try:
            os.write(descriptor, os.urandom(RESERVE_BYTES))
        finally:
            os.close(descriptor)


def _give_up(path: Path) -> None:
    with contextlib.suppress(OSError):
        _reserve(path).unlink()


def _reserve(path: Path) -> Path:
    return path.with_name(path.name + ".reserve")


def _free(status: os.statvfs_result) -> int:
    if not status.f_blocks:  # some file systems in user space do not say how large they are
        return _ENOUGH_BYTES
    return (status.f_bfree if os.geteuid() == 0 else status.f_bavail) * status.f_frsize
