"""Limits of clusters, quotas of users and projects, priorities: who waits, for what, and who is next."""

from __future__ import annotations

from collections import Counter

import pytest

from orc.launchers.backends.base import Phase
from orc.launchers.spec.clusters import Limits
from orc.orchestrator.engine import queueing
from orc.orchestrator.engine.queueing import Book, Demand, Quota, queue_key, use_of_quotas


def demand(job, gpus=1, owner="ada", project="", cluster="lab"):
    return Demand(job, cluster, owner, project, gpus, (0.0, 0.0, job))


def book(limits=None, quota=(), flying=(), waiting=()):
    made = Book({"lab": limits} if limits else {}, list(quota), Counter(), list(waiting))
    for one in flying:
        made.take(one)
    return made


# -- the rules, pure


@pytest.mark.parametrize(
    ("limits", "said"),
    [
        (Limits(max_jobs=2), "2 of the 2 jobs on lab are taken"),
        (Limits(max_gpus=5), "4 of the 5 GPUs on lab are taken"),
        (Limits(max_jobs_per_user=1), "1 of the 1 jobs of ada on lab are taken"),
        (Limits(max_gpus_per_user=3), "2 of the 3 GPUs of ada on lab are taken"),
    ],
)
def test_a_job_waits_for_each_limit_of_its_cluster(limits, said):
    flying = [demand("a", 2), demand("b", 2, owner="bob")]
    assert said in book(limits, flying=flying).hold(demand("new", 2))
    assert book(limits, flying=[]).hold(demand("new", 2)) == ""


@pytest.mark.parametrize(
    ("quota", "holds"),
    [
        (Quota("user", "ada", "gpus", 2), True),
        (Quota("user", "ada", "jobs", 1), True),
        (Quota("user", "bob", "gpus", 0), False),
        (Quota("project", "vision", "gpus", 4), False),
        (Quota("project", "vision", "gpus", 3), True),
    ],
)
def test_a_quota_holds_on_all_clusters_together(quota, holds):
    flying = [demand("a", 2, project="vision", cluster="far")]
    assert bool(book(quota=[quota], flying=flying).hold(demand("new", 2, project="vision"))) is holds


def test_a_job_that_waits_for_a_limit_closes_it_to_those_behind_it_and_no_other():
    large, small = demand("a-large", 4), demand("b-small", 1)
    other = demand("c-other", 1, owner="bob")
    limits = Limits(max_gpus_per_user=4, max_gpus=8)
    made = book(limits, flying=[demand("x", 2)], waiting=[large, small, other])
    assert "2 of the 4 GPUs of ada" in made.hold(large)
    assert "a-large is before it" in made.hold(small)
    assert made.hold(other) == ""


def test_a_job_that_would_fit_and_that_nobody_sends_stops_nobody():
    made = book(Limits(max_jobs=1), waiting=[demand("asleep"), demand("new")])
    assert made.hold(demand("new")) == ""


def test_what_can_never_be_says_so_and_closes_nothing():
    made = book(Limits(max_gpus=4), waiting=[demand("a-huge", 8), demand("b", 1)])
    assert made.hold(demand("a-huge", 8)) == "waiting for ever: it needs 8 of the 4 GPUs on lab"
    assert made.hold(demand("b", 1)) == ""


def test_a_point_of_priority_is_worth_an_hour_so_nobody_waits_for_ever():
    hour = 3600.0
    assert queue_key(10 * hour, 5, "b") < queue_key(6 * hour, 0, "a")
    assert queue_key(10 * hour, 5, "b") > queue_key(4 * hour, 0, "a")
    assert queue_key(1.0, 0, "a") < queue_key(1.0, 0, "b")
    assert queue_key(201 * hour, 100, "new") > queue_key(0.0, -100, "old")


# -- in the ledger


@pytest.fixture
def limited(backend):
    """Gives the fake cluster limits."""

    def limit(**limits: int) -> None:
        backend.cluster = backend.cluster.model_copy(update={"limits": limits})

    return limit


def states(client):
    return [client.job(row.id).state for row in reversed(client.jobs())]


def test_jobs_beyond_the_limit_wait_in_the_ledger_and_go_on_in_turn(client, backend, clock, job_file, limited):
    limited(max_jobs=2)
    views = [client.submit(job_file()) for _ in range(2)]
    clock.now += 1
    late, urgent = client.submit(job_file()), client.submit(job_file(priority=1))
    assert states(client) == ["PENDING", "PENDING", "QUEUED", "QUEUED"]
    assert client.job(late.id).reason == "waiting for its turn: 2 of the 2 jobs on local are taken"
    assert len(backend.calls("submit")) == 2
    backend.set(views[0].attempt.marker, Phase.SUCCEEDED)
    client.refresh([late.id])  # who asks for one sees to it that the other one goes first
    assert (client.job(urgent.id).state, client.job(late.id).state) == ("PENDING", "QUEUED")
    backend.set(views[1].attempt.marker, Phase.FAILED, cause="crash")
    client.refresh()
    assert client.job(late.id).state == "PENDING"


def test_one_pass_sends_as_many_as_there_are_places_and_no_more(client, job_file, limited, see):
    limited(max_jobs=1)
    first = client.submit(job_file())
    for _ in range(6):
        client.submit(job_file())
    limited(max_jobs=4)
    client.refresh()
    assert sorted(states(client)) == ["PENDING"] * 4 + ["QUEUED"] * 3
    see(first, Phase.SUCCEEDED)
    assert sorted(states(client)) == ["PENDING"] * 4 + ["QUEUED"] * 2 + ["SUCCEEDED"]


def test_a_job_that_cannot_be_sent_from_here_keeps_no_other_waiting(client, job_file, limited, see):
    limited(max_jobs=1)
    first, stuck, other = (client.submit(job_file()) for _ in range(3))
    with client.workspace.ledger.transaction() as tx:
        digests = '{"code": "' + "0" * 64 + '", "runtime": "' + "0" * 64 + '"}'
        tx.connection.execute("UPDATE jobs SET digests = :d WHERE id = :id", {"d": digests, "id": stuck.id})
    see(first, Phase.SUCCEEDED)
    assert client.job(stuck.id).state != "PENDING"
    assert client.job(other.id).state == "PENDING"


def test_quotas_of_a_project_count_gpus_of_its_jobs(client, backend, job_file):
    with client.workspace.ledger.transaction() as tx:
        queueing.put_quota(tx.connection, Quota("project", "vision", "gpus", 4))
    two = {"resources": {"gpus_per_node": 2}, "project": "vision"}
    views = [client.submit(job_file(**two)) for _ in range(3)]
    free = client.submit(job_file(resources={"gpus_per_node": 8}))
    assert [client.job(view.id).state for view in (*views, free)] == ["PENDING", "PENDING", "QUEUED", "PENDING"]
    assert client.job(views[2].id).reason == "waiting for its turn: 4 of the 4 GPUs of the project vision are taken"
    with client.workspace.ledger.transaction() as tx:
        queueing.remove_quota(tx.connection, "project", "vision", "gpus")
    client.refresh()
    assert client.job(views[2].id).state == "PENDING"


def test_who_has_spent_the_quota_of_30_days_waits_until_older_attempts_no_longer_count(
    client, backend, clock, job_file, see
):
    backend.cluster = backend.cluster.model_copy(update={"prices": {"node_hour": 2.0, "gpu_hour": 3.0}})
    with client.workspace.ledger.transaction() as tx:
        queueing.put_quota(tx.connection, Quota("project", "vision", "cost", 40))
    two = {"resources": {"gpus_per_node": 2}, "project": "vision"}
    first = client.submit(job_file(**two))
    see(first, Phase.RUNNING, started_at=clock.now)
    clock.now += 4.9 * 3600
    early = client.submit(job_file(**two))
    assert early.state == "PENDING"  # 39.20 of 40
    clock.now += 0.2 * 3600
    ended = clock.now
    see(first, Phase.SUCCEEDED, started_at=first.created_at, ended_at=ended)
    late, free = client.submit(job_file(**two)), client.submit(job_file())
    assert late.reason == "waiting for its turn: the project vision has spent 40.80 of 40 in 30 days"
    assert (late.state, free.state) == ("QUEUED", "PENDING")
    assert use_of_quotas(client.workspace)[0][1] == pytest.approx(40.8)
    clock.now = first.created_at + 30 * 86400 + 3600
    client.refresh()
    assert client.job(late.id).state == "PENDING"


def test_a_retry_waits_for_its_turn_like_others(client, backend, clock, job_file, limited, see):
    limited(max_jobs=1)
    first = client.submit(job_file(retry={"max_attempts": 2, "on": ["crash"], "backoff": 10}))
    second = client.submit(job_file())
    see(first, Phase.FAILED, cause="crash")
    assert client.job(second.id).state == "PENDING"  # while the other waits for its backoff
    clock.now += 20
    client.refresh()
    assert client.job(first.id).reason.startswith("waiting for its turn: 1 of the 1 jobs")
    backend.set(client.job(second.id).attempt.marker, Phase.SUCCEEDED)
    client.refresh()
    assert client.job(first.id).attempt.number == 2
