"""Jobs that are submitted as one array are as durable, and as sure to run once, as any other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from fake_backend import FakeBackend

from orc.launchers.backends.base import Handle
from orc.launchers.errors import BackendError, BackendUnreachable
from orc.launchers.plan import Plan
from orc.launchers.spec.groups import load_jobs
from orc.orchestrator.client import Client
from orc.orchestrator.clients import cancelling, groups
from orc.orchestrator.engine import array_submission, snapshots, submission


class FakeArrays(FakeBackend):
    limit: int | None = None

    def submit_array(
        self, plans: Sequence[Plan], secrets: Mapping[str, str], *, at_once: int | None = None
    ) -> list[Handle]:
        self.limit = at_once
        return [self.submit(plan, secrets) for plan in plans]


@pytest.fixture
def backend(tmp_path: Path) -> FakeArrays:
    return FakeArrays(tmp_path / "fake")


def start(client: Client, backend: FakeArrays, loaded: Any, count: int = 3) -> list[Any]:
    ws = client.workspace
    snapshot = snapshots.take(ws.store, loaded, submission.silent, backend)
    return array_submission.start_array(ws, [loaded.spec] * count, snapshot, source="array", at_once=2)


def test_each_element_is_a_job_with_its_own_handle(client, backend, job_file):
    records = start(client, backend, job_file(), count=8)
    assert backend.limit == 2
    assert [record.state for record in records] == ["PENDING"] * 8
    assert backend.calls("run") == [f"orc-{record.id}-a1" for record in records]  # in the order of the specifications
    assert len(backend.calls("stage")) == 1
    kinds = [event.kind for event in client.events(records[0].id)]
    assert kinds == ["queued", "prepared", "submitting", "accepted"]


@pytest.mark.parametrize("how", ["refuse", "unreachable"])
def test_an_array_that_was_certainly_not_submitted_never_runs(client, backend, job_file, how):
    backend.behave(submit=how)
    with pytest.raises((BackendError, BackendUnreachable)):
        start(client, backend, job_file())
    assert [row.state for row in client.jobs()] == ["FAILED"] * 3
    backend.behave(submit=None)
    client.refresh()
    assert backend.calls("run") == []


def test_an_ambiguous_array_is_looked_for_element_by_element(client, backend, job_file):
    backend.behave(submit="ambiguous")  # the first was accepted, the answer was lost
    records = start(client, backend, job_file())
    assert [client.job(record.id).attempt.state for record in records] == ["AMBIGUOUS"] * 3
    backend.behave(submit=None)
    client.refresh()
    assert [client.job(record.id).state for record in records] == ["PENDING"] * 3
    assert sorted(backend.calls("run")) == sorted(f"orc-{record.id}-a1" for record in records)


def test_an_interrupted_array_is_cancelled(client, backend, job_file, monkeypatch):
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(backend, "stage", interrupt)
    with pytest.raises(KeyboardInterrupt):
        start(client, backend, job_file())
    assert [row.state for row in client.jobs()] == ["CANCELLED"] * 3


def test_an_element_that_is_cancelled_before_the_submission_is_not_part_of_it(client, backend, job_file, monkeypatch):
    stage = backend.stage

    def cancel_one(*given: object) -> None:
        stage(*given)
        cancelling.request(client.session, client.jobs()[0].id, 0.0)

    monkeypatch.setattr(backend, "stage", cancel_one)
    start(client, backend, job_file())
    assert sorted(row.state for row in client.jobs()) == ["CANCELLED", "PENDING", "PENDING"]
    assert len(backend.calls("run")) == 2


def test_a_sweep_becomes_one_array_whose_members_are_jobs_of_a_group(client, backend, job_file):
    path = job_file(sweep={"grid": {"args.lr": [1, 2, 3]}}, max_parallel=2).source_path
    view = groups.submit(client.session, load_jobs(path))
    assert backend.limit == 2
    assert [member.job.state for member in view.members] == ["PENDING"] * 3
    jobs = [client.job(member.job.id) for member in view.members]
    assert [(job.group_id, job.group_index, job.spec["args"][-1]) for job in jobs] == [
        (view.id, number, str(number + 1)) for number in range(3)
    ]
    assert len(backend.calls("stage")) == 1


def test_members_that_ask_for_different_things_are_sent_one_by_one(client, backend, job_file):
    path = job_file(sweep={"grid": {"resources.cpus_per_proc": [1, 2]}}).source_path
    view = groups.submit(client.session, load_jobs(path))
    assert [member.job.state for member in view.members] == ["PENDING"] * 2
    assert len(backend.calls("stage")) == 2
