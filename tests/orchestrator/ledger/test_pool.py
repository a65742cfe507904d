"""Many threads and processes on one ledger."""

from __future__ import annotations

import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from orc.orchestrator.ledger.errors import LedgerError
from orc.orchestrator.ledger.pool import LedgerPool
from orc.orchestrator.ledger.records import NewJob


@pytest.fixture(params=["sqlite", "postgresql"])
def pool(request, tmp_path, clock):
    url = request.getfixturevalue("postgres_url") if request.param == "postgresql" else None
    made = LedgerPool(tmp_path, url, clock)
    yield made
    made.close()


def enqueue(pool, job_id):
    with pool.ledger() as ledger, ledger.transaction() as tx:
        tx.enqueue(NewJob(job_id, "digits", "lab", "fake", "", {}, {}, {}))


def test_what_many_threads_write_at_once_is_all_there(pool):
    ids = [f"job-{i}" for i in range(40)]
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda job_id: enqueue(pool, job_id), ids))
    with pool.ledger() as ledger:
        assert {row[0] for row in ledger.rows()} == set(ids)
        assert [event.id for event in ledger.events_after(0, 99)] == sorted(e.id for e in ledger.events_after(0, 99))


def test_a_ledger_is_lent_to_one_at_a_time_and_used_again(pool):
    with pool.ledger() as one, pool.ledger() as two:
        assert one.database is not two.database
        lent = {id(one.database), id(two.database)}
    with pool.ledger() as again:
        assert id(again.database) in lent
        assert again.now() == one.now()


def test_a_closed_pool_lends_nothing_and_closes_what_comes_back(pool):
    came_back = threading.Event()

    def borrow(borrowed):
        with pool.ledger() as ledger:
            borrowed.append(ledger)
            came_back.wait(30)

    borrowed = []
    thread = threading.Thread(target=borrow, args=(borrowed,))
    thread.start()
    while not borrowed:
        pass
    pool.close()
    with pytest.raises(LedgerError, match="was closed"), pool.ledger():
        pass
    assert borrowed[0].rows() == []
    came_back.set()
    thread.join(30)


CODE = """
import sys, threading
from pathlib import Path
from orc.orchestrator.ledger.pool import LedgerPool
from orc.orchestrator.ledger.records import NewJob
pool = LedgerPool(Path(sys.argv[1]))
def work(name):
    for i in range(5):
        with pool.ledger() as ledger:
            with ledger.transaction() as tx:
                tx.enqueue(NewJob(f"{name}-{i}", "digits", "lab", "fake", "", {}, {}, {}))
            ledger.rows()
threads = [threading.Thread(target=work, args=(f"{sys.argv[2]}-{t}",)) for t in range(3)]
[t.start() for t in threads], [t.join() for t in threads]
pool.close()
"""


def test_processes_of_many_threads_share_a_file(tmp_path, clock):
    argv = [sys.executable, "-c", CODE, str(tmp_path)]
    users = [subprocess.Popen([*argv, f"p{i}"], stderr=subprocess.PIPE, text=True) for i in range(3)]
    assert [(user.communicate()[1], user.returncode) for user in users] == [("", 0)] * 3
    pool = LedgerPool(tmp_path)
    with pool.ledger() as ledger:
        assert len(ledger.rows()) == len(ledger.events_after(0, 99)) == 45
    pool.close()
