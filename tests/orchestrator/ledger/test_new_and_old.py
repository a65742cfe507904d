"""Opening: a new ledger, one of an older orc, one that cannot be written, and what is none."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import sqlite3
from pathlib import Path

import pytest

from orc.orchestrator.ledger import opening, schema
from orc.orchestrator.ledger.database import HEAD, LedgerError, SqliteDatabase
from orc.orchestrator.ledger.engine import CoreDatabase
from orc.orchestrator.ledger.opening import open_database


@pytest.fixture
def opened(monkeypatch):
    """Every database that is opened, with the reason why it cannot be written."""
    made = []

    class Watched(SqliteDatabase):
        def __init__(self, path, volatile=""):
            super().__init__(path, volatile)
            made.append(self)

    monkeypatch.setattr(opening, "SqliteDatabase", Watched)
    return made


def is_closed(database):
    try:
        database._raw.execute("SELECT 1")
    except sqlite3.ProgrammingError:
        return True
    return False


def refusal(*arguments, **options):
    with pytest.raises(LedgerError) as caught:
        open_database(*arguments, **options)
    return caught.value.what, caught.value.where, caught.value.hint


def version(path):
    with sqlite3.connect(path) as connection:
        return connection.execute("SELECT version_num FROM alembic_version").fetchall()


def test_a_ledger_of_an_older_orc_is_brought_up_to_this_version(tmp_path, opened, older):
    older(f"sqlite:///{tmp_path}/ledger.db")
    open_database(tmp_path).close()
    assert version(tmp_path / "ledger.db") == [(HEAD,)]
    assert len(opened) == 1


def test_a_ledger_of_an_older_orc_cannot_be_read_from_a_full_disk(tmp_path, opened, older, monkeypatch):
    older(f"sqlite:///{tmp_path}/ledger.db")
    monkeypatch.setattr(opening, "unwritable", lambda file: f"{file.name} is full")
    assert refusal(tmp_path, volatile=True) == (
        "the ledger of an older orc cannot be brought up to this version: ledger.db is full",
        str(tmp_path / "ledger.db"),
        "free some space and try again",
    )
    assert [is_closed(one) for one in opened] == [True]
    assert version(tmp_path / "ledger.db") == [("0006",)]


def test_what_cannot_be_written_is_a_copy_only_for_those_who_can_do_with_one(tmp_path, monkeypatch):
    monkeypatch.setattr(opening, "unwritable", lambda file: "its disk is full")
    for volatile, why in ((True, "its disk is full"), (False, "")):
        database = open_database(tmp_path, volatile=volatile)
        assert database.volatile == why
        database.close()
    monkeypatch.setattr(opening, "unwritable", lambda file: "")
    database = open_database(tmp_path, volatile=True)
    assert database.volatile == ""
    database.close()


@pytest.fixture
def failing(monkeypatch):
    """``failing(error)``: the file cannot be used for *error*, but as a copy."""

    def fail(error):
        def make(path, volatile=""):
            if volatile:
                return SqliteDatabase(path, volatile)
            raise LedgerError(f"cannot use the ledger: {error}") from error

        monkeypatch.setattr(opening, "SqliteDatabase", make)

    return fail


@pytest.mark.parametrize(
    "reason",
    ["disk I/O error", "database or disk is full", "attempt to write a readonly database"],
)
def test_a_disk_that_was_filled_just_now_gives_a_copy_too(tmp_path, failing, reason):
    open_database(tmp_path).close()
    failing(sqlite3.OperationalError(reason))
    database = open_database(tmp_path, volatile=True)
    assert database.volatile == reason
    database.close()
    assert refusal(tmp_path)[0] == f"cannot use the ledger: {reason}"


@pytest.mark.parametrize(
    "error", [sqlite3.OperationalError("database is locked"), sqlite3.DatabaseError("disk I/O error"), OSError("full")]
)
def test_what_is_wrong_with_more_than_the_disk_gives_no_copy(tmp_path, failing, error):
    open_database(tmp_path).close()
    failing(error)
    assert refusal(tmp_path, volatile=True)[0] == f"cannot use the ledger: {error}"


def test_the_ledger_is_in_the_state_directory_or_where_its_url_says(tmp_path, opened):
    open_database(tmp_path / "state").close()
    open_database(tmp_path / "state", f"sqlite:///{tmp_path}/own.db").close()
    assert [one.path for one in opened] == [tmp_path / "state" / "ledger.db", tmp_path / "own.db"]


@pytest.mark.parametrize("url", ["sqlite:///", "sqlite:///:memory:"])
def test_a_ledger_in_memory_is_told_to_name_a_file(tmp_path, url):
    assert refusal(tmp_path, url) == ("the ledger must outlive the process", "ORC_LEDGER_URL", "name a file")


def test_a_state_directory_that_cannot_be_made_says_why(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    hint = "point ORC_STATE_DIR to a directory that you can write to"
    said = refusal(tmp_path / "file" / "state")
    assert said == ("cannot make the state directory: Not a directory", str(tmp_path / "file" / "state"), hint)
    monkeypatch.setattr(os, "mkdir", lambda *_, **__: (_ for _ in ()).throw(OSError("odd")))
    assert refusal(tmp_path / "state")[0] == "cannot make the state directory: odd"


NO_LEDGER = "this is a SQLite database, but not an orc ledger"


@pytest.mark.parametrize(
    "statements",
    [
        ["PRAGMA user_version = 1"],
        ["CREATE TABLE notes (text)"],
        ["CREATE TABLE alembic_version (version_num)"],
        ["CREATE TABLE alembic_version (version_num)", f"INSERT INTO alembic_version VALUES ('{HEAD}')"],
        ["CREATE TABLE jobs (id)"],
        ["CREATE TABLE jobs (id)", "CREATE TABLE alembic_version (version_num)"],
        [
            "CREATE TABLE jobs (id)",
            "CREATE TABLE alembic_version (version_num)",
            f"INSERT INTO alembic_version VALUES ('{HEAD}'), ('{HEAD}')",
        ],
        [
            "CREATE TABLE notes (id)",
            "CREATE VIEW jobs AS SELECT * FROM notes",
            "CREATE TABLE alembic_version (version_num)",
            f"INSERT INTO alembic_version VALUES ('{HEAD}')",
        ],
    ],
)
def test_a_ledger_has_jobs_and_one_version(tmp_path, opened, statements):
    raw = sqlite3.connect(tmp_path / "ledger.db")
    for statement in statements:
        raw.execute(statement)
    raw.commit()
    raw.close()
    hint = "move the file away, or point ORC_STATE_DIR to another directory"
    assert refusal(tmp_path) == (NO_LEDGER, str(tmp_path / "ledger.db"), hint)
    assert [is_closed(one) for one in opened] == [True]


@pytest.mark.parametrize(
    ("jobs", "beside"),
    [
        (None, ""),
        ([], ""),
        (["note.txt"], ""),
        (["a-aaaaaa/", "b-bbbbbb/", "note.txt"], ", and the directories of 2 jobs lie beside it"),
    ],
)
def test_a_ledger_that_was_cut_says_which_jobs_it_may_have_had(tmp_path, jobs, beside):
    (tmp_path / "ledger.db").touch()
    for name in jobs if jobs is not None else []:
        (tmp_path / "jobs").mkdir(exist_ok=True)
        (tmp_path / "jobs" / name).mkdir() if name.endswith("/") else (tmp_path / "jobs" / name).touch()
    if jobs == []:
        (tmp_path / "jobs").mkdir()
    assert refusal(tmp_path) == (
        f"the ledger is cut: the file has 0 bytes{beside}",
        str(tmp_path / "ledger.db"),
        "restore it from a backup, or move it away to start a new one; `orc adopt` then finds jobs again from their "
        "directories",
    )


# -- a new one


def test_a_new_ledger_is_written_aside_in_one_synchronous_transaction(tmp_path, monkeypatch):
    ran, made = [], []
    connect = sqlite3.connect

    def watched(target, **options):
        raw = connect(target, **options)
        if isinstance(target, Path):
            made.append((target, raw))
            raw.set_trace_callback(ran.append)
        return raw

    monkeypatch.setattr(sqlite3, "connect", watched)
    open_database(tmp_path).close()
    ((aside, raw),) = made
    assert re.fullmatch(rf"\.ledger\.db\.{os.getpid()}\.[0-9a-f]{{8}}", aside.name)
    assert aside.parent == tmp_path
    assert ran[:2] == ["PRAGMA synchronous = FULL", "BEGIN"]
    assert ran[-1] == "COMMIT"
    assert ran.count("BEGIN") == ran.count("COMMIT") == 1
    with pytest.raises(sqlite3.ProgrammingError):
        raw.execute("SELECT 1")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ledger.db", "ledger.db.reserve"]


def test_a_file_system_that_locks_no_directories_is_good_enough(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    open_database(tmp_path).close()
    assert version(tmp_path / "ledger.db") == [(HEAD,)]


def test_a_new_ledger_meets_nothing_of_a_lost_one(tmp_path):
    for suffix in ("-wal", "-shm", "-journal"):
        (tmp_path / f"ledger.db{suffix}").write_bytes(b"of a lost ledger")
    opening._make_ledger(tmp_path / "ledger.db")
    assert [path.name for path in tmp_path.iterdir()] == ["ledger.db"]


def test_who_comes_second_keeps_the_ledger_of_the_first(tmp_path, monkeypatch):
    def somebody_is_faster(fd, how):
        assert (os.readlink(f"/proc/self/fd/{fd}"), how) == (str(tmp_path), fcntl.LOCK_EX)
        (tmp_path / "ledger.db").write_bytes(b"the first")
        (tmp_path / "ledger.db-wal").write_bytes(b"of the first")

    monkeypatch.setattr(fcntl, "flock", somebody_is_faster)
    opening._make_ledger(tmp_path / "ledger.db")
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {
        "ledger.db": b"the first",
        "ledger.db-wal": b"of the first",
    }


def test_where_no_turns_are_taken_the_link_decides(tmp_path, monkeypatch):
    link = os.link

    def too_late(new, path):
        path.write_bytes(b"the first")
        link(new, path)

    monkeypatch.setattr(os, "link", too_late)
    opening._make_ledger(tmp_path / "ledger.db")
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {"ledger.db": b"the first"}


def test_a_first_user_who_dies_while_writing_leaves_nothing(tmp_path, monkeypatch):
    unlink, removed = Path.unlink, []
    broken = [text.replace("CREATE TRIGGER", "CREATE NONSENSE") for text in schema.sqlite_statements()]
    monkeypatch.setattr(schema, "sqlite_statements", lambda: broken)
    monkeypatch.setattr(Path, "unlink", lambda path, **options: removed.append(path.name) or unlink(path, **options))
    with pytest.raises(sqlite3.OperationalError, match="NONSENSE"):
        opening._make_ledger(tmp_path / "ledger.db")
    assert list(tmp_path.iterdir()) == []
    assert removed[1] == f"{removed[0]}-journal"


# -- behind any other url


def test_a_migrated_database_behind_a_url_is_not_migrated_again(tmp_path, older, monkeypatch):
    url = f"sqlite+pysqlite:///{tmp_path}/core.db"
    older(url)
    database = open_database(tmp_path / "state", url)
    assert isinstance(database, CoreDatabase)
    assert version(tmp_path / "core.db") == [(HEAD,)]
    assert not (tmp_path / "state").exists()
    database.close()
    monkeypatch.setattr("orc.orchestrator.ledger.engine.upgrade", lambda *_: pytest.fail("it is migrated"))
    open_database(tmp_path / "state", url).close()
