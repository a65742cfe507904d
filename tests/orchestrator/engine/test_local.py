"""The orchestrator with the real local backend: agents are processes, time is real."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from orc.launchers.backends import open_backend
from orc.launchers.backends.base import Phase
from orc.launchers.snapshot.scan import scan
from orc.launchers.spec import load_job
from orc.launchers.spec.clusters import get_cluster
from orc.orchestrator.client import Client
from orc.orchestrator.engine.job_source import code_exclude
from orc.orchestrator.views import JobView


@pytest.fixture
def local(orc_home) -> Iterator[Client]:
    with Client() as made:
        yield made


@pytest.fixture
def submit(tmp_path, local) -> Callable[..., JobView]:
    """Submits a shell command as a job of these further keys."""

    def start(command: str, **keys: object) -> JobView:
        path = tmp_path / "project" / "job.yaml"
        path.parent.mkdir(exist_ok=True)
        job = {"name": "j", "command": ["/bin/sh", "-c", command], "launcher": "python", **keys}
        path.write_text(json.dumps(job))
        return local.submit(load_job(path))

    return start


def until(condition: Callable[[], object], seconds: float = 90.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.05)


def test_a_failed_attempt_is_retried_with_nobody_looking(submit, local):
    """The last agent of an attempt starts the pass that starts the next attempt; this test only reads the ledger."""
    view = submit("test $ORC_ATTEMPT -ge 2", retry={"max_attempts": 3, "on": ["crash"], "backoff": 0.2})
    until(lambda: local.job(view.id).ended)
    done = local.job(view.id)
    assert (done.state, [a.state for a in done.attempts]) == ("SUCCEEDED", ["FAILED", "SUCCEEDED"])


def test_a_client_with_a_state_directory_of_its_own_keeps_everything_there(tmp_path, orc_home):
    path = tmp_path / "job.yaml"
    retry = {"max_attempts": 2, "on": ["crash"], "backoff": 0}
    command = "test $ORC_ATTEMPT -ge 2"
    path.write_text(json.dumps({"name": "j", "command": command, "launcher": "python", "retry": retry}))
    with Client(tmp_path / "mine") as mine:
        view = mine.submit(load_job(path))
        until(lambda: mine.job(view.id).ended)  # with nobody looking: the agents know where the ledger is
        assert mine.job(view.id).state == "SUCCEEDED"
        assert mine.job(view.id).attempt.native_id.startswith(str(tmp_path / "mine"))
    assert not (orc_home / "state").exists()


def test_the_root_of_a_cluster_of_this_machine_is_never_part_of_the_code(tmp_path, orc_home):
    """It holds the snapshots of all jobs: each would carry the ones before it."""
    work, kept = tmp_path / "w [1]", tmp_path / "w [1]" / "orc root" / "kept"
    kept.parent.mkdir(parents=True)
    (orc_home / "config").mkdir(parents=True)
    root = str(kept.parent)
    clusters = {
        "mine": {"kind": "local", "root": root},
        "lab": {"kind": "ssh", "root": root, "options": {"hosts": ["node1"]}},
    }
    (orc_home / "config" / "clusters.yaml").write_text(json.dumps(clusters))
    kept.write_text("")
    (work / "train.py").write_text("")
    path = work / "job.yaml"
    path.write_text(json.dumps({"name": "j", "script": "train.py", "launcher": "python"}))
    loaded = load_job(path)
    found = {name: code_exclude(loaded, open_backend(get_cluster(name))) for name in clusters}
    code = {
        name: {entry.path for entry in scan(loaded.workdir, patterns).bundle.entries}
        for name, patterns in found.items()
    }
    assert code == {"mine": {"job.yaml", "train.py"}, "lab": {"job.yaml", "train.py", "orc root/kept"}}


def test_a_retried_job_gets_its_secrets_again(submit, local, orc_home, monkeypatch):
    monkeypatch.setenv("TOKEN", "hunter2")
    view = submit(
        "test $TOKEN = hunter2 && test $ORC_ATTEMPT -ge 2",
        secrets=["TOKEN"],
        retry={"max_attempts": 2, "on": ["crash"], "backoff": 0},
    )
    monkeypatch.delenv("TOKEN")
    (done,) = local.wait([view.id], timeout_s=120)
    assert (done.state, len(done.attempts)) == ("SUCCEEDED", 2)
    # Whoever records the end removes them next: that may be the pass that the agent has started.
    until(lambda: not list((orc_home / "state" / "job-secrets").iterdir()))


def test_an_agent_that_is_killed_makes_a_lost_attempt_and_a_retry_that_does_not_overlap(submit, local, tmp_path):
    view = submit(
        # The second attempt fails if it sees the first one's rank alive (a zombie is not).
        f"if [ $ORC_ATTEMPT = 2 ]; then ! grep -q 'State:.[RSD]' /proc/$(cat {tmp_path}/pid)/status; exit; fi; "
        f"echo $$ > {tmp_path}/pid; exec sleep 600",
        retry={"max_attempts": 2, "on": ["node_failure"], "backoff": 0},
    )
    until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text().strip())
    attempt_dir = Path(local.job(view.id).attempt.native_id)
    for record in (attempt_dir / "gang.json", *attempt_dir.glob("node-*/lease.json")):
        with suppress(ProcessLookupError):
            os.kill(json.loads(record.read_text())["pid"], signal.SIGKILL)
    (done,) = local.wait([view.id], timeout_s=120)
    assert (done.state, [a.state for a in done.attempts]) == ("SUCCEEDED", ["LOST", "SUCCEEDED"])
    assert done.attempts[0].cause == "node_failure"


def test_an_adopted_attempt_whose_agent_has_not_come_to_its_lease_is_not_lost(submit, local):
    """A submission can be killed after it has started the agent and before the agent has written anything."""
    from orc.launchers.ids import AttemptId

    local.wait([submit("true").id], timeout_s=120)
    backend = local.workspace.backend("local")
    attempt = AttemptId("slow-abcdef", 1)
    directory = backend.layout.attempt(attempt)
    Path(directory).mkdir(parents=True)
    slow = [sys.executable, "-c", "import time; time.sleep(60)", f"local:{attempt.marker}", f"{directory}/agent.json"]
    with subprocess.Popen(slow) as process:
        until(lambda: backend.find(attempt.marker))
        handle = backend.find(attempt.marker)
        assert backend.poll([handle])[handle].phase is Phase.PENDING
        process.kill()
    assert backend.poll([handle])[handle].phase is Phase.LOST
