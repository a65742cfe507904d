from __future__ import annotations

import pytest

from orc.launchers.backends.base import Phase

NO_WAIT = {"max_attempts": 3, "on": ["crash", "node_failure", "preempted", "timeout"], "backoff": 0}


def kinds(client, job_id):
    return [event.kind for event in client.events(job_id)]


def test_a_running_job_is_cancelled_with_the_jobs_grace(client, backend, job_file):
    view = client.submit(job_file(grace=7))
    (cancelled,) = client.cancel([view.id])
    assert backend.calls("cancel") == [f"{view.attempt.marker} 7"]
    assert (cancelled.state, cancelled.attempt.state, cancelled.attempt.cause) == ("CANCELLED",) * 2 + ("cancelled",)
    assert kinds(client, view.id)[4:] == ["cancel_requested", "cancel_sent", "cancelled", "job_cancelled"]


def test_the_request_is_durable_before_the_backend_hears_of_it(client, backend, job_file):
    view = client.submit(job_file())
    backend.behave(cancel="unreachable")
    untold: dict[str, str] = {}
    (waiting,) = client.cancel([view.id], on_unreachable=untold.update)
    assert "no answer while cancelling" in untold[view.cluster]
    assert waiting.state == "PENDING"
    assert waiting.cancel_requested_at is not None
    assert "no answer while cancelling" in waiting.reason
    backend.behave(cancel=None)
    client.refresh()
    assert client.job(view.id).state == "CANCELLED"


def test_a_job_that_cannot_be_told_keeps_the_others_of_its_cluster_from_nothing(client, backend, job_file, see):
    silent, told, running = (client.submit(job_file()) for _ in range(3))
    backend.behave(untold=[silent.attempt.marker])
    client.cancel([silent.id, told.id])
    see(running, Phase.RUNNING)
    assert [client.job(view.id).state for view in (silent, told, running)] == ["PENDING", "CANCELLED", "RUNNING"]
    assert "poll_error" in kinds(client, silent.id)
    backend.behave(untold=None)
    client.refresh()
    assert client.job(silent.id).state == "CANCELLED"


def test_a_request_is_passed_on_once_and_a_second_one_with_its_own_grace(client, backend, job_file, monkeypatch):
    view = client.submit(job_file())
    seen = backend._observe(view.attempt.marker)
    monkeypatch.setattr(backend, "_observe", lambda _: seen)  # it takes its time to end
    client.cancel([view.id], grace_s=30)
    client.refresh()
    client.cancel([view.id], grace_s=0)
    client.refresh()
    assert backend.calls("cancel") == [f"{view.attempt.marker} 30", f"{view.attempt.marker} 0"]


def test_a_job_that_waits_for_its_retry_is_cancelled_at_once_and_never_runs_again(
    client, backend, clock, job_file, see
):
    view = client.submit(job_file(retry={"max_attempts": 3, "on": ["crash"], "backoff": 60}))
    see(view, Phase.FAILED, cause="crash")
    (cancelled,) = client.cancel([view.id])
    assert (cancelled.state, [a.state for a in cancelled.attempts]) == ("CANCELLED", ["FAILED"])
    clock.now += 100
    client.refresh()
    assert len(backend.calls("submit")) == 1


def test_a_prepared_attempt_that_is_cancelled_is_never_sent(client, backend, job_file, monkeypatch):
    """The request comes while the snapshot is on its way to the cluster."""
    stage = backend.stage
    ids = []

    def stage_and_cancel(snapshot, plan):
        stage(snapshot, plan)
        ids.append(client.jobs()[0].id)
        client.cancel(ids)

    monkeypatch.setattr(backend, "stage", stage_and_cancel)
    view = client.submit(job_file())
    assert (view.state, view.attempt.state) == ("CANCELLED", "CANCELLED")
    assert backend.calls("submit") == []


def test_a_request_that_races_with_the_submission_cancels_what_was_submitted(client, backend, job_file, monkeypatch):
    submit = backend.submit

    def submit_and_cancel(plan, secrets):
        handle = submit(plan, secrets)
        (seen,) = client.cancel([plan.attempt.job])
        assert seen.state == "SUBMITTING"
        return handle

    monkeypatch.setattr(backend, "submit", submit_and_cancel)
    view = client.submit(job_file())
    assert len(backend.calls("cancel")) == 1
    client.refresh()
    assert client.job(view.id).state == "CANCELLED"


def test_a_cut_off_submission_is_adopted_and_then_cancelled(client, backend, job_file):
    backend.behave(submit="ambiguous")
    view = client.submit(job_file())
    client.cancel([view.id])
    assert client.job(view.id).state == "CANCELLED"
    assert backend.calls("cancel") == [f"{view.attempt.marker} 30"]


def test_a_cut_off_submission_that_left_nothing_is_cancelled_without_being_sent_again(client, backend, job_file):
    backend.behave(submit="swallowed")
    view = client.submit(job_file())
    client.cancel([view.id])
    assert client.job(view.id).state == "CANCELLED"
    assert len(backend.calls("submit")) == 1


@pytest.mark.parametrize(("phase", "state"), [(Phase.SUCCEEDED, "SUCCEEDED"), (Phase.FAILED, "CANCELLED")])
def test_how_a_job_ended_in_spite_of_the_request_is_told_truthfully(client, backend, job_file, phase, state, see):
    view = client.submit(job_file(retry=NO_WAIT))
    backend.behave(cancel="unreachable")
    client.cancel([view.id])
    backend.behave(cancel=None)
    done = see(view, phase, cause="crash" if phase is Phase.FAILED else None, reason="ended by itself", passes=2)
    assert (done.state, done.attempt.state, len(done.attempts)) == (state, str(phase).upper(), 1)


def test_a_job_that_somebody_cancelled_on_the_cluster_is_cancelled(client, job_file, see):
    view = client.submit(job_file(retry=NO_WAIT))
    done = see(view, Phase.CANCELLED, reason="scancel by uid 1000")
    assert (done.state, done.reason, len(done.attempts)) == ("CANCELLED", "scancel by uid 1000", 1)


def test_cancelling_what_has_ended_changes_nothing(client, backend, job_file, see):
    view = client.submit(job_file())
    see(view, Phase.SUCCEEDED)
    before = client.events(view.id)
    assert [v.state for v in client.cancel([view.id])] == ["SUCCEEDED"]
    assert client.events(view.id) == before
    assert backend.calls("cancel") == []
