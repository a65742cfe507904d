from __future__ import annotations

import pytest
from fake_backend import FakeBackend

from orc.launchers.attempts.records import AttemptExit, RankFailure
from orc.launchers.backends.base import Cause, Phase
from orc.orchestrator import workspace
from orc.orchestrator.client import Client
from orc.orchestrator.ledger.leases import CLAIM_S

NO_WAIT = {"max_attempts": 3, "on": ["crash", "node_failure", "preempted", "timeout"], "backoff": 0}
A_MINUTE = {**NO_WAIT, "backoff": 60}


def kinds(client, job_id):
    return [event.kind for event in client.events(job_id)]


@pytest.fixture
def running(client, backend, job_file):
    """Submits a job and lets it run."""

    def start(**keys):
        view = client.submit(job_file(**keys))
        backend.set(view.attempt.marker, Phase.RUNNING)
        client.refresh()
        return client.job(view.id)

    return start


def test_one_pass_over_many_jobs_asks_the_cluster_once(client, backend, job_file):
    for _ in range(20):
        client.submit(job_file())
    client.refresh()
    assert backend.calls("poll") == ["20"]


def test_a_pass_over_some_jobs_asks_about_them_alone(client, backend, job_file):
    first, _ = client.submit(job_file()), client.submit(job_file())
    client.refresh([first.id])
    assert backend.calls("poll") == ["1"]
    client.refresh([])
    assert backend.calls("poll") == ["1"]


@pytest.mark.parametrize("trouble", ["unreachable", "bug"])
def test_a_backend_that_cannot_be_asked_never_fails_a_job(client, backend, clock, running, trouble):
    view = running()
    backend.behave(poll=trouble)
    for _ in range(50):
        clock.now += 10
        assert set(client.refresh().unreachable) == {"local"}
    after = client.job(view.id)
    assert (after.state, after.attempt.state) == ("RUNNING", "RUNNING")
    assert after.reason.startswith("cannot reach local: ")
    # 500 s of outage at one event each 300 s.
    assert kinds(client, view.id).count("poll_error") == 2
    backend.behave(poll=None)
    assert client.refresh().unreachable == {}
    assert client.job(view.id).reason == ""


def test_what_one_job_has_left_keeps_no_other_job_waiting(client, backend, job_file, monkeypatch):
    """Polling breaks for one of many: it is looked for, and says so itself; the cluster counts as reached."""
    views = [client.submit(job_file()) for _ in range(20)]
    for view in views:
        backend.set(view.attempt.marker, Phase.SUCCEEDED)
    poll, bad = backend.poll, views[13]

    def broken(handles):
        if any(handle.marker == bad.attempt.marker for handle in handles):
            raise ValueError("no such number: many")
        return poll(handles)

    monkeypatch.setattr(backend, "poll", broken)
    assert client.refresh().unreachable == {}
    states = {view.id: client.job(view.id).state for view in views}
    assert states == {view.id: "PENDING" if view is bad else "SUCCEEDED" for view in views}
    assert "ValueError: no such number: many" in client.job(bad.id).reason


def test_one_broken_cluster_does_not_keep_the_others_waiting(orc_home, tmp_path, clock, job_file):
    (orc_home / "config").mkdir(parents=True)
    (orc_home / "config" / "clusters.yaml").write_text("other: {kind: local}\n")
    backends = {name: FakeBackend(tmp_path / name, name=name) for name in ("local", "other")}
    client = Client(backend_of=backends.__getitem__, clock=clock)
    views = [client.submit(job_file(cluster=name)) for name in backends]
    for view in views:
        backends[view.cluster].set(view.attempt.marker, Phase.SUCCEEDED)
    backends["local"].behave(poll="bug")
    assert list(client.refresh().unreachable) == ["local"]
    assert [client.job(view.id).state for view in views] == ["PENDING", "SUCCEEDED"]
    client.close()


def test_a_cluster_that_is_not_configured_any_more_is_said_and_fails_nothing(orc_home, clock, backend, job_file):
    with Client(backend_of=lambda _: backend, clock=clock) as client:
        view = client.submit(job_file())
    with Client(clock=clock) as client:
        with client.workspace.ledger.transaction() as tx:
            tx.record(tx.find(view.id), job_set={"cluster": "gone"})
        assert "unknown cluster 'gone'" in client.refresh().unreachable["gone"]
        assert client.job(view.id).state == "PENDING"


def test_what_cannot_be_told_leaves_the_state(client, running, see):
    view = running()
    see(view, Phase.UNKNOWN, reason="started on another machine")
    assert (client.job(view.id).state, client.job(view.id).reason) == ("RUNNING", "started on another machine")


def test_where_much_is_kept_by_job_nothing_is_of_those_that_have_ended(client, running, monkeypatch):
    monkeypatch.setattr(workspace, "MOST_KEPT", 2)
    for _ in range(6):
        running()
    ws = client.workspace
    assert len(ws.noted) == len(ws.sizes) == 6
    client.cancel([row.id for row in client.jobs()], grace_s=0)
    for _ in range(2):
        client.refresh()
    assert len(ws.noted) == len(ws.sizes) == 0


def test_an_unchanged_look_writes_nothing(client, running):
    view = running()
    before = client.job(view.id)
    client.refresh()
    assert client.job(view.id) == before


def test_a_job_that_the_backend_requeues_stays_the_same_attempt(client, running, see):
    view = running()
    see(view, Phase.PENDING, restarts=1, reason="BeginTime")
    assert (client.job(view.id).state, client.job(view.id).reason) == ("PENDING", "BeginTime")
    view = see(view, Phase.RUNNING, restarts=1, reason="")
    assert (view.state, view.attempt.restarts, len(view.attempts)) == ("RUNNING", 1, 1)
    assert kinds(client, view.id)[-3:] == ["running", "requeued", "running"]


def test_a_requeue_that_nobody_saw_pending_is_still_told(client, running, see):
    view = running()
    see(view, Phase.RUNNING, restarts=2)
    assert kinds(client, view.id)[-3:] == ["running", "requeued", "running"]
    assert client.job(view.id).attempt.restarts == 2


def test_a_failure_keeps_its_whole_story(backend, running, monkeypatch, see):
    view = running()
    failure = RankFailure(1, 0, "node-a", 42, None, 5.0, "Traceback: ValueError")
    end = AttemptExit(
        False, Cause.CRASH, failure.summary, 42, failure, 1.0, 5.0, ("node-a",), True, {1: {"exit_code": 42}}
    )
    observe = backend._observe

    def with_exit(marker):
        from dataclasses import replace

        return replace(observe(marker), exit=end)

    monkeypatch.setattr(backend, "_observe", with_exit)
    done = see(view, Phase.FAILED, cause="crash", reason=failure.summary, ended_at=5.0)
    assert (done.state, done.reason, done.ended_at) == ("FAILED", "rank 1 on node-a exited with 42", 5.0)
    assert (done.attempt.cause, done.attempt.exit) == ("crash", end)


@pytest.mark.parametrize(
    ("phase", "cause", "state", "recorded"),
    [
        (Phase.FAILED, "crash", "FAILED", "crash"),
        (Phase.FAILED, "timeout", "FAILED", "timeout"),
        (Phase.FAILED, "preempted", "PREEMPTED", "preempted"),
        (Phase.LOST, None, "LOST", "node_failure"),
        (Phase.FAILED, "node_failure", "FAILED", "node_failure"),
    ],
)
def test_every_listed_cause_brings_another_attempt(client, backend, clock, running, phase, cause, state, recorded, see):
    view = running(retry=A_MINUTE)
    waiting = see(view, phase, cause=cause, reason="it ended")
    assert (waiting.state, waiting.attempt.state, waiting.attempt.cause) == ("QUEUED", state, recorded)
    assert waiting.next_attempt_at is not None
    clock.now += 60
    client.refresh()
    again = client.job(view.id)
    assert (again.state, [a.number for a in again.attempts]) == ("PENDING", [1, 2])
    assert backend.calls("run") == [f"orc-{view.id}-a1", f"orc-{view.id}-a2"]


def test_the_backend_may_end_leftovers_before_the_next_attempt(client, backend, clock, running, see):
    view = running(retry=A_MINUTE)
    see(view, Phase.LOST)
    assert backend.calls("reap") == [view.attempt.marker]  # at once: ranks may outlive their agent
    clock.now += 60
    client.refresh()
    assert backend.calls("reap") == [view.attempt.marker] * 2  # and surely before anything new starts
    assert len(backend.calls("submit")) == 2


def test_a_retry_waits_for_its_backoff_and_says_when_it_was_the_last(client, backend, clock, running, see):
    view = running(retry={"max_attempts": 2, "on": ["crash"], "backoff": 60})
    see(view, Phase.FAILED, cause="crash", reason="boom")
    for _ in range(5):
        clock.now += 8.9
        client.refresh()
    assert client.job(view.id).state == "QUEUED"  # up to a quarter less than 60 s are waited
    assert "after boom" in client.job(view.id).reason
    clock.now += 15.6
    client.refresh()
    assert client.job(view.id).state == "PENDING"
    backend.set(f"orc-{view.id}-a2", Phase.FAILED, cause="crash", reason="boom")
    client.refresh()
    assert (client.job(view.id).state, client.job(view.id).reason) == ("FAILED", "boom (attempt 2 of 2)")


def test_a_retry_runs_from_the_same_snapshot(client, backend, running, job_file, see):
    view = running(retry=NO_WAIT)
    (job_file().base_dir / "train.py").write_text("print('edited')\n")
    see(view, Phase.LOST, passes=2)
    first, second = (e.data["trees"] for e in client.events(view.id) if e.kind == "prepared")
    assert first == second == view.digests
    assert set(backend.calls("stage")) == {view.digests["code"]}


def test_a_retry_whose_snapshot_is_gone_ends_the_job_with_the_reason(client, running, see):
    view = running(retry=NO_WAIT)
    client.workspace.store.remove(view.digests["code"])
    done = see(view, Phase.LOST, passes=2)
    assert done.state == "FAILED"
    assert "cannot be started again" in done.reason
    assert view.digests["code"] in done.reason


@pytest.mark.parametrize("step", ["stage", "submit"])
def test_a_retry_that_does_not_reach_the_cluster_is_tried_again(client, backend, clock, running, step, see):
    view = running(retry=A_MINUTE)
    see(view, Phase.LOST)
    clock.now += 60
    backend.behave(**{step: "unreachable"})
    for _ in range(3):
        assert "local" in client.refresh().unreachable
    assert client.job(view.id).state == "PREPARED"
    backend.behave(**{step: None})
    client.refresh()
    view = client.job(view.id)
    assert (view.state, view.reason, len(view.attempts)) == ("PENDING", "", 2)


def test_a_retry_that_is_refused_ends_the_job(client, backend, clock, running, see):
    view = running(retry=A_MINUTE)
    see(view, Phase.LOST)
    clock.now += 60
    backend.behave(submit="refuse")
    client.refresh()
    done = client.job(view.id)
    assert (done.state, done.reason, done.attempt.cause) == ("FAILED", "no such partition", "launch")


def test_a_claimed_job_is_left_to_its_owner_until_the_claim_expires(client, backend, clock, running, see):
    view = running(retry=A_MINUTE)
    see(view, Phase.LOST)
    clock.now += 60
    ledger = client.workspace.ledger
    assert ledger.claim([view.id], "another-boot/4026531836/1/1/abcd")
    client.refresh()
    assert len(backend.calls("submit")) == 1
    clock.now += CLAIM_S + 1
    client.refresh()
    assert len(backend.calls("submit")) == 2


def test_a_stale_look_changes_nothing(client, backend, running, monkeypatch, see):
    """Another pass ends the attempt and starts the next one between our poll and our write."""
    view = running(retry=NO_WAIT)
    poll = backend.poll

    def slow_poll(handles):
        seen = poll(handles)
        monkeypatch.undo()
        see(view, Phase.LOST, progress={}, passes=2)
        return seen

    backend.set(view.attempt.marker, Phase.RUNNING, progress={"step": 1})
    monkeypatch.setattr(backend, "poll", slow_poll)
    client.refresh()
    after = client.job(view.id)
    assert [a.state for a in after.attempts] == ["LOST", "PENDING"]
    assert after.attempts[0].progress == {}


def test_many_ends_are_written_in_few_transactions(client, backend, job_file, monkeypatch):
    from orc.orchestrator.engine import steps

    monkeypatch.setattr(steps, "_JOBS_PER_TRANSACTION", 4)
    views = [client.submit(job_file()) for _ in range(10)]
    for view in views:
        backend.set(view.attempt.marker, Phase.SUCCEEDED)
    opened = []
    transaction = client.workspace.ledger.transaction
    monkeypatch.setattr(client.workspace.ledger, "transaction", lambda **how: opened.append(1) or transaction(**how))
    client.refresh()
    assert {client.job(view.id).state for view in views} == {"SUCCEEDED"}
    assert len(opened) == 3
