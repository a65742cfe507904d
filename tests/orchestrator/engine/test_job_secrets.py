from __future__ import annotations

import os
import stat
from contextlib import contextmanager

import pytest

from orc.launchers.backends.base import Phase
from orc.launchers.errors import LaunchError, SpecError
from orc.orchestrator.engine import job_secrets
from orc.orchestrator.ledger.database import LedgerError

RETRY = {"max_attempts": 2, "on": ["crash"], "backoff": 0}


@pytest.fixture
def kept(orc_home):
    return orc_home / "state" / "job-secrets"


def test_secrets_are_kept_private_while_the_job_lives_and_forgotten_when_it_ends(
    client, job_file, kept, monkeypatch, see
):
    monkeypatch.setenv("TOKEN", "hunter2")
    view = client.submit(job_file(secrets=["TOKEN"]))
    (file,) = kept.iterdir()
    assert (file.name, stat.S_IMODE(file.stat().st_mode)) == (f"{view.id}.json", 0o600)
    assert stat.S_IMODE(kept.stat().st_mode) == 0o700
    see(view, Phase.SUCCEEDED)
    assert list(kept.iterdir()) == []


def test_a_retry_gets_the_secrets_without_the_users_environment(client, backend, job_file, monkeypatch, see):
    monkeypatch.setenv("TOKEN", "hunter2")
    view = client.submit(job_file(secrets=["TOKEN"], retry=RETRY))
    monkeypatch.delenv("TOKEN")
    see(view, Phase.FAILED, cause="crash", passes=2)
    assert client.job(view.id).state == "PENDING"
    assert '"TOKEN": "hunter2"' in (backend.root / "jobs" / f"orc-{view.id}-a2.json").read_text()


def test_a_retry_without_its_secrets_ends_the_job_and_names_them(client, job_file, kept, monkeypatch, see):
    monkeypatch.setenv("TOKEN", "hunter2")
    view = client.submit(job_file(secrets=["TOKEN"], retry=RETRY))
    monkeypatch.delenv("TOKEN")
    (kept / f"{view.id}.json").unlink()
    done = see(view, Phase.FAILED, cause="crash", passes=2)
    assert done.state == "FAILED"
    assert "TOKEN" in done.reason


def test_no_secret_value_reaches_the_ledger(client, backend, job_file, orc_home, monkeypatch, see):
    """Not even when a rank prints it in its traceback, or a backend repeats it in an error."""
    monkeypatch.setenv("TOKEN", "hunter2-secret")
    view = client.submit(job_file(secrets=["TOKEN"]))
    see(view, Phase.FAILED, cause="crash", reason="refused hunter2-secret", hosts=["h"])
    assert client.job(view.id).reason == "refused ***"
    client.close()
    assert b"hunter2-secret" not in (orc_home / "state" / "ledger.db").read_bytes()


def test_a_refused_submission_keeps_nothing(client, backend, job_file, kept, monkeypatch):
    monkeypatch.setenv("TOKEN", "hunter2")
    backend.behave(submit="refuse")
    with pytest.raises(LaunchError):
        client.submit(job_file(secrets=["TOKEN"]))
    assert list(kept.iterdir()) == []


@pytest.mark.parametrize("when", ["queued", "running"])
def test_a_cancelled_job_keeps_nothing(client, job_file, kept, monkeypatch, when, see):
    monkeypatch.setenv("TOKEN", "hunter2")
    view = client.submit(job_file(secrets=["TOKEN"], retry={**RETRY, "backoff": 60}))
    if when == "queued":
        see(view, Phase.FAILED, cause="crash")
    client.cancel([view.id])
    assert client.job(view.id).state == "CANCELLED"
    assert list(kept.iterdir()) == []


def test_what_a_crash_left_behind_is_swept_away(client, job_file, kept, monkeypatch, see):
    monkeypatch.setenv("TOKEN", "hunter2")
    living = client.submit(job_file(secrets=["TOKEN"]))
    ended = client.submit(job_file())
    see(ended, Phase.SUCCEEDED)
    state_dir = client.workspace.state_dir
    for job_id in (ended.id, "never-came-to-be", "being-born"):
        job_secrets.keep(state_dir, job_id, {"A": "b"})
    os.utime(kept / "never-came-to-be.json", (0, 0))
    (kept / ".half-written.123").write_text("{")
    os.utime(kept / ".half-written.123", (0, 0))
    client.refresh()
    assert {path.name for path in kept.iterdir()} == {f"{living.id}.json", "being-born.json"}


def test_a_job_without_secrets_leaves_no_trace_of_any(client, job_file, kept):
    client.submit(job_file())
    assert not kept.exists()


def test_secrets_that_cannot_be_kept_are_one_clear_error_and_no_job(client, job_file, kept, monkeypatch):
    monkeypatch.setenv("TOKEN", "hunter2")
    kept.parent.mkdir(exist_ok=True)
    kept.write_text("in the way")
    with pytest.raises(LaunchError, match="cannot keep the job's secrets") as caught:
        client.submit(job_file(secrets=["TOKEN"]))
    assert "hunter2" not in str(caught.value)
    assert client.jobs() == []


def test_a_value_from_the_environment_stands_in_for_a_lost_file(orc_home, monkeypatch):
    monkeypatch.setenv("TOKEN", "from here")
    assert job_secrets.load(orc_home, "job", ["TOKEN"]) == {"TOKEN": "from here"}
    monkeypatch.delenv("TOKEN")
    with pytest.raises(SpecError, match="TOKEN"):
        job_secrets.load(orc_home, "job", ["TOKEN"])


@pytest.mark.parametrize("kind", ["job", "group"])
@pytest.mark.parametrize(("error", "stays"), [(LedgerError("the connection broke"), True), (OSError("defect"), False)])
def test_secrets_stay_only_where_a_broken_ledger_may_have_taken_the_job(
    client, job_file, kept, monkeypatch, kind, error, stays
):
    monkeypatch.setenv("TOKEN", "hunter2")
    ledger = client.workspace.ledger
    transaction = ledger.transaction

    @contextmanager
    def committed_and_lost(**options):
        with transaction(**options) as tx:
            yield tx
        if stays:  # the commit went through, its answer did not
            raise error

    @contextmanager
    def never_begun(**_options):
        raise error
        yield

    needs = {"depends_on": [client.submit(job_file()).id]} if kind == "group" else {}
    monkeypatch.setattr(ledger, "transaction", committed_and_lost if stays else never_begun)
    with pytest.raises(type(error)):
        client.submit(job_file(secrets=["TOKEN"], **needs))
    monkeypatch.setattr(ledger, "transaction", transaction)
    found = [file.stem for file in kept.iterdir()] if kept.exists() else []
    assert len(found) == stays
    assert all(client.job(job_id).state in ("QUEUED", "PREPARED") for job_id in found)
