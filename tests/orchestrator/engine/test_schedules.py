"""A scheduled job is submitted once each time it is due, whoever looks, and missed times are treated as was said."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from orc.launchers.errors import LaunchError, SpecError
from orc.orchestrator.client import Client
from orc.orchestrator.engine import job_source, schedules, steps
from orc.orchestrator.engine.cleanup import snapshot_needs
from orc.orchestrator.engine.submission import new_submission

MINUTE = 60.0


@pytest.fixture
def schedule(client, backend, job_file):
    def create(cron: str = "* * * * *", **options: Any):
        ws, loaded = client.workspace, job_file(**options.pop("keys", {}))
        snapshot = job_source.take(ws.store, loaded, steps.silent, backend)
        options = {"name": "nightly", "cron": cron, "timezone": "UTC", **options}
        return schedules.create(ws, new_submission(ws, loaded.spec, snapshot, source=""), **options)

    return create


def to(clock: Any, moment: float) -> None:
    clock.sleep(moment - clock())


def test_a_job_is_submitted_each_time_it_is_due(client, backend, clock, schedule):
    made = schedule(keys={"tags": {"team": "vision"}})
    client.refresh()
    assert client.jobs() == []
    for count in (1, 2):
        to(clock, schedules.next_due(client.workspace))
        client.refresh()
        client.refresh()
        rows = client.jobs(group=made.id)
        assert len(rows) == count
        backend.set(f"orc-{rows[0].id}-a1", "succeeded")
        client.refresh()
    job = client.job(rows[0].id)
    assert (job.source, job.spec["tags"], job.state) == (f"schedule:{made.id}", {"team": "vision"}, "SUCCEEDED")
    assert schedules.resolve(client.workspace, "nightly").last_job == job.id


@pytest.mark.parametrize(("overlap", "count"), [("skip", 1), ("allow", 2)])
def test_a_time_at_which_the_last_job_still_runs(client, clock, schedule, overlap, count):
    made = schedule(overlap=overlap)
    for _ in range(2):
        to(clock, schedules.next_due(client.workspace))
        client.refresh()
    assert len(client.jobs(group=made.id)) == count


@pytest.mark.parametrize(("missed", "count"), [("skip", 0), ("run_once", 1)])
def test_times_that_nobody_has_seen(client, clock, schedule, missed, count):
    made = schedule("0 3 * * *", missed=missed)
    clock.sleep(5 * 86400 + (schedules.next_due(client.workspace) - clock()) + 3600)
    client.refresh()
    client.refresh()
    assert len(client.jobs(group=made.id)) == count
    assert 0 < schedules.next_due(client.workspace) - clock() <= 86400
    to(clock, schedules.next_due(client.workspace) + 1)
    client.refresh()
    assert len(client.jobs(group=made.id)) == (count if missed == "run_once" else 1)  # the last one still runs there


def test_two_reconcilers_submit_one_job(orc_home, client, backend, clock, schedule):
    made = schedule()
    to(clock, schedules.next_due(client.workspace))
    barrier, fired = threading.Barrier(4), []

    def race() -> None:
        with Client(backend_of=lambda _: backend, clock=clock, sleep=clock.sleep) as other:
            barrier.wait()
            fired.extend(schedules.fire_due(other.workspace))

    threads = [threading.Thread(target=race) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(fired) == 1
    assert [row.id for row in client.jobs(group=made.id)] == fired


def test_a_schedule_that_is_paused_makes_up_for_nothing(client, clock, schedule):
    made = schedule(missed="run_once")
    schedules.change(client.workspace, made.id, enabled=False)
    assert schedules.next_due(client.workspace) is None
    clock.sleep(10 * MINUTE)
    client.refresh()
    schedules.change(client.workspace, made.id, enabled=True)
    client.refresh()
    assert client.jobs() == []
    to(clock, schedules.next_due(client.workspace))
    client.refresh()
    assert len(client.jobs()) == 1


def test_the_snapshot_and_the_secrets_of_a_schedule_are_kept_until_it_is_deleted(
    client, backend, clock, schedule, monkeypatch
):
    monkeypatch.setenv("TOKEN_OF_MINE", "value")
    made = schedule(keys={"secrets": ["TOKEN_OF_MINE"]})
    monkeypatch.delenv("TOKEN_OF_MINE")
    assert set(made.digests.values()) <= snapshot_needs(client.workspace.ledger).digests
    to(clock, schedules.next_due(client.workspace))
    client.refresh()
    (row,) = client.jobs()
    assert row.state == "PENDING"
    schedules.remove(client.workspace, made.id)
    assert not (client.workspace.state_dir / "job-secrets" / f"{made.id}.json").exists()
    clock.sleep(MINUTE)
    client.refresh()
    assert len(client.jobs()) == 1


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"cron": "every day"}, "is no cron expression"),
        ({"timezone": "Mars/Olympus"}, "unknown time zone"),
        ({"keys": {"secrets": ["NOT_SET_ANYWHERE"]}}, "NOT_SET_ANYWHERE"),
    ],
)
def test_what_can_never_run_is_refused(client, schedule, options, said):
    with pytest.raises(LaunchError, match=said):
        schedule(**options)
    assert schedules.next_due(client.workspace) is None


def test_a_name_is_given_once(schedule):
    schedule()
    with pytest.raises(SpecError, match="there is a schedule 'nightly' already"):
        schedule()
