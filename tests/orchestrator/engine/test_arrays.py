"""Jobs that are submitted as one array are as durable, and as sure to run once, as any other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fake_backend import FakeBackend

from orc.launchers.backends.base import Handle, Phase
from orc.launchers.errors import BackendError, BackendUnreachable
from orc.launchers.plan import Plan
from orc.launchers.spec.groups import load_jobs
from orc.orchestrator.client import Client
from orc.orchestrator.clients import ending, groups
from orc.orchestrator.engine import dispatch, job_source, steps
from orc.orchestrator.engine.submission import Submission, enqueue, new_submission, submit_group
from orc.orchestrator.ledger.groups import GroupRecord
from orc.orchestrator.ledger.groups import create as create_group
from orc.orchestrator.ledger.leases import new_owner
from orc.orchestrator.views import JobView


class FakeArrays(FakeBackend):
    limit: int | None = None
    most: int | None = None

    def most_elements(self) -> int | None:
        return self.most

    @property
    def arrays(self) -> list[int]:
        """Sizes of the arrays that were submitted."""
        return [int(size) for size in self.calls("submit_array")]

    def submit_array(
        self, plans: Sequence[Plan], secrets: Mapping[str, str], *, at_once: int | None = None
    ) -> list[Handle]:
        self.limit = at_once
        self._called("submit_array", str(len(plans)))
        return [self.submit(plan, secrets) for plan in plans]


@pytest.fixture
def backend(tmp_path: Path) -> FakeArrays:
    return FakeArrays(tmp_path / "fake")


def members(
    client: Client, backend: FakeArrays, loaded: Any, count: int, limit: int | None = 2
) -> tuple[list[Submission], GroupRecord]:
    ws = client.workspace
    snapshot = job_source.take(ws.store, loaded, steps.silent, backend)
    group = GroupRecord("array-aaaaaa", "array", "array", ws.user, ws.clock(), max_parallel=limit)
    each = [new_submission(ws, loaded.spec, snapshot, source="array") for _ in range(count)]
    return [replace(one, group=group.id, number=number) for number, one in enumerate(each)], group


def start(client: Client, backend: FakeArrays, loaded: Any, count: int = 3) -> list[JobView]:
    return [client.job(job_id) for job_id in submit_group(client.workspace, *members(client, backend, loaded, count))]


def enqueued(client: Client, backend: FakeArrays, loaded: Any, count: int = 3, limit: int | None = 2) -> list[str]:
    """Leave the members of an array behind as a submission does that is killed when they are durable."""
    new, group = members(client, backend, loaded, count, limit)
    return [job.id for job in enqueue(client.workspace, new, within=lambda tx: create_group(tx.connection, group))]


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


def test_an_ambiguous_array_is_looked_for_element_by_element_and_keeps_its_limit(client, backend, job_file):
    backend.behave(submit="ambiguous")  # the first was accepted, the answer was lost
    records = start(client, backend, job_file())
    assert [client.job(record.id).attempt.state for record in records] == ["AMBIGUOUS"] * 3
    backend.behave(submit=None)
    for _ in range(2):
        client.refresh()
        states = [client.job(record.id).state for record in records]
        assert sorted(states) == ["PENDING", "PENDING", "PREPARED"]
    assert client.job(records[states.index("PREPARED")].id).reason == "waiting for its turn in array-aaaaaa"
    backend.set(f"orc-{records[0].id}-a1", Phase.SUCCEEDED)
    client.refresh()
    client.refresh()
    assert [client.job(record.id).state for record in records] == ["SUCCEEDED", "PENDING", "PENDING"]
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
        ending.request(client.session, client.jobs()[0].id, 0.0)

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


def test_a_pass_sends_what_its_submission_has_left_behind_as_one_array(client, backend, job_file):
    ids = enqueued(client, backend, job_file())
    client.refresh([ids[0]])
    assert (backend.arrays, backend.limit) == ([3], 2)
    assert [client.job(job_id).state for job_id in ids] == ["PENDING"] * 3
    assert len(backend.calls("stage")) == 1


@pytest.mark.parametrize("how", ["unreachable", "refuse"])
def test_a_pass_tries_an_array_again_that_cannot_be_sent_now_and_gives_one_up_that_is_refused(
    client, backend, job_file, how
):
    ids = enqueued(client, backend, job_file())
    backend.behave(submit=how)
    client.refresh()
    assert {client.job(job_id).state for job_id in ids} == {"PREPARED" if how == "unreachable" else "FAILED"}
    backend.behave(submit=None)
    client.refresh()
    assert {client.job(job_id).state for job_id in ids} == {"PENDING" if how == "unreachable" else "FAILED"}
    assert (backend.arrays, backend.limit) == ([3, 3] if how == "unreachable" else [3], 2)


def test_more_than_an_array_takes_become_several_of_which_one_may_be_refused(client, backend, job_file, monkeypatch):
    monkeypatch.setattr(dispatch, "_SMALL", 1)
    backend.most = 3
    path = job_file(sweep={"grid": {"args.lr": list(range(7))}}).source_path
    view = groups.submit(client.session, load_jobs(path))
    assert backend.arrays == [3, 3]
    assert [member.job.state for member in view.members] == ["PENDING"] * 7
    assert len(set(backend.calls("run"))) == len(backend.calls("run")) == 7
    submit_array = backend.submit_array

    def refuse_the_second(*given: Any, **named: Any) -> list[Handle]:
        if backend.arrays[2:]:
            raise BackendError("too many jobs")
        return submit_array(*given, **named)

    monkeypatch.setattr(backend, "submit_array", refuse_the_second)
    view = groups.submit(client.session, load_jobs(path))
    assert [member.job.state for member in view.members] == ["PENDING"] * 3 + ["FAILED"] * 3 + ["PENDING"]


def test_arrays_stay_arrays_when_a_pass_is_killed_between_them(client, backend, job_file, monkeypatch):
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(dispatch, "_SMALL", 1)
    backend.most = 2
    ids = enqueued(client, backend, job_file(), count=5, limit=None)
    with monkeypatch.context() as killed:
        killed.setattr(backend, "stage", interrupt)
        with pytest.raises(KeyboardInterrupt):
            client.refresh()
    assert sorted(client.job(job_id).state for job_id in ids) == ["PREPARED"] * 2 + ["QUEUED"] * 3
    client.refresh()
    assert [client.job(job_id).state for job_id in ids] == ["PENDING"] * 5
    assert sorted(backend.arrays) == [2, 2]


def test_more_than_an_array_takes_keep_their_limit_one_by_one(client, backend, job_file, monkeypatch):
    monkeypatch.setattr(dispatch, "_SMALL", 1)
    backend.most = 3
    path = job_file(sweep={"grid": {"args.lr": list(range(4))}}, max_parallel=2).source_path
    view = groups.submit(client.session, load_jobs(path))
    assert backend.arrays == []
    assert [member.job.state for member in view.members] == ["PENDING"] * 2 + ["QUEUED"] * 2


def test_while_something_of_its_group_is_under_way_no_second_array_is_sent(client, backend, clock, job_file):
    path = job_file(sweep={"grid": {"args.lr": [1, 2, 3, 4]}}, max_parallel=2).source_path
    view = groups.submit(client, load_jobs(path))
    jobs = [member.job.id for member in view.members]
    for job_id in jobs[:2]:
        backend.set(f"orc-{job_id}-a1", Phase.FAILED, cause="crash")
    backend.set(f"orc-{jobs[2]}-a1", Phase.SUCCEEDED)
    client.refresh()
    clock.sleep(60)
    again = groups.resubmit(client, view.id)
    assert backend.arrays == [4]
    assert sorted(str(member.job.state) for member in again.members) == ["PENDING", "PENDING", "QUEUED", "SUCCEEDED"]


def test_a_member_that_another_process_has_keeps_the_others_from_being_an_array(client, backend, job_file):
    ids = enqueued(client, backend, job_file())
    ledger = client.workspace.ledger
    assert ledger.claim([ids[0]], new_owner())
    client.refresh()
    assert (backend.arrays, backend.limit) == ([], None)
    assert [client.job(job_id).state for job_id in ids] == ["QUEUED", "PENDING", "PENDING"]


def test_calls_of_a_function_are_one_array_that_keeps_their_limit(client, backend):
    calls = client.map_functions(abs, [1, 2, 3], at_once=2)
    assert (backend.arrays, backend.limit) == ([3], 2)
    assert [call.view.state for call in calls] == ["PENDING"] * 3
    assert client.function_jobs(calls[0].view.tags["map"])[2].id == calls[2].id
