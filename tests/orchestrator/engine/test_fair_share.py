from __future__ import annotations

import pytest
from fake_backend import FakeBackend

from orc.launchers.backends.base import Phase
from orc.orchestrator.client import Client
from orc.orchestrator.engine.queueing import HALF_LIFE_S, HEAD_START_S, Use, decayed, head_starts

DAY = 86400.0
NOW = 100 * DAY


def test_what_was_used_a_half_life_ago_counts_half():
    now_used = decayed(Use("ada", 4, NOW - 60, NOW), NOW)
    assert now_used == pytest.approx(240, rel=1e-3)
    assert decayed(Use("ada", 4, NOW - HALF_LIFE_S - 60, NOW - HALF_LIFE_S), NOW) == pytest.approx(120, rel=1e-3)
    assert decayed(Use("ada", 4, NOW + 5, NOW + 10), NOW) == 0.0  # the clock of another machine


def test_the_average_user_has_half_of_the_head_start_and_one_who_used_nothing_all_of_it():
    uses = [Use("ada", 1, NOW - 100, NOW), Use("bob", 1, NOW - 100, NOW)]
    assert head_starts(uses, ["ada", "bob"], NOW) == {"ada": HEAD_START_S / 2, "bob": HEAD_START_S / 2}
    found = head_starts(uses[:1], ["ada", "bob"], NOW)
    assert found == {"ada": HEAD_START_S / 4, "bob": HEAD_START_S}


def test_with_one_user_or_without_any_use_nothing_changes():
    assert head_starts([Use("ada", 1, 0, NOW)], ["ada"], NOW) == {}
    assert head_starts([], ["ada", "bob"], NOW) == {}


@pytest.fixture
def hosts(orc_home, tmp_path, clock):
    """A cluster of one host, on which orc places jobs, and a client for each of two users."""
    backend = FakeBackend(tmp_path / "hosts", hosts={"n1": 1})
    clients = {}
    for name in ("ada", "bob"):
        clients[name] = Client(backend_of=lambda _: backend, clock=clock, sleep=clock.sleep)
        clients[name].workspace.user = name
    yield backend, clients
    for client in clients.values():
        client.close()


@pytest.mark.parametrize(("waits_longer_s", "next_one"), [(3600, "bob"), (13 * 3600, "ada")])
def test_who_has_used_little_goes_first_unless_the_other_has_waited_much_longer(
    hosts, clock, job_file, waits_longer_s, next_one
):
    backend, clients = hosts
    ada, bob = clients["ada"], clients["bob"]
    first = ada.submit(job_file())
    backend.set(first.attempt.marker, Phase.RUNNING, started_at=clock.now)
    ada.refresh()
    waiting = {"ada": ada.submit(job_file())}
    clock.now += waits_longer_s
    waiting["bob"] = bob.submit(job_file())
    assert bob.job(waiting["bob"].id).state == "QUEUED"
    clock.now += 60
    backend.set(first.attempt.marker, Phase.SUCCEEDED, started_at=first.created_at, ended_at=clock.now)
    ada.refresh()
    assert {name: ada.job(view.id).state for name, view in waiting.items()} == {
        name: "PENDING" if name == next_one else "QUEUED" for name in waiting
    }


def test_a_higher_priority_gets_the_host_first(hosts, clock, job_file):
    backend, clients = hosts
    ada = clients["ada"]
    first = ada.submit(job_file())
    plain, urgent = ada.submit(job_file()), ada.submit(job_file(priority=2))
    backend.set(first.attempt.marker, Phase.SUCCEEDED)
    ada.refresh()
    assert [ada.job(view.id).state for view in (plain, urgent)] == ["QUEUED", "PENDING"]
    assert "is older" in ada.job(plain.id).reason or "held by" in ada.job(plain.id).reason
