"""What is particular to the ledger in PostgreSQL; that it is a ledger like any other is tested with the others."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest
import sqlalchemy as sa

from orc.orchestrator.ledger.database import HEAD, LedgerError
from orc.orchestrator.ledger.engine import CoreDatabase
from orc.orchestrator.ledger.lifecycle import Event, Kind
from orc.orchestrator.ledger.opening import open_database
from orc.orchestrator.ledger.records import NewJob
from orc.orchestrator.ledger.store import Ledger


def test_an_empty_database_becomes_a_ledger(tmp_path, postgres_database):
    for _ in range(2):
        database = open_database(tmp_path, postgres_database)
        with database.read() as connection:
            assert connection.tuples("SELECT version_num FROM alembic_version") == [(HEAD,)]
        database.close()


def test_many_first_users_at_once_make_one_ledger(tmp_path, postgres_database):
    code = (
        "import sys; from pathlib import Path; from orc.orchestrator.ledger.opening import open_database; "
        "open_database(Path(sys.argv[1]), sys.argv[2]).close()"
    )
    argv = [sys.executable, "-c", code, str(tmp_path), postgres_database]
    users = [subprocess.Popen(argv, stderr=subprocess.PIPE, text=True) for _ in range(3)]
    assert [(user.communicate()[1], user.returncode) for user in users] == [("", 0)] * 3


def test_a_ledger_of_a_newer_orc_is_refused_and_left_alone(tmp_path, postgres_url):
    database = CoreDatabase(postgres_url)
    with database.write() as connection:
        connection.execute("UPDATE alembic_version SET version_num = '9999'")
    with pytest.raises(LedgerError, match="'9999'"):
        open_database(tmp_path, postgres_url)
    database.close()


@pytest.mark.parametrize("statement", ["UPDATE events SET kind = 'x'", "DELETE FROM events"])
def test_events_cannot_be_changed_or_removed(ledger_with_a_job, statement):
    with pytest.raises(LedgerError, match="append-only"), ledger_with_a_job.write() as connection:
        connection.execute(statement)


@pytest.fixture
def ledger_with_a_job(tmp_path, postgres_url, clock):
    database = open_database(tmp_path, postgres_url)
    with Ledger(database, clock).transaction() as tx:
        tx.enqueue(NewJob("a-aaaaaa", "a", "lab", "fake", "", {}, {}, {}))
    yield database
    database.close()


def test_a_lock_is_held_until_its_transaction_ends_and_only_against_the_same_name(tmp_path, postgres_url):
    one, two = open_database(tmp_path, postgres_url), open_database(tmp_path, postgres_url)
    order = []

    def second():
        with two.write() as connection:
            connection.lock("lab")
            order.append("second")

    with one.write() as connection:
        connection.lock("lab")
        waiter = threading.Thread(target=second)
        waiter.start()
        third = CoreDatabase(postgres_url)
        with third.write() as other:
            other.lock("elsewhere")
        third.close()
        with one.engine.connect() as looking:
            waiting = sa.text("SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted")
            while not looking.execute(waiting).scalar():
                looking.rollback()
        order.append("first")
    waiter.join(30)
    assert order == ["first", "second"]
    one.close()
    two.close()


def test_a_server_that_is_not_there_is_one_clear_error(tmp_path):
    with pytest.raises(LedgerError, match="cannot use the ledger") as caught:
        open_database(tmp_path, f"postgresql+psycopg://orc:hunter2@/x?host={tmp_path}/nowhere")
    assert "hunter2" not in str(caught.value)
    assert "/nowhere" in str(caught.value)


def test_a_connection_that_was_cut_is_made_again(postgres, tmp_path, postgres_url):
    database = open_database(tmp_path, postgres_url)
    with database.read() as connection:
        connection.tuples("SELECT 1")
    postgres.do("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE backend_type = 'client backend' "
                "AND pid <> pg_backend_pid()")  # fmt: skip
    with database.read() as connection:
        assert connection.tuples("SELECT 1") == [(1,)]
    database.close()


def test_a_restart_of_the_server_is_one_clear_error_and_leaves_nothing_half_written(postgres, ledger_with_a_job, clock):
    ledger = Ledger(ledger_with_a_job, clock)

    def cancel():
        with ledger.transaction() as tx:
            tx.record(tx.find("a-aaaaaa"), Event(Kind.JOB_CANCELLED))
            postgres.stop()

    with pytest.raises(LedgerError, match="cannot use the ledger") as cut:
        cancel()
    with pytest.raises(LedgerError, match="cannot use the ledger") as down:
        ledger.job("a-aaaaaa")
    assert all("nothing was half written" in caught.value.hint for caught in (cut, down))
    postgres.run()
    assert ledger.job("a-aaaaaa").state == "QUEUED"
    assert [event.kind for event in ledger.events("a-aaaaaa")] == ["queued"]
    with ledger.transaction() as tx:
        tx.record(tx.find("a-aaaaaa"), Event(Kind.JOB_CANCELLED))
    assert ledger.events_after(0, 9)[-1].kind == "job_cancelled"


def test_no_event_comes_late_behind_one_that_was_seen(ledger_with_a_job, tmp_path, clock):
    one, two = Ledger(ledger_with_a_job, clock), Ledger(CoreDatabase(postgres_url_of(ledger_with_a_job)), clock)

    def enqueue(ledger, job_id):
        with ledger.transaction() as tx:
            tx.enqueue(NewJob(job_id, "b", "lab", "fake", "", {}, {}, {}))

    seen = one.last_event_id()
    second = threading.Thread(target=enqueue, args=(two, "second"))
    with one.transaction() as tx:
        tx.enqueue(NewJob("first", "b", "lab", "fake", "", {}, {}, {}))
        second.start()
        with one.database.engine.connect() as looking:
            waiting = sa.text("SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted")
            while not looking.execute(waiting).scalar():
                looking.rollback()
        assert one.events_after(seen, 9) == []
    second.join(30)
    assert [event.job for event in one.events_after(seen, 9)] == ["first", "second"]
    two.close()


def postgres_url_of(database):
    return database.engine.url.render_as_string(hide_password=False)


def test_nothing_is_waited_for_without_an_end(ledger_with_a_job):
    with ledger_with_a_job.read() as connection:
        limits = [connection.tuples(f"SHOW {name}") for name in ("lock_timeout", "idle_in_transaction_session_timeout")]
    assert limits == [[("2min",)], [("1min",)]]
    other = CoreDatabase(postgres_url_of(ledger_with_a_job))

    def wait():
        with other.write() as connection:
            connection.execute("SET LOCAL lock_timeout = 50")
            connection.lock("write")

    with ledger_with_a_job.write() as holder:
        holder.lock("write")
        with pytest.raises(LedgerError, match="lock timeout"):
            wait()
    other.close()
