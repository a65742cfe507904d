"""`orc exec`, `orc ssh`, `orc top` and `orc stacks` beside a job that really runs."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from orc.orchestrator.cli.commands.nodes import _plain
from orc.orchestrator.insight.sessions import Sample

JOB = """\
name: watched
script: train.py
launcher: python
resources: {nodes: 2, procs_per_node: 2}
env: {GREETING: "hello there"}
secrets: [TOKEN]
"""
SCRIPT = """\
import os, threading, time
from pathlib import Path

progress = Path(os.environ["ORC_ATTEMPT_DIR"], "node-" + os.environ["ORC_NODE_RANK"], "progress.json")
def report():
    for step in range(10**9):
        new = progress.with_suffix(".new")
        new.write_text('{"step": %d}' % step)
        new.rename(progress)
        time.sleep(0.05)
def ordinary():
    while True: time.sleep(0.05)
def odd():
    while True: time.sleep(0.05)
if os.environ["LOCAL_RANK"] == "0":
    threading.Thread(target=report, daemon=True).start()
print("started", flush=True)
(odd if os.environ["RANK"] == "1" else ordinary)()
"""


@pytest.fixture
def job(
    orc: Any, job_file: Callable[..., str], place: Path, monkeypatch: pytest.MonkeyPatch, orc_home: Path
) -> Iterator[str]:
    """The id of a job with four ranks on two nodes, all of them running; ended afterwards."""
    monkeypatch.setenv("TOKEN", "s3cret")
    path = job_file(JOB)
    Path(path).with_name("train.py").write_text(SCRIPT)
    job_id = orc("submit", path, "--json").json["id"]
    deadline = time.monotonic() + 120
    while len(list((orc_home / "state/jobs" / job_id / "a1").glob("node-*/progress.json"))) < 2 or any(
        "started" not in orc("logs", job_id, "--rank", str(rank)).out for rank in range(4)
    ):
        assert time.monotonic() < deadline, orc("status", job_id).out
        time.sleep(0.05)
    yield job_id
    orc("cancel", job_id, "--grace", "1")
    orc("wait", job_id, "--timeout", "120")


def test_a_program_runs_in_the_working_copy_with_the_jobs_environment(
    job: str, orc_process: Any, orc: Any, orc_home: Path
) -> None:
    script = 'pwd; echo "$GREETING|$TOKEN|$ORC_NODE_RANK|$ORC_JOB_ID|$RANK"; exit 7'
    done = orc_process("exec", job, "--node", "1", "--", "sh", "-c", script)
    assert done.code == 7
    where, said = done.out.splitlines()
    assert Path(where) == orc_home / "state/jobs" / job / "work"
    assert said == f"hello there|s3cret|1|{job}|"
    done = orc_process(
        "exec", job, "--rank", "3", "--", sys.executable, "-c", "import os, orc.runtime; print(os.environ['RANK'])"
    )
    assert (done.code, done.out) == (0, "3\n"), done.err
    # A shell takes what comes from its standard input.
    assert orc_process("ssh", job, "--node", "1", input="echo $GREETING $ORC_NODE_RANK\n").out == "hello there 1\n"
    done = orc("exec", job, "--all", "--", "sh", "-c", "echo 'a  b' $ORC_NODE_RANK; exit $ORC_NODE_RANK")
    assert (done.code, sorted(done.out.splitlines())) == (1, ["[node 0] a  b 0", "[node 1] a  b 1"])

    sample = json.loads(orc("top", "--once", "--json", "--job", job).out.splitlines()[1])
    assert (sample["job"], sample["node"], sample["state"]) == (job, 1, "running")
    assert [rank["rank"] for rank in sample["ranks"]] == [2, 3]
    assert all(rank["rss"] > 1_000_000 and rank["processes"] == 1 for rank in sample["ranks"])
    assert 0 < sample["steps_per_s"] < 100  # about 20
    rows = orc("top", "--once").out.splitlines()
    assert [row.split()[:2] for row in rows] == [["JOB", "NODE"], [job, "0"], [job, "1"]]

    done = orc("stacks", job, "--timeout", "60", "--json")
    assert done.code == 0, done.err
    groups = done.json["groups"]
    assert [group["ranks"] for group in groups] == [[1], [0, 2, 3]]
    assert [group["frames"][0][2] for group in groups] == ["odd", "ordinary"]
    text = orc("stacks", job, "--timeout", "60").out
    assert text.startswith("rank 1\n")
    assert "\n\nranks 0,2-3 (3)\n" in text


def test_what_is_not_there_is_refused(job: str, orc: Any, orc_process: Any) -> None:
    result = orc("exec", job, "--node", "2", "--", "true")
    assert (result.code, "there is no node 2" in result.err) == (2, True)
    assert orc("exec", job, "--rank", "9", "--", "true").code == 2
    done = orc_process("exec", job, "--", "no-such-program")
    assert (done.code, done.err.splitlines()[-1]) == (125, "orc: no-such-program: No such file or directory")
    assert orc("exec", job, "--node", "0", "--all", "--", "true").code == 2


def test_without_a_running_job_there_is_nothing_to_watch(orc: Any) -> None:
    result = orc("top", "--once")
    assert (result.code, "no job is running" in result.err) == (2, True)


class Measured:
    """Measurements of a node as they come: its errors, empty where there is none."""

    def __init__(self, *errors: str) -> None:
        self.left = [Sample("digits-k3f9a2m4xq", 0, "here", {}, error=error) for error in errors]

    @property
    def ended(self) -> bool:
        return not self.left

    def next(self, _: float) -> Sample:
        return self.left.pop(0)


@pytest.mark.parametrize(("errors", "status"), [(("no answer", ""), 0), (("", "no answer"), 1)])
def test_top_without_a_terminal_ends_as_the_last_measurement(errors: tuple[str, ...], status: int) -> None:
    assert _plain(Measured(*errors), once=False, as_json=True, interval=1.0) == status


def test_the_stacks_of_a_job_that_has_ended_are_refused(orc: Any, place: Path) -> None:
    (place / "job.yaml").write_text("name: short\ncommand: 'true'\nlauncher: python\n")
    orc("submit", "job.yaml", "--follow")
    result = orc("stacks", "@last")
    assert (result.code, "no ranks run: " in result.err) == (2, True)


def test_top_draws_its_table_anew_until_ctrl_c(job: str) -> None:
    leader, follower = pty.openpty()
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 200, 0, 0))
    argv = [sys.executable, "-m", "orc.orchestrator.cli.main", "top", "--job", job, "--interval", "0.3"]
    env = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "200"}
    with subprocess.Popen(argv, stdin=follower, stdout=follower, stderr=follower, env=env) as process:
        os.close(follower)
        shown, deadline = b"", time.monotonic() + 120
        while shown.count(b"STEP/S") < 4:
            assert time.monotonic() < deadline, shown
            shown += os.read(leader, 65536)
        process.send_signal(signal.SIGINT)
        while True:  # a terminal whose other side is closed says EIO
            try:
                if not os.read(leader, 65536):
                    break
            except OSError:
                break
        assert process.wait(timeout=60) == 130
    os.close(leader)
    assert shown.count(job.encode()) >= 4
    assert b"running" in shown


def test_a_program_that_is_needed_to_get_to_a_node_and_is_missing_is_a_failure(
    capsys: pytest.CaptureFixture[str],
) -> None:
    from orc.launchers.backends.base import NodeEntry
    from orc.launchers.errors import BackendUnreachable
    from orc.orchestrator.cli.commands.nodes import _everywhere
    from orc.orchestrator.insight import sessions

    entry = NodeEntry(3, "gpu3", "/somewhere", "python3", prefix=("/no/such/ssh",))
    assert _everywhere([entry], ["true"]) == 125
    assert "[node 3] /no/such/ssh: No such file" in capsys.readouterr().err
    with pytest.raises(BackendUnreachable, match="gpu3: /no/such/ssh: No such file"):
        sessions.stacks([entry], 1)
