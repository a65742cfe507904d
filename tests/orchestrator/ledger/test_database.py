"""The file's driver by itself: what it runs, for whom it waits, and what it says about what goes wrong."""

from __future__ import annotations

import errno
import sqlite3
import threading
from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from orc.launchers.errors import LaunchError
from orc.orchestrator.ledger import database as ledger_database
from orc.orchestrator.ledger.database import LedgerError, SqliteDatabase, explained
from orc.orchestrator.ledger.opening import open_database

TAG = "INSERT INTO job_tags (job_id, key, value) VALUES (:job, :key, 'x')"
KEYS = "SELECT key FROM job_tags ORDER BY key"


@pytest.fixture
def opened(tmp_path):
    database = open_database(tmp_path)
    database._raw.execute("PRAGMA foreign_keys = OFF")  # tags of no job are enough here
    yield database
    database.close()


def keys(database):
    with database.read() as connection:
        return [key for (key,) in connection.tuples(KEYS)]


def put(database, *names):
    with database.write() as connection:
        connection.executemany(TAG, [{"job": "j", "key": name} for name in names])


@contextmanager
def locked(path, begin="BEGIN IMMEDIATE"):
    holder = sqlite3.connect(path, isolation_level=None)
    holder.execute(begin)
    try:
        yield
    finally:
        holder.execute("ROLLBACK")
        holder.close()


def test_statements_take_named_values_and_say_how_many_rows_they_changed(opened):
    put(opened, "a", "b", "c")
    with opened.write() as connection:
        connection.lock("place:lab")
        assert connection.execute("UPDATE job_tags SET value = :v WHERE key <> :k", {"v": "y", "k": "a"}) == 2
        assert connection.execute("DELETE FROM job_tags WHERE key = 'c'") == 1
    with opened.read() as connection:
        assert connection.tuples(f"{KEYS} LIMIT :n", {"n": 1}) == [("a",)]
        assert connection.tuples(KEYS) == [("a",), ("b",)]


def test_what_fails_inside_is_taken_back_and_goes_on_as_it_is(opened):
    class Own(Exception):
        pass

    def fail_after(statement):
        with opened.write() as connection:
            connection.execute(TAG, {"job": "j", "key": "a"})
            connection.execute(statement)
            raise Own

    with pytest.raises(Own):
        fail_after("UPDATE job_tags SET value = 'z'")
    assert keys(opened) == []
    with pytest.raises(Own):
        fail_after("ROLLBACK")  # as SQLite itself does where a disk is full
    assert keys(opened) == []
    put(opened, "b")
    assert keys(opened) == ["b"]


def test_an_error_of_sqlite_takes_the_transaction_back_and_names_the_file(opened, tmp_path):
    put(opened, "a")
    with pytest.raises(LedgerError) as caught:
        put(opened, "b", "a")
    assert str(caught.value).splitlines()[0].startswith(f"{tmp_path}/ledger.db: cannot use the ledger: UNIQUE")
    assert isinstance(caught.value.__cause__, sqlite3.IntegrityError)
    assert keys(opened) == ["a"]


def test_who_waits_says_so_once_and_waits_on(opened, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(ledger_database, "SILENT_S", 0.02)
    monkeypatch.setattr(ledger_database, "BUSY_TIMEOUT_S", 0.05)
    monkeypatch.setattr("orc.orchestrator.ledger.database.holders", lambda path: [f"one of {path.name}", "another"])
    ran = []
    opened._raw.set_trace_callback(ran.append)
    with locked(tmp_path / "ledger.db"), pytest.raises(LedgerError, match="database is locked"):
        put(opened, "a")
    begun = [statement for statement in ran if not statement.startswith("SELECT")]
    assert begun == ["PRAGMA busy_timeout = 20", "BEGIN IMMEDIATE", "PRAGMA busy_timeout = 50", "BEGIN IMMEDIATE"]
    (said,) = caplog.records
    held = "held by one of ledger.db, another"
    assert (said.name, said.levelname) == ("orc", "WARNING")
    assert said.getMessage() == f"waiting for the ledger {tmp_path}/ledger.db, {held}"
    monkeypatch.setattr("orc.orchestrator.ledger.database.holders", lambda path: [])
    with locked(tmp_path / "ledger.db"), pytest.raises(LedgerError):
        put(opened, "a")
    assert caplog.records[1].getMessage() == f"waiting for the ledger {tmp_path}/ledger.db"
    put(opened, "b")
    assert keys(opened) == ["b"]


def test_writers_of_one_process_take_turns_and_do_not_poll_for_the_files_lock(opened, tmp_path):
    second, ran = SqliteDatabase(tmp_path / "ledger.db"), []
    second._raw.execute("PRAGMA foreign_keys = OFF")
    second._raw.set_trace_callback(ran.append)
    waiting = threading.Thread(target=put, args=(second, "b"))
    with opened.write():
        waiting.start()
        waiting.join(0.2)
        assert ran == []
    waiting.join()
    second.close()
    assert keys(opened) == ["b"]


def test_who_has_said_that_it_waits_has_all_its_patience_left(opened, tmp_path, monkeypatch):
    monkeypatch.setattr(ledger_database, "SILENT_S", 0.02)
    holder = sqlite3.connect(tmp_path / "ledger.db", isolation_level=None)
    holder.execute("BEGIN IMMEDIATE")
    monkeypatch.setattr("orc.orchestrator.ledger.database.holders", lambda path: list(holder.execute("COMMIT")))
    with opened.write() as connection:
        assert connection.tuples("PRAGMA busy_timeout") == [(120_000,)]
    holder.close()


def test_a_look_that_was_begun_in_vain_leaves_no_transaction_open(tmp_path, monkeypatch):
    monkeypatch.setattr(ledger_database, "SILENT_S", 0.02)
    monkeypatch.setattr(ledger_database, "BUSY_TIMEOUT_S", 0.05)
    monkeypatch.setattr(ledger_database, "network_file_system", lambda _: "nfs4")
    shared = open_database(tmp_path)  # with a rollback journal, a writer keeps readers out
    with locked(tmp_path / "ledger.db", "BEGIN EXCLUSIVE"), pytest.raises(LedgerError, match="locked"):
        keys(shared)
    assert not shared._raw.in_transaction
    assert keys(shared) == []
    shared.close()


def test_an_error_that_no_waiting_mends_is_told_at_once(opened, caplog):
    opened._raw.execute("BEGIN")
    with pytest.raises(LedgerError, match="within a transaction"):
        keys(opened)
    assert caplog.records == []


def test_a_new_connection_checks_references_syncs_and_is_patient(tmp_path):
    open_database(tmp_path).close()
    database = SqliteDatabase(tmp_path / "ledger.db")
    names = ("foreign_keys", "synchronous", "busy_timeout", "journal_mode")
    assert [database._raw.execute(f"PRAGMA {name}").fetchone()[0] for name in names] == [1, 2, 120_000, "wal"]
    assert (database.path, database.url) == (tmp_path / "ledger.db", f"sqlite:///{tmp_path}/ledger.db")
    assert (database.volatile, database.network, database.unwritable()) == ("", None, "")
    database.close()
    with pytest.raises(LedgerError, match="closed"):
        keys(database)


class Refusing:
    """A connection on which nothing can be run."""

    def __init__(self, error):
        self.error = error
        self.closed = False

    def execute(self, statement):
        raise self.error

    def close(self):
        self.closed = True


@pytest.fixture
def connections(tmp_path, monkeypatch):
    """What the next connections are (an exception: one that raises it), a clock that a sleep moves, and the sleeps."""
    open_database(tmp_path).close()
    state = SimpleNamespace(path=tmp_path / "ledger.db", refuse=[], made=[], asked=[], now=0.0, step=0.0, slept=[])
    connect = sqlite3.connect

    def pretended(target, **options):
        state.asked.append((target, options))
        state.made.append(Refusing(state.refuse.pop(0)) if state.refuse else connect(target, **options))
        return state.made[-1]

    def sleep(seconds):
        state.slept.append(seconds)
        state.now += state.step

    monkeypatch.setattr(sqlite3, "connect", pretended)
    monkeypatch.setattr(ledger_database, "time", SimpleNamespace(monotonic=lambda: 100.0 + state.now, sleep=sleep))
    monkeypatch.setattr("orc.orchestrator.ledger.database.holders", lambda path: [])
    return state


def lock_error():
    return sqlite3.OperationalError("database is locked")


def test_who_comes_while_others_switch_the_journal_tries_again(connections, caplog):
    connections.refuse = [lock_error() for _ in range(5)]
    connections.step = 0.25
    SqliteDatabase(connections.path).close()
    assert [one.closed for one in connections.made[:-1]] == [True] * 5
    assert len(connections.slept) == 5
    assert all(0.005 <= seconds <= 0.05 for seconds in connections.slept)
    assert len(set(connections.slept)) > 1, "not in step"
    options = {"uri": True, "timeout": 1.0, "check_same_thread": False}
    assert connections.asked == [(f"{connections.path.as_uri()}?mode=rw", options)] * 6
    assert len(caplog.records) == 1, "said after more than half a second, and once"


@pytest.mark.parametrize(("step", "tries"), [(120.0, 3), (121.0, 2)])
def test_the_wait_for_the_journal_ends_after_two_minutes(connections, step, tries):
    connections.refuse = [lock_error() for _ in range(9)]
    connections.step = step
    with pytest.raises(LedgerError, match="cannot use the ledger: database is locked"):
        SqliteDatabase(connections.path)
    assert len(connections.made) == tries
    assert all(one.closed for one in connections.made)


@pytest.mark.parametrize(
    ("error", "told"),
    [(sqlite3.OperationalError("disk I/O error"), LedgerError), (KeyboardInterrupt(), KeyboardInterrupt)],
)
def test_any_other_failure_of_a_connection_closes_it_and_is_not_tried_again(connections, error, told):
    connections.refuse = [error, error]
    with pytest.raises(told):
        SqliteDatabase(connections.path)
    assert [one.closed for one in connections.made] == [True]


# -- copies in memory


def test_a_copy_has_all_that_was_written_and_forgets_what_is_written_to_it(opened, tmp_path):
    put(opened, "a")
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir() if not path.name.endswith("-shm")}
    copy = SqliteDatabase(tmp_path / "ledger.db", "its disk is full")
    assert copy.volatile == "its disk is full"
    assert keys(copy) == ["a"], "from the -wal file too"
    copy._raw.execute("PRAGMA foreign_keys = OFF")
    put(copy, "b")
    assert keys(copy) == ["a", "b"]
    assert keys(opened) == ["a"]
    copy.close()
    after = {path.name: path.read_bytes() for path in tmp_path.iterdir() if not path.name.endswith("-shm")}
    assert after == before


def test_a_copy_keeps_no_space_back(opened, tmp_path):
    (tmp_path / "ledger.db.reserve").unlink()
    SqliteDatabase(tmp_path / "ledger.db", "full").close()
    assert not (tmp_path / "ledger.db.reserve").exists()
    SqliteDatabase(tmp_path / "ledger.db").close()
    assert (tmp_path / "ledger.db.reserve").exists()


@pytest.fixture
def sources(opened, tmp_path, monkeypatch):
    """How files are opened from here on; *refused* holds the error for the ways that have one."""
    put(opened, "a")
    opened._raw.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    found = SimpleNamespace(opened=[], refused={}, memory=[], kept=[], path=tmp_path / "ledger.db")
    connect = sqlite3.connect

    def watched(target, **options):
        if target == ":memory:":
            found.memory.append(connect(target, **options))
            return found.memory[-1]
        base, _, how = target.partition("?")
        assert base == found.path.as_uri()
        found.opened.append((how, options))
        if how in found.refused:
            raise found.refused[how]
        found.kept.append(connect(target, **options))
        return found.kept[-1]

    monkeypatch.setattr(sqlite3, "connect", watched)
    return found


PATIENT = {"uri": True, "timeout": 120.0}


def closed(connection):
    with pytest.raises(sqlite3.ProgrammingError, match="closed"):
        connection.execute("SELECT 1")
    return True


def test_a_copy_is_read_as_any_other_file_where_that_can_be(sources):
    copy = SqliteDatabase(sources.path, "full")
    assert sources.opened == [("mode=ro", PATIENT)]
    assert keys(copy) == ["a"]
    assert all(closed(one) for one in sources.kept)
    copy.close()


def test_where_no_files_can_be_made_beside_it_a_copy_is_read_as_one_that_nobody_changes(sources):
    sources.refused = {"mode=ro": sqlite3.OperationalError("unable to open database file")}
    copy = SqliteDatabase(sources.path, "read-only")
    assert sources.opened == [("mode=ro", PATIENT), ("mode=ro&immutable=1", PATIENT)]
    assert keys(copy) == ["a"]
    copy.close()


def test_a_file_of_which_no_copy_can_be_made_is_one_clear_error(sources):
    sources.refused = {
        "mode=ro": sqlite3.OperationalError("first"),
        "mode=ro&immutable=1": sqlite3.OperationalError("disk I/O error"),
    }
    with pytest.raises(LedgerError, match="cannot use the ledger: disk I/O error") as caught:
        SqliteDatabase(sources.path, "read-only")
    assert caught.value.__cause__ is sources.refused["mode=ro&immutable=1"]
    assert [closed(one) for one in sources.memory] == [True]


# -- what is said


def told(error, path):
    with pytest.raises(LedgerError) as caught, explained(path):
        raise error
    assert caught.value.__cause__ is error
    assert caught.value.where == str(path)
    return caught.value.what, caught.value.hint


ELSEWHERE = "make the directory writable for you, or point ORC_STATE_DIR to another one"
ROOM = "free some space on this file system and try again"


@pytest.mark.parametrize(
    ("error", "why", "hint"),
    [
        (OSError(errno.EACCES, "Permission denied"), "cannot open the ledger: Permission denied", ELSEWHERE),
        (OSError("no quota left"), "cannot open the ledger: no quota left", ROOM),
        (sqlite3.OperationalError("disk I/O error"), "cannot use the ledger: disk I/O error", ROOM),
        (sqlite3.OperationalError("database or disk is full"), "cannot use the ledger: database or disk is full", ROOM),
        (
            sqlite3.DatabaseError("File is NOT A DATABASE"),
            "cannot use the ledger: File is NOT A DATABASE",
            "the file is damaged or is not an orc ledger; restore it from a backup, or move it away to start an empty "
            "one",
        ),
        (
            sqlite3.OperationalError("database is locked"),
            "cannot use the ledger: database is locked",
            "another process holds the ledger for long; see which with: fuser -v '{path}'",
        ),
        (
            OSError(errno.EMFILE, "Too many open files"),
            "cannot open the ledger: Too many open files",
            "check the directory, or point ORC_STATE_DIR to another one",
        ),
    ],
)
def test_each_failure_says_what_to_do(tmp_path, error, why, hint):
    path = tmp_path / "my ledger.db"
    assert told(error, path) == (why, hint.replace("{path}", str(path)))


def test_what_is_explained_already_and_what_is_none_of_its_business_pass(tmp_path):
    for error in (LaunchError("known"), KeyError("x")):
        with pytest.raises(type(error)) as caught, explained(tmp_path):
            raise error
        assert caught.value is error
