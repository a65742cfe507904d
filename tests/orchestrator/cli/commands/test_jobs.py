"""Jobs on this machine through the command line: submit, follow, status, logs, wait, cancel, resubmit, events, list."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hosts_testbed import eventually

from orc.launchers.backends.local.backend import LocalBackend
from orc.launchers.paths import state_dir
from orc.orchestrator.cli.commands import jobs as listing
from orc.orchestrator.cli.commands.logs import _no_logs
from orc.orchestrator.cli.ui import tail

from ..conftest import Run

JobFile = Callable[..., str]

TWO = """\
name: two
command: |
  echo "out of $RANK"
  echo "err of $RANK" >&2
launcher: python
resources: {procs_per_node: 2}
tags: {team: a}
"""

FAILING = """\
name: failing
command: |
  if [ $RANK = 1 ]; then echo "about to fail" >&2; exit 42; fi
  sleep 600
launcher: python
resources: {procs_per_node: 2}
grace: 1
"""

SLEEPING = """\
name: sleeping
command: exec sleep 600
launcher: python
grace: 2
"""

RETRIED = """\
name: retried
command: echo "this is attempt $ORC_ATTEMPT"; [ $ORC_ATTEMPT = 2 ]
launcher: python
retry: {max_attempts: 2, on: crash, backoff: 0}
"""


def test_submit_prints_the_id_and_nothing_else_on_stdout(orc: Run, job_file: JobFile) -> None:
    result = orc("submit", job_file())
    assert result.code == 0
    job = result.out.strip()
    assert job.startswith("hello-")
    assert f"orc status {job}" in result.err
    assert orc("wait", job, "--timeout", "120").code == 0
    assert orc("status", job, "--json").json["jobs"][0]["state"] == "SUCCEEDED"


def test_the_job_file_is_remembered_from_anywhere(orc: Run, job_file: JobFile, monkeypatch: pytest.MonkeyPatch) -> None:
    path = Path(job_file())
    monkeypatch.chdir(path.parent)
    job = orc("submit", "job.yaml", "--json").json
    assert job["source"] == str(path)
    assert f"job file     {path}" in orc("status", job["id"]).out


def test_a_script_whose_name_looks_like_an_option_runs(orc: Run, job_file: JobFile) -> None:
    path = job_file("name: dash\nscript: -train.py\nlauncher: python\n")
    Path(path).with_name("-train.py").write_text("print('it ran')\n")
    result = orc("submit", path, "--follow")
    assert (result.code, result.out) == (0, "it ran\n")


def test_submit_follow_shows_rank_0_byte_for_byte_rings_and_succeeds(
    orc: Run, job_file: JobFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    rung: list[Any] = []
    monkeypatch.setattr("orc.orchestrator.cli.commands.submit.ring", lambda *said: rung.append(said))
    assert orc("submit", job_file(TWO), "--bell").code == 2
    result = orc("submit", job_file(TWO), "--follow", "--bell")
    assert [(title, "SUCCEEDED" in line) for title, (line,) in rung] == [("orc", True)]
    assert (result.code, result.out) == (0, "out of 0\nerr of 0\n"), result.err
    assert "SUCCEEDED" in result.err


@pytest.mark.parametrize(
    ("options", "lines"),
    [
        (["--rank", "1"], {"out of 1", "err of 1"}),
        (["--all-ranks"], {f"[rank {rank}] {stream} of {rank}" for rank in (0, 1) for stream in ("out", "err")}),
        (["--rank", "0", "--rank", "1"], {f"[rank {r}] {s} of {r}" for r in (0, 1) for s in ("out", "err")}),
    ],
)
def test_submit_follow_shows_other_ranks(options: list[str], lines: set[str], orc: Run, job_file: JobFile) -> None:
    result = orc("submit", job_file(TWO), "--follow", *options)
    assert set(result.out.splitlines()) == lines


def test_submit_follow_json_prints_the_job_and_leaves_output_to_stderr(orc: Run, job_file: JobFile) -> None:
    result = orc("submit", job_file(TWO), "--follow", "--json")
    assert result.code == 0
    assert result.json["state"] == "SUCCEEDED"
    assert "out of 0" in result.err


def test_rank_without_follow_is_refused_before_anything_is_sent(orc: Run, job_file: JobFile) -> None:
    assert orc("submit", job_file(), "--rank", "1").code == 2
    assert orc("list", "--json").json == {"jobs": []}


def test_a_failing_rank_is_named_with_its_end_by_follow_and_by_status(orc: Run, job_file: JobFile) -> None:
    followed = orc("submit", job_file(FAILING), "--follow")
    assert followed.code == 1
    for shown in (followed.err, orc("status", "@last").out):
        assert "FAILED" in shown
        assert "rank 1 on" in shown
        assert "exited with 42" in shown
        assert "| about to fail" in shown
    verdict = orc("status", "@last", "--json").json["jobs"][0]["attempts"][0]["exit"]
    assert verdict["first_failure"]["rank"] == 1
    assert verdict["exit_status"] == 42
    assert orc("wait", "@last").code == 1


@pytest.mark.parametrize("first_look", ["at once", "when all is over"])
def test_follow_goes_on_over_a_retry(
    orc: Run, job_file: JobFile, first_look: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if first_look == "when all is over":

        def follow(client: Any, job: str, *args: Any, follow: Any = tail.follow, **options: Any) -> Any:
            client.wait([job])
            return follow(client, job, *args, **options)

        monkeypatch.setattr(tail, "follow", follow)
    result = orc("submit", job_file(RETRIED), "--follow")
    assert (result.code, result.out) == (0, "this is attempt 1\nthis is attempt 2\n")
    assert "--- attempt 1 FAILED: rank 0 " in result.err
    assert "; attempt 2 ---" in result.err
    assert orc("logs", "@last", "--attempt", "1").out == "this is attempt 1\n"
    assert orc("logs", "@last").out == "this is attempt 2\n"
    assert "attempt 2" in orc("status", "@last").out


def test_a_job_that_ended_before_it_ran_is_not_said_to_have_logs_yet() -> None:
    never_ran = SimpleNamespace(id="hello-k3f9a2", ended=True)
    error = _no_logs(never_ran, 0, False)  # type: ignore[arg-type]
    assert (error.what, error.where) == ("it ended before it ran: there are no logs", "hello-k3f9a2")
    assert "-f" not in error.hint


def test_logs_of_all_ranks_are_told_apart_and_of_one_are_raw(orc: Run, job_file: JobFile) -> None:
    orc("submit", job_file(TWO), "--follow")
    every = orc("logs", "@last")
    assert every.out == "[rank 0] out of 0\n[rank 0] err of 0\n[rank 1] out of 1\n[rank 1] err of 1\n"
    assert orc("logs", "@last", "--rank", "1").out == "out of 1\nerr of 1\n"
    assert orc("logs", "@last", "--rank", "1", "--tail", "1").out == "err of 1\n"
    assert orc("logs", "@last", "--rank", "1", "--since-offset", "4").out == "of 1\nerr of 1\n"
    assert orc("logs", "@last", "-f", "--rank", "0").out == "out of 0\nerr of 0\n"
    assert orc("logs", "@last", "--node", "0").code == 0
    pieces = [json.loads(line) for line in orc("logs", "@last", "--json").out.splitlines()]
    assert "".join(p["text"] for p in pieces if p["rank"] == 0) == "out of 0\nerr of 0\n"
    assert all(p["attempt"] == 1 and p["node"] is None and p["end"] == p["offset"] + len(p["text"]) for p in pieces)


def test_logs_that_are_not_there_are_an_error(orc: Run, job_file: JobFile, monkeypatch: pytest.MonkeyPatch) -> None:
    orc("submit", job_file(TWO), "--follow")
    missing = orc("logs", "@last", "--rank", "7")
    assert missing.code == 2
    assert "there are logs of the ranks 0-1, of the nodes 0" in missing.err
    followed = orc("logs", "@last", "-f", "--rank", "7")
    assert (followed.code, followed.out) == (2, "")
    assert "there is no such log" in followed.err
    assert "attempts so far: 1" in orc("logs", "@last", "--attempt", "3").err
    assert orc("logs", "nothing").code == 4
    monkeypatch.setattr(
        LocalBackend, "log_listing", lambda self, handle: (self.log_selectors(handle), {"n4": "no route"})
    )
    for more in ((), ("-f",), ("--tail", "1")):  # it may be there
        away = orc("logs", "@last", "--rank", "7", *more)
        assert (away.code, away.out) == (5, "")
        assert "n4" in away.err
        assert "there is no such log" not in away.err


def test_a_failed_setup_shows_the_log_of_the_node(orc: Run, job_file: JobFile) -> None:
    text = "name: unready\nsetup: echo no such module; exit 3\ncommand: 'true'\nlauncher: python\n"
    result = orc("submit", job_file(text), "--follow")
    assert result.code == 1
    assert "no such module" in result.out
    assert "no such module" in orc("logs", "@last").out
    assert len(orc("list").out.splitlines()) == 2


def test_wait_times_out_with_6_and_cancel_stops_the_job(orc: Run, job_file: JobFile) -> None:
    job = orc("submit", job_file(SLEEPING)).out.strip()
    waited = orc("wait", job, "--timeout", "0.2", "--json")
    assert waited.code == 6
    assert waited.json["timed_out"] is True
    assert orc("status").out.startswith(job)
    assert orc("cancel", job, "--grace", "1").code == 0
    ended = orc("wait", job, "--timeout", "120", "--json")
    assert ended.code == 3
    assert ended.json["jobs"][0]["state"] == "CANCELLED"
    assert orc("cancel", job).code == 0
    assert orc("status").out == ""


@pytest.mark.parametrize("offset", [10**6, 2**63, 10**30])
def test_an_offset_beyond_the_end_of_a_log_shows_nothing(orc: Run, job_file: JobFile, offset: int) -> None:
    orc("submit", job_file(), "--follow")
    for further in ([], ["--tail", "3"], ["--json"], ["--node", "0"]):
        result = orc("logs", "@last", "--since-offset", str(offset), *further)
        assert (result.code, result.out) == (0, "")


def following(orc: Run, file: str) -> subprocess.Popen[str]:
    """A process that has submitted the job of *file*, which runs, and follows it."""
    command = [sys.executable, "-m", "orc.orchestrator.cli.main", "submit", file, "--follow"]
    follower = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    _until(lambda: [job["state"] for job in orc("list", "--json").json["jobs"]] == ["RUNNING"])
    return follower


def test_a_cancelled_job_ends_follow_with_3(orc: Run, job_file: JobFile) -> None:
    follower = following(orc, job_file(SLEEPING))
    orc("cancel", "@last", "--grace", "1")
    _, err = follower.communicate(timeout=120)
    assert follower.returncode == 3
    assert "CANCELLED" in err


def test_ctrl_c_stops_following_and_leaves_the_job_alone(orc: Run, job_file: JobFile) -> None:
    follower = following(orc, job_file(SLEEPING))
    follower.send_signal(signal.SIGINT)
    _, err = follower.communicate(timeout=120)
    assert follower.returncode == 130
    assert "the job goes on" in err
    assert "error:" not in err
    assert orc("status", "@last", "--json").json["jobs"][0]["state"] == "RUNNING"
    orc("cancel", "@last", "--grace", "0")
    assert orc("wait", "@last", "--timeout", "120").code == 3


def test_resubmit_runs_the_same_snapshot_as_a_new_job(orc: Run, job_file: JobFile, place: Path) -> None:
    path = job_file("name: cat\ncommand: cat data.txt\nlauncher: python\n")
    data = Path(path).with_name("data.txt")
    data.write_text("before\n")
    first = orc("submit", path, "--follow", "--json").json
    data.write_text("after\n")
    again = orc("resubmit", first["id"], "--follow")
    assert (again.code, again.out) == (0, "before\n")
    second = orc("status", "@last", "--json").json["jobs"][0]
    assert second["id"] != first["id"]
    assert second["digests"] == first["digests"]
    assert second["source"] == f"job:{first['id']}"


def test_a_list_asks_about_what_is_old_and_shows_how_old_the_rest_is(
    orc: Run, job_file: JobFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every process of the job is killed, and nobody is left who would say so."""
    job = orc("submit", job_file(SLEEPS)).out.strip()
    eventually(lambda: "RUNNING" in orc("status", job).out)
    kill_all(job)
    assert re.search(r"RUNNING .* [0-9.]+s ago", orc("list").out)
    monkeypatch.setattr(listing, "STALE_S", 0.0)
    assert "RUNNING" in orc("list", "--no-refresh").out
    assert "FAILED" in orc("list").out


SLEEPS = "name: sleeps\ncommand: [/bin/sleep, '600']\nlauncher: python\nretry: {max_attempts: 1}\n"


def kill_all(job: str) -> None:
    attempt = state_dir() / "jobs" / job / "a1"
    for agent in (attempt / "gang.json", attempt / "node-0" / "lease.json"):
        os.kill(json.loads(agent.read_text())["pid"], signal.SIGKILL)


def test_list_filters_and_limits(orc: Run, job_file: JobFile) -> None:
    orc("submit", job_file(TWO), "--follow")
    orc("submit", job_file(FAILING), "--follow")

    def names(*options: str) -> list[str]:
        return [job["name"] for job in orc("list", "--json", *options).json["jobs"]]

    assert names() == ["failing", "two"]
    assert names("--limit", "1") == ["failing"]
    assert names("--state", "succeeded") == ["two"]
    assert names("--state", "SUCCEEDED", "--state", "FAILED") == ["failing", "two"]
    assert names("--name", "failing") == ["failing"]
    assert names("--tag", "team=a") == ["two"]
    assert names("--tag", "team=b") == []
    assert orc("list", "--tag", "team").code == 2
    lines = orc("list").out.splitlines()
    assert lines[0].split() == ["JOB", "STATE", "CLUSTER", "CREATED", "TIME", "SEEN", "REASON"]
    assert len(lines) == 3


def test_events_tell_the_history_in_order(orc: Run, job_file: JobFile) -> None:
    orc("submit", job_file(), "--follow")
    kinds = [event["kind"] for event in orc("events", "@last", "--json").json["events"]]
    assert kinds[0] == "queued"
    assert kinds[-1] == "job_succeeded"
    assert kinds.index("prepared") < kinds.index("submitting") < kinds.index("accepted")
    shown = orc("events").out
    assert "submitted to local from " in shown
    assert "made ready" in shown
    assert "the job has succeeded" in shown
    assert "native_id=" in orc("events", "-o", "wide").out


def test_job_ids_complete_in_the_shell(orc: Run, job_file: JobFile) -> None:
    job = orc("submit", job_file(), "--follow", "--json").json["id"]
    env = {**os.environ, "_ORC_COMPLETE": "bash_complete", "COMP_WORDS": "orc status hel", "COMP_CWORD": "2"}
    command = [sys.executable, "-m", "orc.orchestrator.cli.main"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
    assert done.stdout == f"plain,{job}\n"


def test_a_retry_happens_with_no_command_running(orc: Run, job_file: JobFile) -> None:
    job = orc("submit", job_file(RETRIED)).out.strip()
    _until(lambda: orc("status", job, "--no-refresh", "--json").json["jobs"][0]["state"] == "SUCCEEDED")
    assert len(orc("status", job, "--no-refresh", "--json").json["jobs"][0]["attempts"]) == 2


def _until(condition: Callable[[], bool], timeout_s: float = 120.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.05)


def test_a_job_that_another_job_has_submitted_outlives_it(orc: Run, job_file: JobFile) -> None:
    waiting = "while [ ! -e $ORC_JOB_DIR/go ]; do sleep 0.05; done; echo went on"
    child = job_file(
        f"name: child\nlauncher: python\nretry: {{max_attempts: 1}}\ncommand: {waiting}\n",
        "child.yaml",
    )
    submit = shlex.join([sys.executable, "-m", "orc.orchestrator.cli.main", "submit", child])
    parent = orc("submit", job_file(f"name: parent\nlauncher: python\ncommand: {json.dumps(submit)}\n"), "--follow")
    assert parent.code == 0
    job = next(word for word in parent.out.split() if word.startswith("child-"))  # a slow command says that it works
    (Path(orc("status", job, "--json").json["jobs"][0]["attempts"][0]["native_id"]).parent / "go").touch()
    assert orc("wait", job, "--timeout", "120").code == 0
    assert orc("logs", job).out == "went on\n"
