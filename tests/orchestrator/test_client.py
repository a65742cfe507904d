from __future__ import annotations

import json
import threading
import time

import pytest
from counted_database import counting

from orc.launchers.backends.base import LogChunk, LogSelector, Phase, SupportsQueue
from orc.launchers.errors import BackendUnreachable
from orc.orchestrator.api.logs import list_logs, merge_logs
from orc.orchestrator.api.session import LedgerSession
from orc.orchestrator.client import Client, JobNotFound
from orc.orchestrator.views import JobView


@pytest.fixture
def after(clock, monkeypatch):
    """Does things at moments of the test's clock."""
    plan = []
    sleep = clock.sleep

    def step(seconds):
        sleep(seconds)
        while plan and plan[0][0] <= clock.now:
            plan.pop(0)[1]()

    monkeypatch.setattr(clock, "sleep", step)
    return lambda seconds, action: plan.append((clock.now + seconds, action))


@pytest.fixture
def waiting(orc_home, backend, clock, after) -> Client:
    with Client(backend_of=lambda _: backend, clock=clock, sleep=lambda s: clock.sleep(s)) as made:
        yield made


def test_waiting_follows_a_job_to_its_end(waiting, backend, job_file, after):
    view = waiting.submit(job_file())
    after(5, lambda: backend.set(view.attempt.marker, Phase.RUNNING))
    after(90, lambda: backend.set(view.attempt.marker, Phase.SUCCEEDED))
    seen = []
    (done,) = waiting.wait([view.id], on_change=lambda v: seen.append(v.state))
    assert done.state == "SUCCEEDED"
    assert seen == ["PENDING", "RUNNING", "SUCCEEDED"]


def test_waiting_looks_often_at_first_and_seldom_later(waiting, backend, clock, job_file, after):
    view = waiting.submit(job_file())
    after(600, lambda: backend.set(view.attempt.marker, Phase.SUCCEEDED))
    waiting.wait([view.id])
    assert clock.slept[0] <= 0.05
    assert max(clock.slept) <= 2.0
    assert len(clock.slept) < 450


def test_a_cluster_is_asked_less_often_than_this_machine(waiting, backend, clock, job_file, after):
    backend.self_driving = False
    view = waiting.submit(job_file())
    after(600, lambda: backend.set(view.attempt.marker, Phase.SUCCEEDED))
    waiting.wait([view.id])
    assert clock.slept[0] == 1.0
    assert len(clock.slept) < 110


def test_waiting_gives_up_when_its_time_is_over(waiting, clock, job_file):
    view = waiting.submit(job_file())
    began = clock.now
    (still,) = waiting.wait([view.id], timeout_s=30)
    assert still.state == "PENDING"
    assert clock.now - began == pytest.approx(30)


def test_waiting_drives_retries(waiting, backend, job_file, after):
    view = waiting.submit(job_file(retry={"max_attempts": 2, "on": ["crash"], "backoff": 60}))
    after(1, lambda: backend.set(view.attempt.marker, Phase.FAILED, cause="crash"))
    after(100, lambda: backend.set(f"orc-{view.id}-a2", Phase.SUCCEEDED))
    (done,) = waiting.wait([view.id], timeout_s=200)
    assert (done.state, len(done.attempts)) == ("SUCCEEDED", 2)


def test_waiting_for_several_jobs_returns_them_in_the_order_asked_for(waiting, backend, job_file):
    views = [waiting.submit(job_file()) for _ in range(3)]
    for view in views:
        backend.set(view.attempt.marker, Phase.SUCCEEDED)
    ids = [views[i].id for i in (2, 0, 1)]
    assert [view.id for view in waiting.wait(ids)] == ids


def test_a_tick_waits_for_the_retry_and_returns_once_it_is_sent(waiting, backend, clock, job_file):
    view = waiting.submit(job_file(retry={"max_attempts": 2, "on": ["crash"], "backoff": 60}))
    backend.set(view.attempt.marker, Phase.FAILED, cause="crash")
    began = clock.now
    after = waiting.tick(view.id)
    assert (after.state, len(after.attempts)) == ("PENDING", 2)
    assert 45 <= clock.now - began < 62  # up to a quarter less than the backoff


def test_a_tick_for_a_job_that_has_ended_returns_at_once(waiting, backend, clock, job_file):
    view = waiting.submit(job_file())
    backend.set(view.attempt.marker, Phase.SUCCEEDED)
    waiting.tick(view.id)
    assert clock.slept == []


def test_the_end_of_a_job_starts_the_next_one_that_waits_for_its_gpus(waiting, backend, clock, job_file):
    first = waiting.submit(job_file())
    backend.behave(submit="busy")
    second = waiting.submit(job_file())
    assert (second.state, second.reason[:11]) == ("PREPARED", "waiting for")
    backend.behave(submit=None)
    backend.set(first.attempt.marker, Phase.SUCCEEDED)
    waiting.tick(first.id)
    assert waiting.job(second.id).state == "PENDING"


def test_a_tick_looks_again_when_the_attempt_still_seems_alive(waiting, backend, clock, job_file, after):
    """The agent starts it just before it is gone itself."""
    view = waiting.submit(job_file(retry={"max_attempts": 2, "on": ["crash"], "backoff": 0}))
    backend.set(view.attempt.marker, Phase.RUNNING)
    after(1, lambda: backend.set(view.attempt.marker, Phase.FAILED, cause="crash"))
    assert len(waiting.tick(view.id).attempts) == 2


def test_a_tick_leaves_a_running_job_alone_after_a_while(waiting, backend, clock, job_file):
    view = waiting.submit(job_file())
    began = clock.now
    assert waiting.tick(view.id).state == "PENDING"
    assert clock.now - began < 10


def test_a_tick_does_not_wait_out_the_backoff_of_a_job_that_is_cancelled(waiting, backend, clock, job_file, after):
    view = waiting.submit(job_file(retry={"max_attempts": 2, "on": ["crash"], "backoff": 500}))
    backend.set(view.attempt.marker, Phase.FAILED, cause="crash")
    after(10, lambda: waiting.cancel([view.id]))
    began = clock.now
    assert waiting.tick(view.id).state == "CANCELLED"
    assert clock.now - began < 13


def test_references_to_jobs(client, clock, job_file):
    with pytest.raises(JobNotFound, match="there is no job yet"):
        client.resolve("@last")
    first = client.submit(job_file(name="digits"))
    clock.now += 1
    second = client.submit(job_file(name="digest"))
    assert client.resolve("@last") == second.id
    assert client.resolve(first.id) == first.id
    assert client.resolve("digits") == first.id
    with pytest.raises(JobNotFound, match="'dig' is not unique") as caught:
        client.resolve("dig")
    assert first.id in caught.value.hint
    assert second.id in caught.value.hint
    with pytest.raises(JobNotFound, match="no such job: digitz") as caught:
        client.resolve(f"digitz{first.id[6:]}")
    assert first.id in caught.value.hint
    for nothing in ("", "%", "nope"):
        with pytest.raises(JobNotFound):
            client.resolve(nothing)


def test_a_list_says_how_old_a_state_is_and_only_what_the_cluster_said_makes_it_younger(
    client, backend, clock, job_file, see
):
    job = client.submit(job_file())
    see(job, Phase.RUNNING)
    running = clock.now
    clock.now += 300
    backend.behave(poll="unreachable")
    client.refresh()
    (row,) = client.jobs()
    assert row.age_from == running
    backend.behave(poll=None)
    client.refresh()
    (row,) = client.jobs()
    assert row.age_from == clock.now
    clock.now += 5
    client.refresh()
    assert client.jobs()[0].age_from == clock.now - 5  # the ledger is not written for each look
    see(job, Phase.SUCCEEDED)
    assert client.jobs()[0].age_from is None


def test_views_are_json_able_whole(client, job_file, see):
    view = client.submit(job_file(tags={"a": "b"}, args={"x": [1, "é"]}))
    view = see(view, Phase.FAILED, cause="crash", reason="boom", hosts=["n1"])
    back = json.loads(json.dumps(view.to_dict()))
    assert set(back) == set(JobView.__dataclass_fields__)
    assert back["attempts"][0]["hosts"] == ["n1"]
    first = json.loads(json.dumps(client.events(view.id)[0].to_dict()))
    assert (first["kind"], first["job"], first["attempt"]) == ("queued", view.id, None)


def test_logs_of_any_attempt_are_read_from_its_backend(client, job_file, see):
    view = client.submit(job_file(retry={"max_attempts": 2, "on": ["crash"], "backoff": 0}))
    see(view, Phase.FAILED, cause="crash", passes=2)
    rank0 = LogSelector(rank=0)
    assert client.log_selectors(view.id) == [rank0, LogSelector(node=0)]

    def text(**which):
        return b"".join(chunk.data for chunk in client.read_log(view.id, rank0, **which)).decode()

    assert text() == f"log of orc-{view.id}-a2"
    assert text(attempt=1) == f"log of orc-{view.id}-a1"
    assert text(attempt=1, offset=7) == f"orc-{view.id}-a1"
    with pytest.raises(JobNotFound, match="has no attempt 7"):
        client.log_selectors(view.id, attempt=7)


def test_a_merged_log_has_the_ranks_that_can_be_read_and_names_the_hosts_of_the_others(
    client, backend, job_file, monkeypatch
):
    view = client.submit(job_file())
    ranks = [LogSelector(rank=rank) for rank in range(3)]
    monkeypatch.setattr(backend, "log_listing", lambda _: (ranks, {"node4": "no route"}))
    monkeypatch.setattr(backend, "log_file", lambda *_: None)

    def logs(_handle, selector, _offset=0):
        if selector.rank == 1:
            raise BackendUnreachable("timed out", where="node2")
        yield LogChunk(selector, 0, b"line\n")

    monkeypatch.setattr(backend, "logs", logs)
    merged = merge_logs(client.session, view.id)
    assert [line.rank for line in merged.lines] == [0, 2]
    assert (merged.next, merged.unreachable) == ("0:5,2:5", {"node4": "no route", "node2": "timed out"})
    assert list_logs(client.session, view.id).unreachable == {"node4": "no route"}


def test_an_attempt_that_was_never_sent_has_no_logs(client, backend, job_file):
    backend.behave(submit="swallowed", find="unreachable")
    view = client.submit(job_file())
    assert client.log_selectors(view.id) == []
    assert list(client.read_log(view.id, LogSelector(rank=0))) == []


def test_a_wait_with_a_time_out_does_not_wait_for_a_cluster_that_hangs(orc_home, backend, job_file, monkeypatch):
    with Client(backend_of=lambda _: backend) as client:
        view = client.submit(job_file())
        answered = threading.Event()
        poll = backend.poll

        def hanging(handles):
            answered.wait(60)
            return poll(handles)

        monkeypatch.setattr(backend, "poll", hanging)
        began = time.monotonic()
        (still,) = client.wait([view.id], timeout_s=0.3)
        took = time.monotonic() - began
        answered.set()
    assert still.state == "PENDING"
    assert took < 30


def test_what_breaks_a_pass_is_raised_by_a_wait_with_a_time_out(client, job_file, monkeypatch):
    view = client.submit(job_file())
    monkeypatch.setattr(LedgerSession, "refresh", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        client.wait([view.id], timeout_s=10)


def test_closing_a_client_closes_what_it_has_opened_to_clusters(orc_home, backend, clock, job_file, monkeypatch):
    closed = []
    monkeypatch.setattr(backend, "close", lambda: closed.append(backend.name), raising=False)
    with Client(backend_of=lambda _: backend, clock=clock, sleep=clock.sleep) as client:
        view = client.submit(job_file())
        client.refresh([view.id])
        assert closed == []
    assert closed == ["local"]


def test_waiting_for_a_time_leaves_no_connection_open(client, backend, job_file, monkeypatch):
    closed = threading.Event()
    monkeypatch.setattr(backend, "close", closed.set, raising=False)
    view = client.submit(job_file())
    client.wait([view.id], timeout_s=1)
    assert closed.wait(30)


def test_a_job_is_shown_as_it_is_at_one_moment(client, job_file):
    job = client.submit(job_file())
    with counting(client.workspace.ledger) as counted:
        assert client.job(job.id) == job
    assert counted["transactions"] == 1


def test_the_clusters_of_another_file_are_those_of_that_file(orc_home, tmp_path):
    described = orc_home / "config" / "clusters.yaml"
    described.parent.mkdir(parents=True, exist_ok=True)
    described.write_text("default: {kind: slurm, root: ~/orc}\n")
    other = tmp_path / "others.yaml"
    other.write_text("lab: {kind: slurm, root: ~/orc}\nhere: {kind: local}\n")
    with Client(clusters_file=other) as client:
        assert client.workspace.clusters_with(SupportsQueue) == (["lab"], {})
