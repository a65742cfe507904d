"""Jobs that wait for others, sweeps, arrays and pipelines: all or none, in the right order, never more at a time."""

from __future__ import annotations

from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

from orc.launchers.errors import LaunchError, SpecError
from orc.launchers.spec.groups import load_jobs
from orc.orchestrator.clients import groups
from orc.orchestrator.ledger.database import LedgerError


@pytest.fixture
def group_file(tmp_path: Path):
    def write(text: str, *overrides: str):
        (tmp_path / "project").mkdir(exist_ok=True)
        path = tmp_path / "project" / "jobs.yaml"
        path.write_text(dedent(text))
        return load_jobs(path, overrides)

    return write


SWEEP = """
name: digits
command: train
args: {epochs: 1}
sweep: {grid: {args.lr: [1, 2], env.SEED: [3, 4]}}
"""

PIPELINE = """
name: digits
jobs:
  prepare: {command: make data}
  train: {command: make train, depends_on: prepare}
  report: {command: make report, depends_on: [train, prepare]}
  clean: {command: make clean, depends_on: 'train:failure'}
"""


def states(view: groups.GroupView) -> list[str]:
    return [member.job.state for member in view.members]


def ended(client: Any, backend: Any, job_id: str, phase: str) -> None:
    backend.set(f"orc-{job_id}-a1", phase)
    client.refresh([job_id])


# -- dependencies


@pytest.mark.parametrize(
    ("condition", "phase", "state"),
    [
        ("success", "succeeded", "PENDING"),
        ("success", "failed", "CANCELLED"),
        ("failure", "failed", "PENDING"),
        ("failure", "cancelled", "PENDING"),
        ("failure", "succeeded", "CANCELLED"),
        ("any", "failed", "PENDING"),
        ("any", "succeeded", "PENDING"),
    ],
)
def test_a_job_starts_after_the_end_that_it_waits_for(client, backend, job_file, condition, phase, state):
    first = client.submit(job_file())
    then = client.submit(job_file(depends_on=[f"{first.id}:{condition}"]))
    assert (then.state, then.reason) == ("QUEUED", f"waiting for the end of {first.id}")
    client.refresh()
    assert backend.calls("run") == [f"orc-{first.id}-a1"]
    ended(client, backend, first.id, phase)
    view = client.job(then.id)
    assert view.state == state
    if state == "CANCELLED":
        assert view.reason.startswith(f"{first.id} has {'failed' if phase == 'failed' else 'succeeded'}")
        assert backend.calls("run") == [f"orc-{first.id}-a1"]


def test_a_retry_of_the_job_that_is_waited_for_is_waited_for_too(client, backend, clock, job_file):
    first = client.submit(job_file(retry={"on": "crash", "backoff": 1}))
    then = client.submit(job_file(depends_on=first.id))
    ended(client, backend, first.id, "failed")
    assert client.job(then.id).state == "QUEUED"
    clock.sleep(5)
    client.refresh()
    backend.set(f"orc-{first.id}-a2", "succeeded")
    client.refresh([first.id])
    assert client.job(then.id).state == "PENDING"


def test_the_end_of_one_job_ends_all_that_wait_for_it_in_turn(client, backend, job_file):
    first = client.submit(job_file())
    second = client.submit(job_file(depends_on=first.id))
    third = client.submit(job_file(depends_on=second.id))
    ended(client, backend, first.id, "failed")
    assert client.job(third.id).state == "CANCELLED"
    assert second.id in client.job(third.id).reason


def test_waiting_for_a_job_drives_those_that_it_waits_for(client, backend, job_file):
    first = client.submit(job_file())
    then = client.submit(job_file(depends_on="@last"))
    backend.set(f"orc-{first.id}-a1", "succeeded")
    client.refresh([then.id])
    assert client.job(then.id).state == "PENDING"


def test_a_dependency_that_cannot_be_is_refused_and_leaves_no_job(client, backend, job_file):
    first = client.submit(job_file())
    ended(client, backend, first.id, "failed")
    for wanted, said in [
        (first.id, f"{first.id} has failed, and this job runs only after it has succeeded"),
        (first.id[:-1] + "0", f"did you mean {first.id}"),
        ("nothing-like-that", "no such job"),
    ]:
        with pytest.raises(SpecError) as caught:
            client.submit(job_file(depends_on=wanted))
        assert said in str(caught.value)
    with pytest.raises(SpecError) as caught:
        client.submit(job_file(inputs={"weights": "nothing-like-that.model"}))
    assert caught.value.where == "inputs.weights"
    assert len(client.jobs()) == 1


def test_a_job_that_waits_is_cancelled_and_never_sent(client, backend, job_file):
    first = client.submit(job_file())
    then = client.submit(job_file(depends_on=first.id))
    assert client.cancel([then.id])[0].state == "CANCELLED"
    ended(client, backend, first.id, "succeeded")
    assert len(backend.calls("run")) == 1


# -- sweeps and arrays


def test_the_members_of_a_sweep_are_jobs_that_run_from_one_snapshot(client, backend, group_file):
    view = groups.submit(client.session, group_file(SWEEP))
    assert states(view) == ["PENDING"] * 4
    assert [dict(member.parameters) for member in view.members][1] == {"args.lr": "1", "env.SEED": "4"}
    jobs = [client.job(member.job.id) for member in view.members]
    assert [job.spec["args"] for job in jobs] == [["--epochs", "1", "--lr", n] for n in "1122"]
    assert len({job.digests["code"] for job in jobs}) == 1
    assert jobs[2].spec["env"] == {
        "SEED": "3",
        "ORC_ARRAY_TASK_ID": "2",
        "ORC_ARRAY_TASK_COUNT": "4",
        "ORC_ARRAY_TASK_MIN": "0",
        "ORC_ARRAY_TASK_MAX": "3",
        "ORC_ARRAY_JOB_ID": view.id,
    }
    assert [row.id for row in client.jobs(tags={"args.lr": "2"}, group=view.id)] != []


def test_no_more_members_are_under_way_than_is_said(client, backend, group_file):
    view = groups.submit(client.session, group_file(SWEEP, "max_parallel=2"))
    started: list[str] = []
    for _ in range(4):
        view = groups.view(client.workspace, view.id)
        live = [member.job.id for member in view.members if member.job.state == "PENDING"]
        assert len(live) <= 2
        assert all(
            m.job.reason == f"waiting for its turn in {view.id}" for m in view.members if m.job.state == "QUEUED"
        )
        started += [job for job in live if job not in started]
        ended(client, backend, live[0], "succeeded")
    assert len(started) == 4
    assert started == [member.job.id for member in view.members]


def test_a_sweep_is_stored_whole_or_not_at_all(client, backend, group_file, monkeypatch):
    loaded = group_file(SWEEP)

    def fail(*_: object) -> None:
        raise LedgerError("disk full")

    monkeypatch.setattr("orc.orchestrator.ledger.groups.add_dependencies", fail)  # the last that is written
    with pytest.raises(LedgerError):
        groups.submit(client.session, loaded)
    monkeypatch.undo()
    assert client.jobs() == []
    assert groups.newest(client.workspace, ("sweep",), 9) == []


def test_members_that_failed_are_submitted_again_in_their_places(client, backend, clock, group_file):
    view = groups.submit(client.session, group_file(SWEEP))
    for number, phase in enumerate(["succeeded", "failed", "cancelled", "succeeded"]):
        ended(client, backend, view.members[number].job.id, phase)
    clock.sleep(60)
    again = groups.resubmit(client.session, view.id)
    assert states(again) == ["SUCCEEDED", "PENDING", "PENDING", "SUCCEEDED"]
    assert [member.submissions for member in again.members] == [1, 2, 2, 1]
    assert client.job(again.members[1].job.id).spec["args"] == client.job(view.members[1].job.id).spec["args"]
    assert states(groups.cancel(client.session, view.id)) != states(again)


def test_what_has_not_failed_is_not_submitted_again(client, backend, group_file):
    view = groups.submit(client.session, group_file(SWEEP))
    with pytest.raises(LaunchError, match=r"no member of .* has failed"):
        groups.resubmit(client.session, view.id)


# -- pipelines


def test_the_jobs_of_a_pipeline_run_in_their_order(client, backend, group_file):
    view = groups.submit(client.session, group_file(PIPELINE))
    prepare, train, report, _ = (member.job.id for member in view.members)
    assert states(view) == ["PENDING", "QUEUED", "QUEUED", "QUEUED"]
    ended(client, backend, prepare, "succeeded")
    ended(client, backend, train, "succeeded")
    ended(client, backend, report, "succeeded")
    assert states(groups.view(client.workspace, view.id)) == ["SUCCEEDED", "SUCCEEDED", "SUCCEEDED", "CANCELLED"]
    assert backend.calls("run") == [f"orc-{job}-a1" for job in (prepare, train, report)]


def test_a_pipeline_that_failed_goes_on_where_it_was(client, backend, clock, group_file):
    view = groups.submit(client.session, group_file(PIPELINE))
    prepare, train, _, clean = (member.job.id for member in view.members)
    ended(client, backend, prepare, "succeeded")
    ended(client, backend, train, "failed")
    ended(client, backend, clean, "succeeded")
    failed = groups.view(client.workspace, view.id)
    assert states(failed) == ["SUCCEEDED", "FAILED", "CANCELLED", "SUCCEEDED"]
    assert failed.members[2].job.reason.startswith(f"{train} has failed")
    clock.sleep(60)
    again = groups.resubmit(client.session, view.id)
    assert states(again) == ["SUCCEEDED", "PENDING", "QUEUED", "SUCCEEDED"]
    ended(client, backend, again.members[1].job.id, "succeeded")
    assert states(groups.view(client.workspace, view.id)) == ["SUCCEEDED", "SUCCEEDED", "PENDING", "SUCCEEDED"]


def test_a_pipeline_with_a_job_that_can_never_be_sent_leaves_nothing(client, backend, group_file):
    with pytest.raises(LaunchError):
        groups.submit(
            client.session, group_file(PIPELINE.replace("make report", "make report, secrets: [NOT_SET_ANYWHERE]"))
        )
    assert client.jobs() == []


def test_artefacts_need_clusters_that_can_pass_them_on(client, backend, group_file):
    text = PIPELINE.replace("make data", "make data, outputs: {data: x}")
    with pytest.raises(SpecError, match="cannot be passed on by orc"):
        groups.submit(client.session, group_file(text))
    assert client.jobs() == []


def test_an_output_that_the_other_job_does_not_have_is_refused(client, backend, job_file, monkeypatch):
    monkeypatch.setattr(type(backend), "passes_artefacts", True)
    first = client.submit(job_file(outputs={"model": "ckpt"}))
    with pytest.raises(SpecError, match="has no output 'modle', did you mean 'model'"):
        client.submit(job_file(inputs={"m": f"{first.id}.modle"}))


def test_a_specification_of_several_jobs_is_no_single_job_either(client, backend, job_file):
    from orc.orchestrator.engine import job_source, steps
    from orc.orchestrator.engine.submission import new_submission, submit

    loaded, ws = job_file(array=3), client.workspace
    snapshot = job_source.take(ws.store, loaded, steps.silent, backend)
    with pytest.raises(SpecError, match="describes several jobs"):
        submit(ws, [new_submission(ws, loaded.spec, snapshot, source="")])
    assert client.jobs() == []


def test_what_a_job_takes_is_stored_by_the_full_id_however_it_was_named(client, backend, clock, job_file):
    backend.passes_artefacts = True

    def submit(**keys):
        clock.now += 1  # `@last` goes by the time
        return client.submit(job_file(**keys))

    for named in ("its id but for a letter", "@last"):
        source = submit(outputs={"model": "model.txt"})
        name = "@last" if named == "@last" else source.id[:-1]
        taking = submit(inputs={"data": f"{name}.model"})
        assert client.job(taking.id).spec["inputs"] == {"data": f"{source.id}.model"}
        submit(outputs={"model": "model.txt"})
        assert client.resubmit(taking.id).spec["inputs"] == {"data": f"{source.id}.model"}
        clock.now += 1
        newest = submit(outputs={"model": "model.txt"})
        changed = client.resubmit(taking.id, overrides=["inputs.data='@last.model'"])
        assert changed.spec["inputs"] == {"data": f"{newest.id}.model"}
