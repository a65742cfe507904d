"""A run that a newer one has replaced commits nothing."""

import json

import pytest

from orc.runtime.checkpoint.errors import CheckpointError
from orc.runtime.checkpoint.state.ownership import refuse_superseded


@pytest.fixture
def job(tmp_path, monkeypatch):
    """The directory of a job whose second restart of the first attempt this process is."""
    for name, value in {"JOB_DIR": tmp_path, "ATTEMPT": 1, "RESTART": 2}.items():
        monkeypatch.setenv(f"ORC_{name}", str(value))
    return tmp_path


@pytest.mark.parametrize("newer", [{"attempt": 1, "restart": 3}, {"attempt": 2, "restart": 0}])
def test_a_newer_run_that_owns_the_job_keeps_an_older_one_from_committing(job, make_run, newer):
    run = make_run(job / "project").run()
    run.accelerator.save_state()
    (job / "fence.json").write_text(json.dumps({**newer, "host": "node2"}))
    with pytest.raises(CheckpointError, match=f"attempt {newer['attempt']}, restart {newer['restart']} on node2 owns"):
        run.accelerator.save_state()
    committed = [
        path.parent.name for path in (job / "project").rglob("manifest.json") if ".tmp" not in path.parent.name
    ]
    assert committed == ["checkpoint_0"]


@pytest.mark.parametrize("text", ['{"attempt": 1, "restart": 2}', '{"attempt": 1, "restart": 1}', "", None])
def test_the_newest_run_commits(job, make_run, text):
    if text is not None:
        (job / "fence.json").write_text(text)
    run = make_run(job / "project").run()
    run.accelerator.save_state()


@pytest.mark.parametrize("attempt", [0, 2])
@pytest.mark.parametrize("owner", [{}, {"host": "node2"}, {"attempt": 0}, {"restart": 0}, {"attempt": 1, "restart": 9}])
def test_an_owner_that_does_not_say_which_run_it_is_is_the_first(tmp_path, attempt, owner):
    (tmp_path / "fence.json").write_text(json.dumps(owner))
    env = {"ORC_JOB_DIR": str(tmp_path), "ORC_ATTEMPT": str(attempt)}
    if owner.get("attempt", 0) <= attempt:
        refuse_superseded(env)
    else:
        with pytest.raises(CheckpointError):
            refuse_superseded(env)


def test_who_owns_the_job_is_told_with_both_runs_and_the_file(job):
    (job / "fence.json").write_text(json.dumps({"attempt": 2, "restart": 3, "host": "node2"}))
    with pytest.raises(CheckpointError) as told:
        refuse_superseded()
    assert str(told.value) == (
        f"attempt 2, restart 3 on node2 owns the job now ({job}/fence.json); this is attempt 1, restart 2, and its "
        "checkpoint is not committed"
    )
    refuse_superseded({})  # outside of a job
