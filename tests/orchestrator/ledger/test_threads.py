"""Many threads and processes on one ledger."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from orc.orchestrator.ledger.opening import open_database
from orc.orchestrator.ledger.records import NewJob
from orc.orchestrator.ledger.store import JobFilter, Ledger


@pytest.mark.parametrize("kind", ["sqlite", "postgresql"])
def test_what_many_threads_write_at_once_is_all_there(request, tmp_path, clock, kind):
    url = request.getfixturevalue("postgres_url") if kind == "postgresql" else None
    ids = [f"job-{i}" for i in range(40)]

    def enqueue(names):
        ledger = Ledger(open_database(tmp_path, url), clock)
        for name in names:
            with ledger.transaction() as tx:
                tx.enqueue(NewJob(name, "digits", "lab", "fake", "", {}, {}, {}))
        return ledger

    with ThreadPoolExecutor(8) as threads:
        ledgers = list(threads.map(enqueue, [ids[i::8] for i in range(8)]))
    assert {row[0] for row in ledgers[0].page(JobFilter()).rows} == set(ids)
    events = [event.id for event in ledgers[0].events_after(0, 99)]
    assert len(events) == len(ids)
    assert events == sorted(events)
    for ledger in ledgers:  # by another thread than the one that opened it
        ledger.close()


CODE = """
import sys, threading, time
from pathlib import Path
from orc.orchestrator.ledger.opening import open_database
from orc.orchestrator.ledger.store import JobFilter
from orc.orchestrator.ledger.records import NewJob
from orc.orchestrator.ledger.store import Ledger
def work(name):
    ledger = Ledger(open_database(Path(sys.argv[1])), time.time)
    for i in range(5):
        with ledger.transaction() as tx:
            tx.enqueue(NewJob(f"{name}-{i}", "digits", "lab", "fake", "", {}, {}, {}))
        ledger.page(JobFilter())
    ledger.close()
threads = [threading.Thread(target=work, args=(f"{sys.argv[2]}-{t}",)) for t in range(3)]
[t.start() for t in threads], [t.join() for t in threads]
"""


def test_processes_of_many_threads_share_a_file(tmp_path, clock):
    argv = [sys.executable, "-c", CODE, str(tmp_path)]
    users = [subprocess.Popen([*argv, f"p{i}"], stderr=subprocess.PIPE, text=True) for i in range(3)]
    assert [(user.communicate()[1], user.returncode) for user in users] == [("", 0)] * 3
    ledger = Ledger(open_database(tmp_path), clock)
    assert len(ledger.page(JobFilter()).rows) == len(ledger.events_after(0, 99)) == 45
    ledger.close()
