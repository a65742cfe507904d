"""A job ends at its deadline, wherever it is then; and an attempt that is gone may come back before it is LOST."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from orc.launchers.backends.base import Phase
from orc.launchers.errors import SpecError
from orc.launchers.spec.clusters import Limits

RETRY = {"max_attempts": 2, "on": ["crash", "node_failure"], "backoff": 500}


def passed(clock) -> str:
    return f"its deadline has passed ({datetime.fromtimestamp(clock.now, UTC):%Y-%m-%d %H:%M:%S} UTC)"


def test_a_running_job_is_cancelled_at_its_deadline_with_its_grace(client, backend, clock, job_file):
    view = client.submit(job_file(deadline="1h", grace=7))
    backend.set(view.attempt.marker, Phase.RUNNING)
    clock.now += 3599
    client.refresh()
    assert client.job(view.id).state == "RUNNING"
    clock.now += 1
    said = passed(clock)
    client.refresh()
    client.refresh()
    assert backend.calls("cancel") == [f"{view.attempt.marker} 7"]
    assert (client.job(view.id).state, client.job(view.id).reason) == ("CANCELLED", said)


def test_a_queued_job_is_cancelled_at_its_deadline_and_never_sent(client, backend, clock, job_file):
    backend.cluster = backend.cluster.model_copy(update={"limits": Limits(max_jobs=1)})
    client.submit(job_file())
    view = client.submit(job_file(deadline=60))
    assert view.state == "QUEUED"
    clock.now += 60
    said = passed(clock)
    client.refresh()
    assert client.job(view.id).state == "CANCELLED"
    assert client.job(view.id).reason == f"{said}; cancelled before it was submitted"
    assert len(backend.calls("submit")) == 1


def test_a_job_that_waits_for_its_next_attempt_gets_none_after_its_deadline(client, clock, job_file, see):
    view = client.submit(job_file(deadline=100, retry=RETRY))
    see(view, Phase.FAILED, cause="crash", reason="boom")
    clock.now += 100
    client.refresh()
    assert (client.job(view.id).state, len(client.job(view.id).attempts)) == ("CANCELLED", 1)


def test_a_job_that_is_done_in_time_and_one_that_a_person_cancelled_say_so(client, backend, clock, job_file):
    done, cancelled = client.submit(job_file(deadline=100)), client.submit(job_file(deadline=100))
    backend.set(done.attempt.marker, Phase.SUCCEEDED)
    client.cancel([cancelled.id])
    clock.now += 200
    client.refresh()
    assert client.job(done.id).state == "SUCCEEDED"
    assert (client.job(cancelled.id).state, client.job(cancelled.id).reason) == ("CANCELLED", "on request")


def test_a_deadline_that_has_passed_is_refused(client, backend, job_file):
    with pytest.raises(SpecError, match="has passed already"):
        client.submit(job_file(deadline="2001-01-01T00:00Z"))
    assert client.jobs() == []


# -- LOST


@pytest.fixture
def patient(backend):
    backend.lost_after_s = 120.0
    return backend


def test_an_attempt_that_is_gone_may_come_back_before_it_is_lost(client, patient, clock, job_file):
    view = client.submit(job_file(retry=RETRY))
    patient.set(view.attempt.marker, Phase.RUNNING)
    client.refresh()
    patient.set(view.attempt.marker, Phase.LOST, reason="nobody knows it")
    for _ in range(5):
        client.refresh()
        clock.now += 20
    gone = client.job(view.id)
    assert (gone.state, gone.attempt.state) == ("RUNNING", "RUNNING")
    assert gone.reason == "it is gone (nobody knows it); LOST unless it comes back within 120 s"
    patient.set(view.attempt.marker, Phase.RUNNING, reason="")
    client.refresh()
    assert (client.job(view.id).reason, len(client.job(view.id).attempts)) == ("", 1)
    patient.set(view.attempt.marker, Phase.LOST, reason="nobody knows it")
    clock.now += 1000
    client.refresh()  # the time begins anew
    assert client.job(view.id).state == "RUNNING"
    patient.set(view.attempt.marker, Phase.SUCCEEDED)
    client.refresh()
    assert client.job(view.id).state == "SUCCEEDED"


def test_an_attempt_that_stays_away_is_lost_when_the_time_is_over(client, patient, clock, job_file):
    view = client.submit(job_file(retry=RETRY))
    patient.set(view.attempt.marker, Phase.LOST, reason="nobody knows it")
    client.refresh()
    clock.now += 119
    client.refresh()
    assert client.job(view.id).attempt.state == "PENDING"
    assert patient.calls("reap") == []
    clock.now += 1
    client.refresh()
    assert (client.job(view.id).state, client.job(view.id).attempt.state) == ("QUEUED", "LOST")
    assert patient.calls("reap") == [view.attempt.marker]


@pytest.mark.parametrize(("given", "window_s"), [(None, 120.0), (5, 5.0), (0, 0.0)])
def test_the_cluster_says_for_how_long(patient, given, window_s):
    patient.cluster = patient.cluster.model_copy(update={"lost_after": given})
    assert patient.loss_window_s == window_s


def test_a_job_that_is_being_cancelled_need_not_come_back(client, patient, clock, job_file):
    view = client.submit(job_file())
    patient.behave(cancel="unreachable")
    client.cancel([view.id])
    patient.behave(cancel=None)
    patient.set(view.attempt.marker, Phase.LOST, reason="nobody knows it")
    client.refresh()
    assert client.job(view.id).attempt.state in ("LOST", "CANCELLED")
