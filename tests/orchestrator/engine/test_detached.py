"""The process that goes on with live jobs when nobody types anything, and that ends with the last of them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from hosts_testbed import eventually

from orc.launchers.backends.base import Phase
from orc.orchestrator.api.session import LedgerSession
from orc.orchestrator.client import Client
from orc.orchestrator.engine import detached, passes, steps

ORC = [sys.executable, "-m", "orc.orchestrator.cli.main"]


def lease(orc_home: Path) -> detached.Lease:
    with Client(reconciler=False) as client:
        return detached.Lease(client.workspace.state_dir, client.workspace.ledger.database.url)


@pytest.fixture
def allowed(orc_home, monkeypatch):
    """The detached reconciler, which no test may leave behind."""
    monkeypatch.setenv(detached.VARIABLE, "on")
    yield
    monkeypatch.setenv(detached.VARIABLE, "off")
    try:
        eventually(lambda: not lease(orc_home).is_held(), timeout_s=30)
    finally:
        if process := lease(orc_home).holder():
            os.kill(process.pid, signal.SIGKILL)


@pytest.fixture
def job_yaml(tmp_path) -> Path:
    path = tmp_path / "job.yaml"
    path.write_text("name: once\ncommand: [/bin/sleep, '600']\nlauncher: python\nretry: {max_attempts: 1}\n")
    return path


def orc(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*ORC, *arguments], env={**os.environ, **env}, capture_output=True, text=True, check=False, timeout=120
    )


def states(orc_home: Path) -> list[str]:
    """As the ledger has them: without a pass."""
    with Client(reconciler=False) as client:
        return [row.state for row in client.jobs()]


def test_the_end_of_a_job_whose_agents_were_killed_is_recorded_with_nobody_asking(allowed, orc_home, job_yaml):
    job = orc("submit", str(job_yaml)).stdout.strip()
    eventually(lambda: states(orc_home) == ["RUNNING"])
    process = lease(orc_home).holder()
    assert process is not None
    assert os.getsid(process.pid) == process.pid  # no terminal and no login has it
    listed = json.loads(orc("doctor", "--json").stdout)["checks"]
    assert [c["level"] for c in listed if c["name"] == "reconciler" and str(process.pid) in c["what"]] == ["ok"]
    attempt = orc_home / "state" / "jobs" / job / "a1"
    for agent in (attempt / "gang.json", attempt / "node-0" / "lease.json"):
        os.kill(json.loads(agent.read_text())["pid"], signal.SIGKILL)
    eventually(lambda: states(orc_home) == ["FAILED"])
    eventually(lambda: not lease(orc_home).is_held())


def test_a_submission_that_was_killed_is_finished_by_the_reconciler_it_has_left(allowed, orc_home, tmp_path):
    path = tmp_path / "job.yaml"
    path.write_text("name: once\ncommand: 'true'\nlauncher: python\n")
    assert orc("submit", str(path), **{steps.FAULT_POINT: "staged"}).returncode == -signal.SIGKILL
    eventually(lambda: states(orc_home) == ["SUCCEEDED"])


def test_a_ledger_that_is_named_relative_to_the_working_directory_is_the_same_to_it(
    allowed, orc_home, tmp_path, monkeypatch
):
    path = tmp_path / "job.yaml"
    path.write_text("name: once\ncommand: 'true'\nlauncher: python\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ORC_LEDGER_URL", "sqlite:///mine.db")
    assert orc("submit", str(path), **{steps.FAULT_POINT: "staged"}).returncode == -signal.SIGKILL
    eventually(lambda: states(orc_home) == ["SUCCEEDED"])
    assert not (orc_home / "state" / "mine.db").exists()


@pytest.mark.parametrize("command", [["list"], ["events", "@last"]])
def test_every_command_that_shows_jobs_goes_on_with_what_was_begun(command, orc_home, tmp_path, request):
    path = tmp_path / "job.yaml"
    path.write_text("name: once\ncommand: 'true'\nlauncher: python\n")
    assert orc("submit", str(path), **{steps.FAULT_POINT: "prepared"}).returncode == -signal.SIGKILL
    request.getfixturevalue("allowed")
    assert orc(*command).returncode == 0
    eventually(lambda: states(orc_home) == ["SUCCEEDED"])


def test_without_a_live_job_none_is_left_and_none_where_it_is_switched_off(orc_home, job_yaml, monkeypatch):
    log = orc_home / "state" / detached.LOG_NAME
    monkeypatch.setenv(detached.VARIABLE, "on")
    assert orc("list").returncode == 0
    assert orc("submit", "--no-reconciler", str(job_yaml)).returncode == 0
    monkeypatch.setenv(detached.VARIABLE, "off")
    assert orc("list").returncode == 0
    assert orc("cancel", "@last", "--grace", "0").returncode == 0
    assert orc("wait", "@last").returncode == 3
    assert not log.exists()


# -- in this process, with a fake backend and a clock that the test moves


@pytest.fixture
def serve(orc_home, backend, clock):
    """Runs the reconciler here; *on_sleep* is what happens meanwhile. Returns what it said."""

    def run(on_sleep=lambda: None, on_say=lambda _: None) -> list[str]:
        said: list[str] = []

        def sleep(seconds: float) -> None:
            clock.sleep(seconds)
            on_sleep()

        def say(text: str) -> None:
            said.append(text)
            on_say(text)

        detached.run(lambda: LedgerSession(backend_of=lambda _: backend, clock=clock, sleep=sleep), say)
        return said

    return run


def test_it_takes_every_step_until_the_last_job_has_ended(serve, client, backend, job_file):
    job = client.submit(job_file(retry={"max_attempts": 2, "on": ["crash"], "backoff": 100}))
    backend.set(job.attempt.marker, Phase.FAILED, cause="crash")

    def second_succeeds() -> None:
        newest = client.job(job.id).attempt
        if newest.number == 2:
            backend.set(newest.marker, Phase.SUCCEEDED)

    said = serve(second_succeeds)
    assert client.job(job.id).state == "SUCCEEDED"
    assert said[-1] == "no job is live"


def test_a_job_that_is_submitted_while_it_makes_up_its_mind_is_served_too(serve, client, backend, job_file):
    first = client.submit(job_file())
    backend.set(first.attempt.marker, Phase.SUCCEEDED)
    later: list[str] = []

    def submit_another(text: str) -> None:
        if text == "no job is live" and not later:
            later.append(client.submit(job_file()).id)
            backend.set(client.job(later[0]).attempt.marker, Phase.SUCCEEDED)

    serve(on_say=submit_another)
    assert [client.job(job).state for job in (first.id, *later)] == ["SUCCEEDED"] * 2


def test_of_two_one_ends_at_once(serve, client, backend, job_file):
    client.submit(job_file())
    ws = client.workspace
    with detached.Lease(ws.state_dir, ws.ledger.database.url).take() as mine:
        assert mine is not None
        assert serve() == []
    assert backend.calls("poll") == []


def test_it_ends_when_its_ledger_is_removed(serve, client, job_file, orc_home):
    client.submit(job_file())
    said = serve((orc_home / "state" / "ledger.db").unlink)
    assert said[-1] == "the ledger was removed or replaced"


def test_it_goes_on_with_the_ledger_that_takes_the_place_of_its_own(serve, client, backend, clock, job_file, orc_home):
    client.submit(job_file())
    later: list[str] = []

    def replace() -> None:
        if not later:
            (orc_home / "state" / "ledger.db").unlink()
            with Client(backend_of=lambda _: backend, clock=clock) as another:
                later.append(another.submit(job_file()).id)
                backend.set(another.job(later[0]).attempt.marker, Phase.SUCCEEDED)

    said = serve(replace)
    assert said[-1] == "no job is live"
    with Client(backend_of=lambda _: backend, clock=clock) as another:
        assert another.job(later[0]).state == "SUCCEEDED"


def test_a_cluster_that_is_away_is_said_once(serve, client, backend, job_file):
    job = client.submit(job_file())
    backend.behave(poll="unreachable")
    slept = []

    def come_back() -> None:
        slept.append(1)
        if len(slept) == 3:
            backend.behave(poll=None)
            backend.set(job.attempt.marker, Phase.SUCCEEDED)

    said = serve(come_back)
    assert said[1:] == ["local: controller is down", "no job is live"]


@pytest.mark.parametrize(
    ("quiet_for", "due", "expected"),
    [(0, [], 2.0), (100, [], 5.0), (100_000, [], 30.0), (100_000, [100_007], 7.0), (100_000, [5], 2.0)],
)
def test_it_looks_less_often_the_longer_nothing_happens_but_in_time_for_a_retry(quiet_for, due, expected):
    assert passes.pause(quiet_for, 0, due, 2.0) == expected
