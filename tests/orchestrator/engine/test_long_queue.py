"""Many jobs that wait for few hosts: a pass looks at the first of them, and the others wait behind it."""

from __future__ import annotations

import pytest
from fake_backend import FakeBackend

from orc.launchers.backends.base import Phase
from orc.orchestrator.client import Client
from orc.orchestrator.engine import job_source, steps
from orc.orchestrator.engine.submission import new_submission, submit
from orc.orchestrator.ledger.transaction import Transaction


@pytest.fixture
def hosts(tmp_path) -> FakeBackend:
    return FakeBackend(tmp_path / "hosts", hosts={"n1": 1, "n2": 1})


@pytest.fixture
def client(orc_home, hosts, clock):
    with Client(backend_of=lambda _: hosts, clock=clock, sleep=clock.sleep) as made:
        yield made


@pytest.fixture
def queue(client, hosts, clock, job_file):
    """Submits so many jobs at once; returns their ids, oldest first."""

    def fill(count: int, **keys) -> list[str]:
        loaded = job_file(**keys)
        ws = client.workspace
        snapshot = job_source.take(ws.store, loaded, steps.silent, hosts)
        ids = []
        for _ in range(count):
            clock.now += 1.0
            ids.append(submit(ws, [new_submission(ws, loaded.spec, snapshot, source="")])[0])
        return ids

    return fill


def test_a_pass_over_a_long_queue_looks_at_its_first_job_alone(client, hosts, queue, monkeypatch):
    ids = queue(40)
    place, asked = hosts.place, []
    monkeypatch.setattr(hosts, "place", lambda job, *more, **named: asked.append(job) or place(job, *more, **named))
    client.refresh()
    assert len(asked) < 10
    hosts.set(client.job(ids[0]).attempt.marker, Phase.SUCCEEDED)
    client.refresh()
    assert [client.job(job).state for job in ids[:4]] == ["SUCCEEDED", "PENDING", "PENDING", "QUEUED"]
    assert "held by" in client.job(ids[3]).reason


def test_a_new_job_without_room_is_written_twice_when_it_comes_and_when_it_is_known_what_it_waits_for(
    client, queue, monkeypatch
):
    queue(2)
    database, writes = client.workspace.ledger.database, []
    write = database.write
    monkeypatch.setattr(database, "write", lambda: writes.append(1) or write())
    (waiting,) = queue(1)
    assert len(writes) == 2
    assert "held by" in client.job(waiting).reason
    assert client.workspace.ledger.job(waiting).claim_owner is None


def test_jobs_that_can_use_other_hosts_pass_those_that_wait(client, hosts, queue):
    first = queue(1, resources={"options": {"ssh": {"hosts": ["n1"]}}})
    waiting = queue(3, resources={"options": {"ssh": {"hosts": ["n1"]}}})
    (other,) = queue(1)
    assert [client.job(job).state for job in (*first, *waiting, other)] == ["PENDING", *["QUEUED"] * 3, "PENDING"]
    (late,) = queue(1)
    hosts.set(client.job(other).attempt.marker, Phase.SUCCEEDED)
    client.refresh()
    assert [client.job(job).state for job in (*waiting, late)] == [*["QUEUED"] * 3, "PENDING"]


def test_a_submission_reads_little_of_a_long_queue(client, queue, monkeypatch):
    """However many wait, the first of them decide."""
    queue(45)
    read, specs = [], Transaction.specs
    monkeypatch.setattr(Transaction, "specs", lambda tx, ids: read.extend(ids) or specs(tx, ids))
    queue(1)
    assert 0 < len(read) <= 20
