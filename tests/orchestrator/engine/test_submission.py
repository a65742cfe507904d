from __future__ import annotations

from dataclasses import replace

import pytest
from fake_backend import FakeBackend

from orc.launchers.backends.base import Phase
from orc.launchers.errors import BackendError, BackendUnreachable, BundleError, SpecError
from orc.launchers.spec import load_job
from orc.orchestrator.client import Client
from orc.orchestrator.engine import delivery, orphans
from orc.orchestrator.ledger.database import LedgerError


def kinds(client, job_id):
    return [event.kind for event in client.events(job_id)]


def test_a_submitted_job_is_pending_with_its_handle(client, backend, job_file):
    loaded = job_file(tags={"team": "vision"})
    view = client.submit(loaded)
    assert view.state == "PENDING"
    assert view.attempt.native_id == f"native-orc-{view.id}-a1"
    assert (view.tags, view.source, view.backend) == ({"team": "vision"}, str(loaded.source_path), "fake")
    assert set(view.digests) == {"code", "runtime"}
    assert backend.calls("run") == [f"orc-{view.id}-a1"]
    assert kinds(client, view.id) == ["queued", "prepared", "submitting", "accepted"]


def test_the_stored_specification_makes_the_same_job(client, job_file):
    loaded = job_file(
        args={"lr": 0.1, "verbose": True, "tags": ["a", "b"]}, resources={"time": "1:30:00"}, env={"A": 1}
    )
    view = client.submit(loaded)
    assert type(loaded.spec).model_validate(dict(view.spec)) == loaded.spec


def test_a_submitted_job_is_rendered_once(client, backend, job_file, monkeypatch):
    rendered = []
    render = FakeBackend.render

    def counted(self, spec, snapshot, attempt, placement=None):
        rendered.append(attempt.marker)
        return render(self, spec, snapshot, attempt, placement)

    monkeypatch.setattr(FakeBackend, "render", counted)
    view = client.submit(job_file())
    assert rendered == [f"orc-{view.id}-a1"] == backend.calls("run")


def test_progress_is_told_step_by_step(client, job_file):
    told = []
    client.submit(job_file(), on_progress=lambda step, data: told.append((step, dict(data))))
    steps = [step for step, _ in told]
    assert steps[-2:] == ["stage", "submit"]
    assert ("scan", {"files": 2, "bytes": told[steps.index("scan")][1]["bytes"]}) in told
    assert told[steps.index("scan")][1]["bytes"] > 0


def test_a_refusal_fails_the_job_and_is_raised(client, backend, job_file):
    backend.behave(submit="refuse")
    with pytest.raises(BackendError, match="no such partition"):
        client.submit(job_file())
    (row,) = client.jobs()
    view = client.job(row.id)
    assert (view.state, view.reason, view.ended_at is not None) == ("FAILED", "no such partition", True)
    assert (view.attempt.state, view.attempt.cause) == ("FAILED", "launch")
    assert kinds(client, view.id) == ["queued", "prepared", "submitting", "failed", "job_failed"]


def test_a_ledger_that_fails_after_the_intent_names_the_job_that_runs(client, backend, job_file, monkeypatch):
    def full(*_):
        raise LedgerError("disk is full", where="ledger.db", hint="free some space")

    with monkeypatch.context() as broken:
        broken.setattr(delivery, "accept", full)
        with pytest.raises(LedgerError, match="disk is full") as caught:
            client.submit(job_file())
    (row,) = client.jobs()
    assert f"the job {row.id} is recorded" in caught.value.what
    assert caught.value.hint == f"free some space; then `orc status {row.id}`; do not submit it again"
    assert backend.calls("run") == [f"orc-{row.id}-a1"]


@pytest.mark.parametrize("step", ["stage", "submit"])
def test_an_unreachable_backend_ends_a_first_submission_so_that_it_never_starts_behind_the_users_back(
    client, backend, job_file, step
):
    backend.behave(**{step: "unreachable"})
    with pytest.raises(BackendUnreachable):
        client.submit(job_file())
    backend.behave(**{step: None})
    client.refresh()
    assert [row.state for row in client.jobs()] == ["FAILED"]
    assert backend.calls("run") == []


def test_what_preflight_finds_fails_the_job_before_anything_is_sent(client, backend, job_file):
    backend.behave(preflight="no sbatch on this machine")
    with pytest.raises(BackendError, match="no sbatch") as caught:
        client.submit(job_file())
    assert caught.value.hint == "mend it"
    (row,) = client.jobs()
    assert (row.state, row.reason) == ("FAILED", "no sbatch on this machine")
    assert backend.calls("stage") == backend.calls("submit") == []


def test_the_times_of_an_attempt_run_forward_whatever_the_clocks_say(
    client, backend, clock, job_file, monkeypatch, see
):
    submit = backend.submit

    def slow(plan, secrets):
        clock.sleep(3)
        return replace(submit(plan, secrets), submitted_at=clock.now)

    began = clock.now
    monkeypatch.setattr(backend, "submit", slow)
    view = client.submit(job_file())
    assert view.attempt.submitted_at == began  # it may have started before the cluster had answered
    see(view, Phase.RUNNING, started_at=began - 60)
    assert client.job(view.id).attempt.started_at == began
    see(view, Phase.SUCCEEDED, started_at=began - 60, ended_at=began - 50)
    assert (client.job(view.id).attempt.started_at, client.job(view.id).ended_at) == (began, began)


def test_a_job_is_in_the_ledger_before_its_cluster_is_looked_at(client, backend, job_file, monkeypatch):
    looked = []
    monkeypatch.setattr(backend, "preflight", lambda plan: looked.append(client.jobs()[0].state) or [])
    client.submit(job_file())
    assert looked == ["QUEUED"]


def test_a_missing_secret_stops_the_submission_before_anything_is_recorded(client, job_file):
    with pytest.raises(SpecError, match="WANDB_API_KEY"):
        client.submit(job_file(secrets=["WANDB_API_KEY"]))
    assert client.jobs() == []


def test_a_script_that_the_snapshot_leaves_out_stops_the_submission(client, job_file):
    loaded = job_file(workdir={"exclude": ["train.py"]})
    with pytest.raises(SpecError, match=r"'train\.py' exists but is not part of the snapshot"):
        client.submit(loaded)
    assert client.jobs() == []


def test_a_working_tree_that_cannot_be_read_stops_the_submission(client, job_file):
    loaded = job_file()
    (loaded.base_dir / "train.py").unlink()
    (loaded.base_dir / "train.py").symlink_to("/etc/passwd")
    with pytest.raises(BundleError):
        client.submit(loaded)
    assert client.jobs() == []


def test_a_defect_in_a_backend_leaves_the_question_open_and_it_is_answered_later(client, backend, job_file):
    backend.behave(submit="bug")
    with pytest.raises(KeyError):
        client.submit(job_file())
    backend.behave(submit=None)
    (row,) = client.jobs()
    assert row.state == "SUBMITTING"
    client.refresh()
    assert client.job(row.id).state == "PENDING"
    assert backend.calls("run") == [f"orc-{row.id}-a1"]


def test_a_cut_off_submission_that_arrived_is_adopted(client, backend, job_file):
    backend.behave(submit="ambiguous")
    view = client.submit(job_file())
    assert (view.state, view.attempt.state, view.reason) == ("SUBMITTING", "AMBIGUOUS", "the connection broke")
    client.refresh()
    view = client.job(view.id)
    assert (view.state, view.reason, view.attempt.native_id) == ("PENDING", "", f"native-{view.attempt.marker}")
    assert len(backend.calls("submit")) == 1
    assert kinds(client, view.id)[-2:] == ["ambiguous", "adopted"]


def test_a_cut_off_submission_that_got_lost_is_sent_again_only_after_the_visibility_window(
    orc_home, tmp_path, clock, job_file
):
    backend = FakeBackend(tmp_path / "slow", visibility_s=30.0)
    client = Client(backend_of=lambda _: backend, clock=clock, sleep=clock.sleep)
    backend.behave(submit="swallowed")
    view = client.submit(job_file())
    backend.behave(submit=None)
    for _ in range(3):
        client.refresh()
        clock.now += 9.9
    assert client.job(view.id).attempt.state == "AMBIGUOUS"
    assert len(backend.calls("submit")) == 1
    clock.now += 0.5
    client.refresh()
    view = client.job(view.id)
    assert (view.state, [a.number for a in view.attempts]) == ("PENDING", [1])
    assert backend.calls("submit") == [view.attempt.marker] * 2
    assert backend.calls("run") == [view.attempt.marker]
    assert kinds(client, view.id)[3:] == ["ambiguous", "not_found", "released", "submitting", "accepted"]
    client.close()


def test_a_cut_off_submission_is_not_sent_again_while_nobody_can_look(client, backend, clock, job_file):
    backend.behave(submit="swallowed", find="unreachable")
    view = client.submit(job_file())
    backend.behave(submit=None)
    for _ in range(5):
        clock.now += 1000
        assert client.refresh().unreachable == {"local": "no answer while looking"}
    view = client.job(view.id)
    assert view.attempt.state == "AMBIGUOUS"
    assert "no answer while looking" in view.reason
    assert len(backend.calls("submit")) == 1


def test_an_interrupt_before_the_side_effect_cancels_the_job(client, backend, job_file, monkeypatch):
    def interrupted(_snapshot, _plan):
        raise KeyboardInterrupt

    monkeypatch.setattr(backend, "stage", interrupted)
    with pytest.raises(KeyboardInterrupt):
        client.submit(job_file())
    assert [row.state for row in client.jobs()] == ["CANCELLED"]
    monkeypatch.undo()
    client.refresh()
    assert backend.calls("submit") == []


def test_an_interrupt_during_the_side_effect_cancels_whatever_arrived(client, backend, job_file, monkeypatch):
    submit = backend.submit

    def interrupted(plan, secrets):
        submit(plan, secrets)
        raise KeyboardInterrupt

    monkeypatch.setattr(backend, "submit", interrupted)
    with pytest.raises(KeyboardInterrupt):
        client.submit(job_file())
    monkeypatch.undo()
    client.refresh()
    client.refresh()
    (row,) = client.jobs()
    assert row.state == "CANCELLED"
    assert backend.calls("cancel") == [f"orc-{row.id}-a1 0"]


def test_a_resubmission_is_a_new_job_from_the_same_snapshot(client, backend, job_file):
    loaded = job_file(tags={"a": "b"})
    old = client.submit(loaded)
    (loaded.base_dir / "train.py").write_text("print('changed since')\n")
    new = client.resubmit(old.id)
    assert new.id != old.id
    assert (new.digests, new.spec, new.tags) == (old.digests, old.spec, old.tags)
    assert new.source == f"job:{old.id}"
    assert backend.calls("run") == [old.attempt.marker, new.attempt.marker]


@pytest.mark.parametrize(
    "override", ["args.epochs=1", "args.lr=0.2", "args.fast=false", "args=[all, --new]", "env.A=2"]
)
def test_a_resubmission_takes_the_overrides_of_a_submission(client, job_file, override):
    given = {"args": {"lr": 0.1, "fast": True, "sizes": [1, 2], "from": "-x"}, "env": {"A": "1"}}
    loaded = job_file(**given)
    new = client.resubmit(client.submit(loaded).id, overrides=[override])
    submitted = client.submit(load_job(loaded.source_path, [override], cluster=loaded.spec.cluster))
    assert new.spec == submitted.spec


@pytest.mark.parametrize(
    ("words", "overrides"),
    [
        (["--lr", "0.1", "data.csv"], ["args.lr=0.2"]),
        (["--lr", "0.1", "data.csv"], ["args.epochs=1", "args.lr=0.2"]),
        (["--fp16", "train.txt"], ["args.fp16=false"]),
        (["--fp16", "train.txt"], ["args.fp16=true"]),
    ],
)
def test_a_resubmission_loses_no_positional_argument(client, job_file, words, overrides):
    job = client.submit(job_file(args=words))
    with pytest.raises(SpecError, match="may be its values, or arguments of their own"):
        client.resubmit(job.id, overrides=overrides)
    assert client.resubmit(job.id, overrides=["args.epochs=1"]).spec["args"] == [*words, "--epochs", "1"]


def test_the_plan_of_an_attempt_is_recorded_by_its_digest(client, job_file):
    view = client.submit(job_file())
    data = {event.kind: event.data for event in client.events(view.id)}
    assert data["prepared"]["plan"] == data["submitting"]["plan"]
    assert len(data["prepared"]["plan"]) == 64
    assert data["prepared"]["marker"] == view.attempt.marker


@pytest.fixture
def other(orc_home, backend, clock):
    """Another process's client on the same ledger; it cannot tell that the first one is alive, only that it is late."""
    with Client(backend_of=lambda _: FakeBackend(backend.root), clock=clock, sleep=clock.sleep) as made:
        yield made


def test_whoever_was_taken_for_dead_while_staging_sends_nothing(client, other, backend, clock, job_file, monkeypatch):
    def slow_stage(_snapshot, _plan):
        clock.now += 301
        other.refresh()

    monkeypatch.setattr(backend, "stage", slow_stage)
    view = client.submit(job_file())
    assert view.state == "PENDING"
    assert backend.calls("submit") == [view.attempt.marker]


@pytest.mark.parametrize("same", [True, False])
def test_whoever_was_taken_for_dead_while_submitting_changes_nothing_but_tells_of_a_second_copy(
    client, other, backend, clock, job_file, monkeypatch, same
):
    submit = backend.submit

    def slow_submit(plan, secrets):
        handle = submit(plan, secrets)
        clock.now += 301
        other.refresh()
        return handle if same else replace(handle, native_id="second-copy")

    monkeypatch.setattr(backend, "submit", slow_submit)
    view = client.submit(job_file())
    assert (view.state, view.attempt.native_id) == ("PENDING", f"native-{view.attempt.marker}")
    assert backend.calls("run") == [view.attempt.marker]
    told = kinds(client, view.id)[2:]
    assert told == ["submitting", "ambiguous", "adopted"] + ([] if same else ["duplicate"])


def test_a_copy_that_was_sent_after_its_job_had_been_cancelled_is_told_to_end(
    client, other, backend, clock, job_file, monkeypatch
):
    submit = backend.submit

    def slow_submit(plan, secrets):
        clock.now += 301
        backend.behave(submit="unreachable")
        monkeypatch.setattr(backend, "submit", type(backend).submit.__get__(backend))
        other.refresh()
        other.cancel([plan.attempt.job])
        backend.behave(submit=None)
        return submit(plan, secrets)

    monkeypatch.setattr(backend, "submit", slow_submit)
    view = client.submit(job_file())
    assert view.state == "CANCELLED"
    assert backend.calls("cancel") == [f"{backend.calls('run')[0]} 0"]
    assert client.events(view.id)[-1].data == {"native_id": f"native-{backend.calls('run')[0]}", "cancelled": True}


@pytest.mark.parametrize("comes_after_s", [31, 870])
def test_a_copy_that_comes_after_its_job_has_ended_is_looked_for_and_told_to_end(
    client, backend, clock, job_file, comes_after_s
):
    backend.behave(submit="swallowed")
    view = client.submit(job_file())
    backend.behave(submit="unreachable")
    client.refresh()
    assert client.cancel([view.id])[0].state == "CANCELLED"
    (marker,) = {one.split()[0] for one in backend.calls("find")}
    clock.now += comes_after_s
    backend._start(marker, {})
    backend.behave(cancel="unreachable")
    assert client.refresh().unreachable == {"local": "no answer while cancelling"}
    backend.behave(cancel=None)
    clock.now += 31
    client.refresh()
    assert backend.calls("cancel") == [f"{marker} 0"]
    looks = len(backend.calls("find"))
    clock.now += 31
    client.refresh()
    assert len(backend.calls("find")) == looks, "nobody looks any more"
    assert client.job(view.id).state == "CANCELLED"


def test_a_copy_on_a_cluster_that_is_gone_for_good_is_given_up(client, backend, clock, job_file):
    backend.behave(submit="swallowed")
    view = client.submit(job_file())
    backend.behave(submit="unreachable")
    client.refresh()
    client.cancel([view.id])
    backend.behave(find="unreachable")
    clock.now += 86400
    assert client.refresh().unreachable == {"local": "no answer while looking"}
    assert orphans.next_due(client.workspace) == clock.now + orphans.LOOK_S
    clock.now += 7 * 86400
    client.refresh()
    assert orphans.next_due(client.workspace) is None, "or a reconciler would stay for ever"


def test_a_defect_while_looking_for_a_cut_off_submission_is_said_and_fails_nothing(
    client, backend, job_file, monkeypatch
):
    backend.behave(submit="ambiguous")
    view = client.submit(job_file())

    def broken(*_, **__):
        raise KeyError("a defect")

    monkeypatch.setattr(backend, "find", broken)
    assert client.refresh().unreachable == {"local": "KeyError: 'a defect'"}
    assert client.job(view.id).state == "SUBMITTING"
    monkeypatch.undo()
    client.refresh()
    assert client.job(view.id).state == "PENDING"


def test_a_stored_specification_that_this_version_cannot_read_ends_a_retry_with_the_reason(client, job_file, see):
    view = client.submit(job_file(retry={"max_attempts": 2, "on": ["crash"], "backoff": 0}))
    with client.workspace.ledger.database.write() as connection:
        connection.execute("UPDATE jobs SET spec = replace(spec, '\"launcher\"', '\"laumcher\"')")
    done = see(view, Phase.FAILED, cause="crash", passes=2)
    assert done.state == "FAILED"
    assert "does not fit this version of orc" in done.reason
    with pytest.raises(SpecError, match="does not fit this version"):
        client.resubmit(view.id)


def test_what_there_is_to_say_about_the_tree_is_passed_on(client, job_file):
    loaded = job_file()
    (loaded.base_dir / "dangling").symlink_to("nowhere")
    told = []
    client.submit(loaded, on_progress=lambda step, data: told.append((step, data)))
    findings = [data for step, data in told if step == "finding"]
    assert any("dangling" in data["what"] + data["where"] for data in findings)


def test_nobody_looks_for_a_copy_for_ever(client, backend, clock, job_file):
    backend.behave(submit="swallowed")
    view = client.submit(job_file())
    backend.behave(submit="unreachable")
    client.refresh()
    client.cancel([view.id])
    clock.now += 1000
    client.refresh()
    looks = len(backend.calls("find"))
    clock.now += 1000
    client.refresh()
    assert len(backend.calls("find")) == looks
