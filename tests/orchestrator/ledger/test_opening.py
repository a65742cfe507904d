from __future__ import annotations

import os
import resource
import sqlite3
import stat
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest

from orc.orchestrator.ledger.database import HEAD, LedgerError
from orc.orchestrator.ledger.opening import open_database


def version(path) -> str:
    with sqlite3.connect(path) as connection:
        return connection.execute("SELECT version_num FROM alembic_version").fetchone()[0]


def test_the_first_use_makes_a_private_file_in_a_private_directory(tmp_path):
    open_database(tmp_path / "deep" / "state").close()
    file = tmp_path / "deep" / "state" / "ledger.db"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700
    assert version(file) == HEAD


def test_files_beside_the_ledger_are_private_too(tmp_path):
    database = open_database(tmp_path)
    with database.write() as connection:
        connection.execute("INSERT INTO job_tags (job_id, key, value) SELECT id, 'a', 'b' FROM jobs")
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()}
    assert modes == {f"ledger.db{suffix}": 0o600 for suffix in ("", "-wal", "-shm", ".reserve")}
    database.close()


def test_an_open_of_a_current_ledger_imports_neither_sqlalchemy_nor_alembic(tmp_path):
    open_database(tmp_path).close()
    code = f"""
        import sys
        from pathlib import Path
        from orc.orchestrator.ledger.opening import open_database
        for _ in range(2):
            open_database(Path({str(tmp_path)!r})).close()
        print(sorted({{m.partition(".")[0] for m in sys.modules}} & {{"sqlalchemy", "alembic"}}))
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_many_first_users_at_once_make_one_ledger(tmp_path):
    code = (
        "from pathlib import Path; from orc.orchestrator.ledger.opening import open_database; "
        f"open_database(Path({str(tmp_path)!r}))"
    )
    users = [subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True) for _ in range(6)]
    assert [(user.communicate()[1], user.returncode) for user in users] == [("", 0)] * 6
    assert version(tmp_path / "ledger.db") == HEAD


def test_a_file_that_is_no_database_is_refused_and_left_alone(tmp_path):
    (tmp_path / "ledger.db").write_bytes(b"precious notes\n" * 100)
    with pytest.raises(LedgerError) as caught:
        open_database(tmp_path)
    assert str(tmp_path / "ledger.db") in str(caught.value)
    assert "not a database" in str(caught.value)
    assert "move it away" in caught.value.hint
    assert (tmp_path / "ledger.db").read_bytes() == b"precious notes\n" * 100


def test_a_first_user_who_dies_leaves_no_half_made_ledger(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "link", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        open_database(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_wait_for_the_ledger_is_said_within_two_seconds_with_the_file_and_its_holder(tmp_path, caplog):
    open_database(tmp_path).close()
    holder = sqlite3.connect(tmp_path / "ledger.db", isolation_level=None, check_same_thread=False)
    database = open_database(tmp_path)
    holder.execute("BEGIN IMMEDIATE")
    threading.Timer(2.5, holder.execute, ["COMMIT"]).start()
    began = time.time()
    with database.write() as connection:
        connection.execute("UPDATE jobs SET name = name")
    database.close()
    (said,) = caplog.records
    comm = Path("/proc/self/comm").read_text().strip()
    assert said.created - began < 2
    assert said.getMessage() == f"waiting for the ledger {tmp_path}/ledger.db, held by process {os.getpid()} ({comm})"


def test_a_damaged_ledger_is_refused_and_left_alone(tmp_path):
    open_database(tmp_path).close()
    file = tmp_path / "ledger.db"
    content = bytearray(file.read_bytes())
    content[4096 : 4096 + 2048] = os.urandom(2048)
    content[100:2000] = os.urandom(1900)
    file.write_bytes(content)
    with pytest.raises(LedgerError, match="malformed") as caught:
        open_database(tmp_path)
    assert caught.value.where == str(file)
    assert "backup" in caught.value.hint
    assert file.read_bytes() == content


@pytest.mark.parametrize(("written", "hint"), [("9999", "upgrade orc"), ("0001", "before the first release")])
def test_a_ledger_of_an_unknown_schema_is_refused_and_left_alone(tmp_path, written, hint):
    open_database(tmp_path).close()
    with sqlite3.connect(tmp_path / "ledger.db") as connection:
        connection.execute("UPDATE alembic_version SET version_num = ?", (written,))
    with pytest.raises(LedgerError, match=f"'{written}'") as caught:
        open_database(tmp_path)
    assert hint in caught.value.hint
    assert version(tmp_path / "ledger.db") == written


def test_a_full_disk_is_one_clear_error_and_leaves_no_half_made_ledger(tmp_path):
    code = f"""
        import resource, signal, sys
        from pathlib import Path
        from orc.orchestrator.ledger.database import LedgerError
        from orc.orchestrator.ledger.opening import open_database
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
        try:
            open_database(Path({str(tmp_path)!r}))
        except LedgerError as error:
            print(error)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=True)
    assert "cannot use the ledger" in done.stdout
    assert "free some space" in done.stdout
    database = open_database(tmp_path)
    database.close()
    assert version(tmp_path / "ledger.db") == HEAD
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] == resource.RLIM_INFINITY


@pytest.mark.parametrize(
    "url",
    [
        *("nonsense", "nosuchdb://host/x", "postgresql+nosuchdriver://host/x"),
        *("postgresql://u:secret@host:notaport/x", "postgresql://u:secret@[::1/x"),
    ],
)
def test_a_bad_url_is_one_clear_error(tmp_path, url):
    with pytest.raises(LedgerError) as caught:
        open_database(tmp_path, url)
    assert caught.value.where == "ORC_LEDGER_URL"
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("scheme", ["sqlite+pysqlite", "postgresql+nosuchdriver", "not a scheme"])
def test_an_error_never_shows_the_password_of_a_url(tmp_path, scheme):
    with pytest.raises(LedgerError) as caught:
        open_database(tmp_path, f"{scheme}://user:hunter2@host:99999/x")
    assert "hunter2" not in str(caught.value)


def test_errors_behind_a_url_are_as_clear(tmp_path):
    url = f"sqlite+pysqlite:///{tmp_path}/core.db"
    (tmp_path / "core.db").write_bytes(b"precious notes\n" * 100)
    with pytest.raises(LedgerError, match="not a database"):
        open_database(tmp_path, url)
    (tmp_path / "core.db").unlink()
    open_database(tmp_path, url).close()
    with sqlite3.connect(tmp_path / "core.db") as connection:
        connection.execute("UPDATE alembic_version SET version_num = '9999'")
    with pytest.raises(LedgerError, match="'9999'"):
        open_database(tmp_path, url)
    with pytest.raises(LedgerError, match="unable to open"):
        open_database(tmp_path, f"sqlite+pysqlite:///{tmp_path}/missing/core.db")


def test_a_ledger_whose_directory_is_missing_is_one_clear_error(tmp_path):
    with pytest.raises(LedgerError, match="No such file or directory") as caught:
        open_database(tmp_path, f"sqlite:///{tmp_path}/missing/ledger.db")
    assert caught.value.where == f"{tmp_path}/missing/ledger.db"
