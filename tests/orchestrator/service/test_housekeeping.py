"""What a service does once a day, and what it leaves behind when it is killed."""

from __future__ import annotations

import threading
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
from fake_backend import FakeBackend

from orc.launchers.backends.base import Phase
from orc.launchers.errors import SpecError
from orc.orchestrator.api import access
from orc.orchestrator.api.call import Digests, NewMember
from orc.orchestrator.api.submitting import Submitter
from orc.orchestrator.client import Client
from orc.orchestrator.engine.job_source import take
from orc.orchestrator.ledger import audit, content_holders
from orc.orchestrator.ledger.database import LedgerError
from orc.orchestrator.ledger.lifecycle import Event, Kind
from orc.orchestrator.ledger.records import NewJob
from orc.orchestrator.service import housekeeping
from orc.orchestrator.service.api.bundles import note_holder
from orc.orchestrator.service.housekeeping import Housekeeper, keep_house
from orc.orchestrator.service.settings import load_settings
from orc.orchestrator.workspace import login_name

DAY = 86400


@pytest.fixture
def other(orc_home, backend, clock):
    """Another service on the same ledger."""
    with Client(backend_of=lambda _: FakeBackend(backend.root), clock=clock, sleep=clock.sleep) as made:
        yield made


def end(client, job_id, kind):
    with client.workspace.ledger.transaction() as tx:
        job = tx.enqueue(NewJob(job_id, job_id, "local", "fake", "", {}, {}, {}))
        tx.record(job, Event(kind), job_set={"ended_at": tx.now})


def names(client):
    return {row.id for row in client.jobs(limit=None)}


def test_old_jobs_are_removed_once_a_day_by_one_of_the_services(client, other, clock):
    settings = load_settings({"keep_jobs": "30d", "keep_failed": True}, environ={})
    for job_id, kind in (("old", Kind.JOB_CANCELLED), ("broken", Kind.JOB_FAILED)):
        end(client, job_id, kind)
    clock.now += 31 * DAY
    end(client, "new", Kind.JOB_CANCELLED)
    assert keep_house(client, load_settings({}, environ={})) == "", "nothing is removed unless that is said"
    clock.now += DAY
    assert keep_house(other, settings) == "removed 1 jobs that ended long ago, with 2 events"
    assert keep_house(client, settings) is None
    assert names(client) == {"broken", "new"}
    clock.now += DAY - 60
    assert keep_house(client, settings) is None
    clock.now += 60
    assert keep_house(client, settings) is not None


def test_a_service_that_ends_in_the_middle_of_it_is_followed_by_another(client, other, clock, monkeypatch):
    settings = load_settings({"keep_jobs": "1d"}, environ={})

    def killed(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("orc.orchestrator.service.housekeeping.prune", killed)
        with pytest.raises(KeyboardInterrupt):
            keep_house(client, settings)
    assert keep_house(other, settings) is None
    clock.now += 3600
    assert keep_house(other, settings) is not None


def test_holders_of_contents_are_forgotten_and_changes_without_an_answer_become_lines(client, clock):
    with client.workspace.ledger.database.write() as connection:
        content_holders.add(connection, "ann", ["1" * 64], clock.now)
        audit.intend(connection, "first", at=clock.now, user="ann", action="submit_job", address="10.0.0.1")
        audit.intend(connection, "second", at=clock.now, user="ann", action="cancel_job", subject="j-1")
        audit.answer(
            connection, "second", at=clock.now, user="ann", action="cancel_job", subject="j-1", data={"status": 200}
        )
    clock.now += 91 * DAY
    for _ in range(2):
        keep_house(client, load_settings({}, environ={}))
    with client.workspace.ledger.database.read() as connection:
        assert content_holders.held(connection, "ann", ["1" * 64]) == set()
        lines = [(line.action, line.at, line.data) for line in audit.page(connection, 9)]
    begun = clock.now - 91 * DAY
    assert lines == [("submit_job", begun, {"status": None}), ("cancel_job", begun, {"status": 200})]


def test_a_change_that_takes_long_has_one_line(client, other, clock):
    settings = load_settings({}, environ={})
    line = {"user": "ann", "action": "upload"}
    with client.workspace.ledger.database.write() as connection:
        audit.intend(connection, "long", at=clock.now, **line)
    for _ in range(15):
        clock.now += 60
        keep_house(client, settings, {"long"})
        keep_house(other, settings)
    with client.workspace.ledger.database.write() as connection:
        audit.answer(connection, "long", at=clock.now, **line, data={"status": 200})
    clock.now += 900
    keep_house(other, settings)
    with client.workspace.ledger.database.read() as connection:
        assert [(line.action, line.data) for line in audit.page(connection, 9)] == [("upload", {"status": 200})]


def test_old_lines_of_the_audit_log_are_removed_and_nothing_else_can_be(client, clock):
    database = client.workspace.ledger.database
    for action in ("old", "new"):
        with database.write() as connection:
            audit.append(connection, at=clock.now, user="ann", action=action)
        clock.now += 200 * DAY
    keep_house(client, load_settings({"keep_audit": "365d"}, environ={}))
    with database.read() as connection:
        (pruned, new) = audit.page(connection, 9)
    assert (new.action, pruned.action, pruned.user, pruned.data["lines"]) == ("new", "prune_audit", login_name(), 1)
    with pytest.raises(LedgerError, match="append-only"), database.write() as connection:
        connection.execute("DELETE FROM audit")


def test_who_gets_the_name_of_another_has_not_had_the_contents_of_that_one(client, clock):
    ledger = client.workspace.ledger
    with ledger.database.write() as connection:
        content_holders.add(connection, "ann", ["1" * 64], clock.now)
    (_, first), (_, last) = (access.create(ledger, "ann", "user", clock.now) for _ in range(2))
    for token, left in ((first, {"1" * 64}), (last, set())):
        access.revoke(ledger, token.id, clock.now)
        with ledger.database.read() as connection:
            assert content_holders.held(connection, "ann", ["1" * 64]) == left


@pytest.mark.parametrize(("name", "value"), [("keep_jobs", "soon"), ("keep_jobs", "1m"), ("access_log", "xml")])
def test_settings_that_are_none_are_refused_with_their_name(name, value):
    with pytest.raises(SpecError, match=name):
        load_settings({}, environ={f"ORC_SERVE_{name.upper()}": value})


def test_it_goes_on_once_the_disk_that_was_full_at_its_start_has_room_again(client, clock, monkeypatch):
    monkeypatch.setattr(housekeeping, "LOOK_S", 0.0)
    monkeypatch.setattr(housekeeping, "keep_house", lambda opened, *_: kept.set() if opened is client else None)
    kept, opened = threading.Event(), []

    def open_client():
        full = SimpleNamespace(workspace=SimpleNamespace(ledger=SimpleNamespace(volatile="no space left")))
        opened.append(full)
        return nullcontext(client if len(opened) > 1 else full)

    with Housekeeper(open_client, load_settings({}, environ={})):
        assert kept.wait(10)


def test_a_key_whose_job_was_removed_makes_a_job_that_runs(client, backend, clock, job_file):
    loaded = job_file()
    snapshot = take(client.workspace.store, loaded, lambda *_: None, backend)

    spec, digests = loaded.spec.model_dump(mode="json"), Digests(snapshot.code.digest)
    client.session.serves = True
    submitter = Submitter(client.session, "the-same-key")

    def submit():
        note_holder(client.workspace.ledger, login_name(), [digests.code])
        return submitter.submit(NewMember(0, digests, spec), "", {})

    def submit_group():
        return submitter.submit_group("sweep", "many", None, [NewMember(i, digests, spec) for i in (0, 1)], "", {})

    for made in range(1, 4):
        ids = [submit().id, *(member.job.id for member in submit_group().members)]
        assert [submit().id, *(member.job.id for member in submit_group().members)] == ids
        client.refresh()
        assert len(backend.calls("run")) == 3 * made, "its id was not that of the attempt which has run there before"
        for job_id in ids:
            backend.set(f"orc-{job_id}-a1", Phase.SUCCEEDED)
        client.refresh()
        clock.now += 10 * DAY
        keep_house(client, load_settings({"keep_jobs": "1d"}, environ={}))
        end(client, f"newest-{made}", Kind.JOB_CANCELLED)
        clock.now += 10 * DAY
        keep_house(client, load_settings({"keep_jobs": "1d"}, environ={}))
        assert not names(client) & set(ids)
