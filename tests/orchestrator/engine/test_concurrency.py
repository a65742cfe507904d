"""Several processes on one ledger: a file, and PostgreSQL, which laptops share."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from fake_backend import FakeBackend

from orc.launchers.backends.base import Phase
from orc.orchestrator.client import Client
from orc.orchestrator.ledger.lifecycle import Event, Kind, fold

# Up to eight processes at once import what PostgreSQL needs, on a machine that may be busy.
pytestmark = pytest.mark.timeout(400)

OPEN = """
import json, os, sys
from pathlib import Path
from fake_backend import FakeBackend
from orc.launchers.spec import load_job
from orc.orchestrator.client import Client
backend = FakeBackend(Path(sys.argv[1]), hosts=json.loads(os.environ.get("FAKE_HOSTS", "{}")))
"""
# So many processes at once, which share what has been imported.
FORK = """
count = int(sys.argv[-1])
for _ in range(count):
    if os.fork() == 0:
        break
else:
    sys.exit(any([os.wait()[1] for _ in range(count)]))
"""
PASSES = """
with Client(backend_of=lambda _: backend) as client:
    for _ in range(int(sys.argv[2])):
        client.refresh()
"""
SUBMITS = """
with Client(backend_of=lambda _: backend) as client:
    for _ in range(int(sys.argv[3])):
        os.write(1, (client.submit(load_job(sys.argv[2])).id + "\\n").encode())  # in one piece: they share the pipe
"""


HOSTS = {"n1": 2, "n2": 1, "n3": 1}
# A laptop submits jobs, and then makes passes until all jobs have ended; the cluster ends what it sees running.
LAPTOP = """
import time
from collections import Counter
from orc.launchers.backends.base import Phase
state, deadline = Path(sys.argv[3]), time.monotonic() + 300
with Client(state, backend_of=lambda _: backend) as client:
    for _ in range(5):
        client.submit(load_job(sys.argv[2]))
    while time.monotonic() < deadline:  # the other one may begin much later
        client.refresh()
        rows = client.jobs(limit=None)
        used = Counter()
        for r in client.workspace.ledger.reservations():
            used[r.host] += r.slots
        assert all(used[host] <= slots for host, slots in backend.hosts.items()), used
        if len(rows) == 10 and all(row.ended_at for row in rows):
            break
        for row in rows:
            if row.state in ("PENDING", "RUNNING"):
                backend.set(f"orc-{row.id}-a{row.attempts}", Phase.SUCCEEDED)
        time.sleep(0.01)
    else:
        raise SystemExit(f"left: {[row for row in rows if not row.ended_at]}")
"""


@pytest.fixture(params=["file", "postgresql"], autouse=True)
def where(request, monkeypatch):
    """Where the ledger of the client and of all processes is."""
    if request.param == "postgresql":
        monkeypatch.setenv("ORC_LEDGER_URL", request.getfixturevalue("postgres_url"))
    return request.param


@pytest.fixture
def at_once(backend, subprocess_env):
    """Starts so many processes of one kind and returns the words that they printed."""

    def start(count, code, *arguments):
        argv = [sys.executable, "-c", OPEN + FORK + code, str(backend.root), *map(str, arguments), str(count)]
        done = subprocess.run(argv, env=subprocess_env, capture_output=True, text=True)
        assert (done.stderr, done.returncode) == ("", 0)
        return done.stdout.split()

    return start


def check_history(client, job_id):
    """The columns are what the events say: no event was lost, doubled or out of order."""
    events = [Event(Kind(e.kind), e.attempt, e.data) for e in client.events(job_id)]
    told, view = fold(events), client.job(job_id)
    assert told.job == view.state
    assert told.attempts == {a.number: a.state for a in view.attempts}


def test_two_reconcilers_at_once_send_every_retry_once_and_lose_no_event(client, backend, clock, job_file, at_once):
    backend.behave(submit_s=0.005)
    loaded = job_file(retry={"max_attempts": 2, "on": ["crash"], "backoff": 0})
    views = [client.submit(loaded) for _ in range(12)]
    for view in views:
        backend.set(view.attempt.marker, Phase.FAILED, cause="crash", reason="boom")
    at_once(2, PASSES, 4)
    expected = sorted(f"orc-{view.id}-a{n}" for view in views for n in (1, 2))
    assert sorted(backend.calls("submit")) == sorted(backend.calls("run")) == expected
    for view in views:
        check_history(client, view.id)
        assert client.job(view.id).state == "PENDING"


def test_submits_at_once_make_a_job_each(client, backend, job_file, at_once, where):
    path = job_file().source_path
    processes = 8 if where == "file" else 4  # which a server does not know from eight
    ids = at_once(processes, SUBMITS, path, 2)
    assert len(set(ids)) == 2 * processes
    assert {row.id for row in client.jobs(states=["PENDING"])} == set(ids)
    assert sorted(backend.calls("run")) == sorted(f"orc-{job_id}-a1" for job_id in ids)
    for job_id in ids:
        check_history(client, job_id)


def test_a_reader_is_not_disturbed_by_writers(client, backend, job_file, at_once):
    first = client.submit(job_file())
    with client.workspace.ledger.database.read() as connection:
        before = connection.tuples("SELECT count(*) FROM jobs")
        at_once(1, SUBMITS, job_file().source_path, 3)
        assert connection.tuples("SELECT count(*) FROM jobs") == before
    assert len(client.jobs()) == 4
    assert client.job(first.id) == first


@pytest.mark.slow
def test_two_laptops_that_want_the_same_hosts_never_share_a_slot_and_get_all_their_jobs_done(
    client, backend, job_file, at_once, tmp_path, orc_home, where, subprocess_env
):
    subprocess_env["FAKE_HOSTS"] = json.dumps(HOSTS)
    subprocess_env.setdefault("ORC_LEDGER_URL", f"sqlite:///{orc_home}/state/ledger.db")
    path = job_file(resources={"nodes": 2, "procs_per_node": 1}).source_path
    argv = [
        [sys.executable, "-c", OPEN + LAPTOP, str(backend.root), str(path), str(tmp_path / name)] for name in ("a", "b")
    ]
    pipe = subprocess.PIPE
    laptops = [subprocess.Popen(a, env=subprocess_env, stdout=pipe, stderr=pipe, text=True) for a in argv]
    results = [laptop.communicate() for laptop in laptops]
    assert [(out, err, p.returncode) for (out, err), p in zip(results, laptops, strict=True)] == [("", "", 0)] * 2
    views = [client.job(row.id) for row in client.jobs(limit=None)]
    assert [view.state for view in views] == ["SUCCEEDED"] * 10
    assert sorted(backend.calls("run")) == sorted(view.attempt.marker for view in views)
    assert client.workspace.ledger.reservations() == []
    for view in views:
        check_history(client, view.id)


@pytest.fixture
def crowded(tmp_path):
    return FakeBackend(tmp_path / "crowded", hosts={"n1": 1, "n2": 1})


@pytest.fixture
def laptops(orc_home, tmp_path, crowded, clock, monkeypatch, where):
    """Two clients on one ledger, each with a state directory of its own."""
    if where == "file":
        (orc_home / "state").mkdir(parents=True)
        monkeypatch.setenv("ORC_LEDGER_URL", f"sqlite:///{orc_home}/state/ledger.db")
    made = [
        Client(tmp_path / name, backend_of=lambda _: crowded, clock=clock, sleep=clock.sleep) for name in ("a", "b")
    ]
    yield made
    for client in made:
        client.close()


def test_hosts_are_kept_while_they_are_looked_at_and_another_laptop_takes_others(laptops, crowded, clock, job_file):
    mine, yours = laptops
    loaded = job_file(resources={"nodes": 1})
    look = crowded.preflight

    def slow_look(plan):
        crowded.preflight = look
        clock.now += 1
        taken.extend(yours.submit(loaded).attempt.hosts)
        return look(plan)

    taken = []
    crowded.preflight = slow_look
    view = mine.submit(loaded)
    assert (view.attempt.hosts, taken) == (("n1",), ["n2"])
    assert sorted(r.host for r in mine.workspace.ledger.reservations()) == ["n1", "n2"]
    assert mine.submit(loaded).state == "QUEUED"
