"""A cluster that is asked over a network is asked by one process at a time, as often as its interval says."""

from __future__ import annotations

import pytest
from fake_backend import FakeBackend

from orc.launchers.backends.base import Phase
from orc.orchestrator.client import Client
from orc.orchestrator.ledger import polls
from orc.orchestrator.ledger.leases import new_owner


@pytest.fixture
def away(backend) -> FakeBackend:
    """The fake backend as a cluster that has to be asked."""
    backend.self_driving = False
    return backend


@pytest.fixture
def laptops(orc_home, away, clock):
    """Two clients of one ledger, as two machines have them."""
    made = [Client(backend_of=lambda _: away, clock=clock, sleep=clock.sleep) for _ in range(2)]
    yield made
    for client in made:
        client.close()


def look(client: Client) -> None:
    """A scheduled pass."""
    client.refresh(max_age_s=None)


def lease(client: Client, owner: str) -> None:
    ledger = client.workspace.ledger
    with ledger.database.write() as connection:
        assert polls.take_lease(connection, "local", owner, ledger.now(), polls.LEASE_S)


def row(client: Client) -> polls.ClusterPoll:
    with client.workspace.ledger.database.read() as connection:
        found = polls.find(connection, "local")
    assert found is not None
    return found


def test_all_that_run_passes_together_ask_no_more_often_than_one(laptops, away, clock, job_file):
    laptops[0].submit(job_file())
    for _ in range(600):  # ten minutes, each looking twice a second
        for client in laptops:
            look(client)
        clock.now += 0.5
        for client in laptops:
            look(client)
        clock.now += 0.5
    # 2, 3, 4.5, ... 60 s: nine polls in the first two minutes, then one a minute.
    assert 12 <= len(away.calls("poll")) <= 20


def test_a_change_makes_the_interval_short_again_and_whoever_polls_sees_all_jobs(laptops, away, clock, job_file):
    views = [laptops[0].submit(job_file()) for _ in range(3)]
    for _ in range(300):
        look(laptops[1])
        clock.now += 1.0
    assert row(laptops[0]).interval_s > 30
    away.set(views[1].attempt.marker, Phase.RUNNING)
    clock.now += 70
    look(laptops[1])
    assert row(laptops[0]).interval_s == polls.SHORTEST_S
    assert away.calls("poll")[-1] == "3"
    assert laptops[0].job(views[1].id).state == "RUNNING"


def test_what_was_just_sent_is_looked_at_soon_whatever_the_interval(laptops, away, clock, job_file):
    laptops[0].submit(job_file())
    for _ in range(300):
        look(laptops[0])
        clock.now += 1.0
    asked = len(away.calls("poll"))
    laptops[1].submit(job_file())
    clock.now += polls.SHORTEST_S + 0.1
    look(laptops[0])
    assert away.calls("poll")[asked:] == ["2"]


def test_a_poll_that_is_broken_off_keeps_no_other_process_from_asking(laptops, away, clock, job_file, monkeypatch):
    view = laptops[0].submit(job_file())

    def interrupted(_handles):
        raise KeyboardInterrupt

    with monkeypatch.context() as broken:
        broken.setattr(away, "poll", interrupted)
        with pytest.raises(KeyboardInterrupt):
            look(laptops[0])
    away.set(view.attempt.marker, Phase.RUNNING)
    look(laptops[1])
    assert laptops[1].job(view.id).state == "RUNNING"


def test_a_cluster_that_somebody_asks_at_this_moment_is_left_alone_and_cancellations_are_not(
    laptops, away, clock, job_file
):
    view = laptops[0].submit(job_file())
    lease(laptops[1], "another-machine/1/2/3/4")
    look(laptops[0])
    assert away.calls("poll") == []
    laptops[0].cancel([view.id])
    assert away.calls("cancel") == [f"{view.attempt.marker} 30"]
    clock.now += polls.LEASE_S + 1  # whoever asked has died
    look(laptops[0])
    assert laptops[0].job(view.id).state == "CANCELLED"


def test_the_lease_of_a_process_of_this_machine_that_is_gone_is_not_waited_for(laptops, away, job_file):
    laptops[0].submit(job_file())
    boot_id, namespace, _ = new_owner().split("/", 2)
    lease(laptops[1], f"{boot_id}/{namespace}/{2**22 - 1}/1/aaaa")
    look(laptops[0])
    assert away.calls("poll") == ["1"]


def test_a_person_who_looks_meanwhile_gets_the_answer_that_another_process_is_getting(
    laptops, away, clock, job_file, monkeypatch
):
    view = laptops[0].submit(job_file())
    away.set(view.attempt.marker, Phase.RUNNING)
    other = laptops[1].workspace
    lease(laptops[1], other.owner)

    def answered(seconds: float) -> None:
        clock.now += seconds
        with other.ledger.database.write() as connection:
            polls.release(connection, "local", other.owner)
        look(laptops[1])

    monkeypatch.setattr(laptops[0].workspace, "sleep", answered)
    laptops[0].refresh([view.id], max_age_s=polls.FRESH_S)
    assert away.calls("poll") == ["1"]
    assert laptops[0].job(view.id).state == "RUNNING"


def test_a_person_who_looks_again_at_once_is_shown_the_last_answer_and_a_later_one_a_fresh_one(
    laptops, away, clock, job_file
):
    view = laptops[0].submit(job_file())
    for _ in range(5):
        laptops[1].refresh([view.id], max_age_s=polls.FRESH_S)
    assert len(away.calls("poll")) == 1
    clock.now += polls.FRESH_S
    laptops[1].refresh([view.id], max_age_s=polls.FRESH_S)
    assert len(away.calls("poll")) == 2


def test_a_cluster_without_an_answer_keeps_its_error_and_the_time_of_its_last_answer(laptops, away, clock, job_file):
    laptops[0].submit(job_file())
    look(laptops[0])
    answered = row(laptops[0]).answered_at
    away.behave(poll="unreachable")
    clock.now += 10
    assert laptops[0].refresh(max_age_s=None).unreachable == {"local": "controller is down"}
    assert (row(laptops[1]).error, row(laptops[1]).answered_at) == ("controller is down", answered)
    # Who does not ask because it is not time says the same.
    assert laptops[1].refresh(max_age_s=None).unreachable == {"local": "controller is down"}
    away.behave(poll=None)
    clock.now += 60
    assert laptops[1].refresh(max_age_s=None).unreachable == {}
    assert row(laptops[1]).error is None


@pytest.mark.parametrize("step", [-86400.0, 86400.0])
def test_a_clock_that_jumps_stops_nobody(laptops, away, clock, job_file, step):
    laptops[0].submit(job_file())
    look(laptops[0])
    clock.now += step
    look(laptops[1])
    assert len(away.calls("poll")) == 2
