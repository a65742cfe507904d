"""The shim around one rank of a launcher: its log, its true status on record, the same status passed on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest
from polling import until

from orc.launchers.agent.procfs import descendants, process_start
from orc.launchers.agent.records import read_json

from .conftest import AGENT


@pytest.fixture
def shim(tmp_path):
    (tmp_path / "logs").mkdir()
    (tmp_path / "node-1").mkdir()

    def start(*program, **environ):
        env = {**os.environ, "ORC_ATTEMPT_DIR": str(tmp_path), "ORC_NODE_RANK": "1", "ORC_RESTART": "2", **environ}
        return subprocess.Popen([sys.executable, "-I", "-S", AGENT, "rank", "--", *program], env=env)

    return start


def test_status_log_and_record(shim, tmp_path):
    assert shim(sys.executable, "-c", "print('out'); raise SystemExit(42)", RANK="5", LOCAL_RANK="1").wait(60) == 42
    record = read_json(str(tmp_path / "node-1/rank-5-r2.json"))
    assert (record["rank"], record["local_rank"], record["exit_code"], record["signal"]) == (5, 1, 42, None)
    assert (tmp_path / "logs/rank-5.log").read_text() == "out\n"


def test_a_signal_is_passed_on_as_a_signal(shim, tmp_path):
    program = "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)"
    assert shim(sys.executable, "-c", program, RANK="0").wait(60) == -signal.SIGSEGV
    assert read_json(str(tmp_path / "node-1/rank-0-r2.json"))["signal"] == "SIGSEGV"


def test_signals_are_forwarded_to_the_program_alone(shim, tmp_path):
    program = """
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: (print("told"), sys.exit(75)))
print("ready", flush=True)
while True:
    time.sleep(0.1)
"""
    process = shim(sys.executable, "-c", program, RANK="0")
    log = tmp_path / "logs/rank-0.log"
    until(lambda: log.exists() and "ready" in log.read_text())
    process.terminate()
    assert process.wait(60) == 75
    record = read_json(str(tmp_path / "node-1/rank-0-r2.json"))
    assert (record["exit_code"], record["told"]) == (75, True)
    assert log.read_text() == "ready\ntold\n"


def test_the_program_dies_with_the_shim(shim, tmp_path):
    process = shim("sleep", "600", RANK="0")
    until(lambda: (tmp_path / "node-1/rank-0-r2.pid").exists())
    (child,) = descendants(process.pid)
    process.kill()
    process.wait()
    until(lambda: process_start(child) is None)


def test_a_rank_of_a_launcher_sees_its_own_of_several_mig_devices(shim, tmp_path):
    shown = "import os; print(os.environ['CUDA_VISIBLE_DEVICES'])"
    env = {"CUDA_VISIBLE_DEVICES": "MIG-b1,MIG-b2", "LOCAL_WORLD_SIZE": "2"}
    for rank in ("0", "1"):
        assert shim(sys.executable, "-c", shown, RANK=rank, LOCAL_RANK=rank, **env).wait(60) == 0
    assert [(tmp_path / f"logs/rank-{rank}.log").read_text() for rank in range(2)] == ["MIG-b1\n", "MIG-b2\n"]


def test_a_program_that_cannot_be_started_is_told_in_the_ranks_log(shim, tmp_path):
    assert shim("no-such-program", RANK="0").wait(60) == 127
    assert "cannot start no-such-program" in (tmp_path / "logs/rank-0.log").read_text()


def test_ranks_that_a_launcher_starts_again_while_the_attempt_stops_do_not_run(shim, tmp_path):
    (tmp_path / "stop-r2.json").write_text("{}")
    assert shim("touch", str(tmp_path / "ran"), RANK="0").wait(60) == 143
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("words", "missing"),
    [(("rank", "--", "true"), "RANK and ORC_ATTEMPT_DIR"), (("rsh", "host", "true"), "agent: ORC_ATTEMPT_DIR")],
)
def test_outside_of_an_attempt_it_says_what_is_missing(words, missing):
    env = {name: value for name, value in os.environ.items() if not name.startswith(("ORC_", "RANK", "SLURM"))}
    done = subprocess.run([sys.executable, "-I", "-S", AGENT, *words], env=env, capture_output=True, text=True)
    assert done.returncode == 77
    assert f"{missing} must be set" in done.stderr


# A launcher in miniature: starts its ranks, waits for the first failure, ends the others, and always exits with 1.
LAUNCHER = """
import os, signal, subprocess, sys, time
patience, program = float(sys.argv[1]), sys.argv[2:]
ranks = [subprocess.Popen(program, env={**os.environ, "RANK": str(r), "LOCAL_RANK": str(r)}, start_new_session=True)
         for r in range(2)]
while all(r.poll() is None for r in ranks):
    time.sleep(0.01)
if any(r.poll() for r in ranks):
    for r in ranks:
        r.send_signal(signal.SIGTERM)
    until = time.monotonic() + patience
    while any(r.poll() is None for r in ranks) and time.monotonic() < until:
        time.sleep(0.01)
    for r in ranks:
        r.kill()
    sys.exit(1)
for r in ranks:
    r.wait()
sys.exit(0)
"""


def launched(attempt, script, patience="60", **changes):
    launcher = ["{python}", "-c", LAUNCHER, patience]
    command = {"spawn": "launcher", "launcher": launcher, "program": ["{python}", "train.py"], "env": {}}
    return attempt(script, command=command, nproc=2, **changes)


def test_the_first_failing_rank_is_known_though_the_launcher_says_1(attempt):
    job = launched(
        attempt,
        """
        import os, sys, time
        print("rank", os.environ["RANK"], flush=True)
        if os.environ["RANK"] == "0":
            open("here", "w").close()
            time.sleep(600)
        while not os.path.exists("here"):
            time.sleep(0.01)
        sys.exit(42)
        """,
    )
    assert job.run() == 42
    record = job.exit()
    assert (record["outcome"], record["reason"]) == ("crash", "rank 1 exited with 42")
    assert record["first_failure"]["log_tail"] == "rank 1"
    assert record["ranks"]["0"]["signal"] == "SIGTERM"


def test_a_rank_that_starts_after_another_has_failed_keeps_nobody(attempt):
    launcher = """
import os, subprocess, sys
start = lambda rank: subprocess.Popen(sys.argv[1:], env={**os.environ, "RANK": rank, "LOCAL_RANK": rank})
start("1").wait()
start("0").wait()
"""
    command = {"spawn": "launcher", "launcher": ["{python}", "-c", launcher], "program": ["{python}", "train.py"]}
    job = attempt(
        """
        import os, sys, time
        while os.environ["RANK"] == "0":
            time.sleep(0.1)
        sys.exit(42)
        """,
        command={**command, "env": {}, "settle_s": 0.5},
        nproc=2,
    )
    assert job.run() == 42
    assert job.exit()["reason"] == "rank 1 exited with 42"


def test_a_launcher_that_waits_for_hanging_ranks_is_cut_short(attempt):
    job = launched(
        attempt,
        """
        import os, signal, sys, time
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # as in a collective that never returns
        sys.exit(42) if os.environ["RANK"] == "1" else time.sleep(600)
        """,
        patience="600",
        grace_s=0.5,
    )
    assert job.run() == 42
    assert job.exit()["first_failure"]["rank"] == 1


def test_a_launcher_that_fails_by_itself_is_named_with_its_output(attempt):
    launcher = ["{python}", "-c", "import sys; sys.exit('no rendezvous')"]
    command = {"spawn": "launcher", "launcher": launcher, "program": ["{python}", "train.py"], "env": {}}
    job = attempt("pass", command=command)
    assert job.run() == 1
    assert job.exit()["reason"] == "the launcher exited with 1"
    assert job.exit()["first_failure"]["rank"] is None
    assert "no rendezvous" in job.exit()["first_failure"]["log_tail"]
