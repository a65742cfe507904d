"""Stacks of all ranks of a job that hangs, without anything installed."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from polling import until

from orc.launchers.agent import stacks
from orc.launchers.rank_hooks import startup

from .conftest import AGENT

HANGS = """
import os, threading, time
def feed():
    threading.Event().wait()
threading.Thread(target=feed, daemon=True).start()
def step(batch):
    os.read(os.pipe()[0], print("ready", flush=True) or 1)  # never
def train():
    step(3)
train()
"""


def ask(job, *more):
    argv = [sys.executable, "-I", "-S", AGENT, "stacks", job.directory, *more]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture
def hooked(attempt):
    def make(script, **changes):
        job = attempt(script, **changes)
        shutil.copy(startup.__file__, Path(job.config["runtime_tree"]) / "sitecustomize.py")
        return job

    return make


@pytest.mark.parametrize("launched", [False, True])
def test_every_rank_says_where_it_is(hooked, launched):
    changes = {}
    if launched:
        launcher = """
import os, subprocess, sys
ranks = [subprocess.Popen(sys.argv[1:], env={**os.environ, "RANK": str(2 * int(os.environ["ORC_NODE_RANK"]) + r),
                                             "LOCAL_RANK": str(r)}) for r in range(2)]
sys.exit(max(rank.wait() for rank in ranks))
"""
        program = ["{python}", "train.py"]
        command = {"spawn": "launcher", "launcher": ["{python}", "-c", launcher], "program": program, "env": {}}
        changes["command"] = command
    job = hooked(HANGS, nnodes=2, nproc=2, **changes)
    agents = [job.start(node) for node in range(2)]
    job.until_log("ready", *range(4))
    for _ in range(2):  # what the first answer held is not in the second
        answer = ask(job)
        assert answer["missing"] == []
        ranks = [rank for one in answer["answers"] for rank in one["ranks"]]
        assert [(rank["rank"], rank["source"], rank["error"]) for rank in ranks] == [
            (rank, "faulthandler", None) for rank in range(4)
        ]
        for rank in ranks:
            (main,) = [thread for thread in rank["threads"] if thread["main"]]
            assert [frame["function"] for frame in main["frames"]] == ["step", "train", "<module>"]
            assert main["frames"][0]["file"].endswith("train.py")
            assert HANGS.splitlines()[main["frames"][0]["line"] - 1].endswith("# never")
            assert len(rank["threads"]) == 2
    assert [process.poll() for process in agents] == [None, None], "nobody is hurt"


def test_a_program_that_would_die_of_the_signal_is_not_sent_it(hooked):
    job = hooked("x", command={"spawn": "ranks", "launcher": [], "program": ["sleep", "600"], "env": {}})
    job.start()
    until(lambda: (job.record("heartbeat.json") or {}).get("state") == "running")
    (rank,) = ask(job)["answers"][0]["ranks"]
    assert rank["threads"] == []
    assert "no Python" in rank["error"]
    assert (job.record("heartbeat.json") or {})["ranks_alive"] == 1


def test_python_below_a_shell_is_found(hooked):
    shell = ["/bin/sh", "-c", "cp train.py x.py; python3 x.py; true"]
    job = hooked(HANGS, command={"spawn": "ranks", "launcher": [], "program": shell, "env": {}})
    job.start()
    job.until_log("ready")
    (rank,) = ask(job)["answers"][0]["ranks"]
    assert rank["error"] is None
    assert rank["threads"][-1]["frames"][0]["function"] == "step"


def test_a_rank_that_stops_its_agent_is_missed(hooked):
    job = hooked(HANGS, nnodes=2)
    agents = [job.start(node) for node in range(2)]
    job.until_log("ready", 0, 1)
    agents[1].send_signal(signal.SIGSTOP)
    answer = ask(job, "--timeout", "6")
    assert [one["node"] for one in answer["answers"]] == [0]
    assert answer["missing"] == [1]


def test_a_stall_leaves_the_stacks_of_all_ranks(hooked):
    script = """
import json, os, pathlib, sys, time
rank, node = os.environ["RANK"], os.environ["ORC_NODE_RANK"]
print("ready", flush=True)
def stuck():
    pathlib.Path("stuck").touch()
    while True:
        time.sleep(0.1)
if rank == "1":
    stuck()
while not os.path.exists("stuck"):
    time.sleep(0.02)
report = {"rank": 0, "restart": 0, "summary": "stalled: rank 1 has not come"}
pathlib.Path(os.environ["ORC_ATTEMPT_DIR"], f"node-{node}", "stall-0.json").write_text(json.dumps(report))
sys.exit(79)
"""
    job = hooked(script, nproc=2)
    assert job.run() == 79
    answer = json.loads((job.directory / "stacks/stall-r0.node-0.json").read_text())
    (rank,) = [rank for rank in answer["ranks"] if rank["rank"] == 1]
    assert "stuck" in [frame["function"] for frame in rank["threads"][-1]["frames"]]


def test_py_spy_is_asked_where_it_is_installed(hooked, tmp_path):
    """Its answer is as documented in its README; the program stands for the real one."""
    frames = [{"name": "step", "filename": "/w/train.py", "module": None, "short_filename": "train.py", "line": 7}]
    told = [
        {"pid": 1, "thread_id": 1, "thread_name": "MainThread", "os_thread_id": 1, "active": True, "frames": frames}
    ]
    spy = tmp_path / "bin" / "py-spy"
    spy.parent.mkdir()
    spy.write_text(f"#!/bin/sh\necho '{json.dumps(told)}'\n")
    spy.chmod(0o755)
    job = hooked(HANGS)
    job.start(PATH=f"{spy.parent}:{os.environ['PATH']}")
    job.until_log("ready")
    (rank,) = ask(job)["answers"][0]["ranks"]
    assert rank["source"] == "py-spy"
    assert rank["threads"][0]["frames"] == [{"file": "/w/train.py", "line": 7, "function": "step"}]
    spy.write_text("#!/bin/sh\necho 'Error: Permission denied' >&2; exit 1\n")
    (rank,) = ask(job)["answers"][0]["ranks"]
    assert (rank["source"], rank["error"]) == ("faulthandler", None)


# Answers as `faulthandler` does, in a signal handler in C, but rests in the middle. Another thread hears no signals.
RESTS = """
import ctypes, os, signal, sys, threading, time
def deaf():
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    time.sleep(600)
threading.Thread(target=deaf, daemon=True).start()
file = os.open(sys.argv[1], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
@ctypes.CFUNCTYPE(None, ctypes.c_int)
def answer(number):
    os.write(file, b'Thread 0x1 (most recent call first):\\n  File "a.py", line 1 in first\\n\\n')
    time.sleep(0.5)
    os.write(file, b'Current thread 0x2 (most recent call first):\\n  File "a.py", line 2 in second\\n')
ctypes.CDLL(None).signal(int(sys.argv[2]), answer)
print("ready", flush=True)
while True:
    time.sleep(600)
"""


def test_an_answer_is_read_to_its_end_however_slowly_it_is_written(tmp_path, monkeypatch):
    monkeypatch.setattr(stacks, "ANSWER_S", 600.0)
    argv = [sys.executable, "-c", RESTS, tmp_path / "stacks-0.txt", str(stacks.number())]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        threads, why = stacks.RankStackDump(str(tmp_path), 0, process.pid).answer()
        process.kill()
    assert ([thread["frames"][0]["function"] for thread in threads], why) == (["first", "second"], "")


def test_what_faulthandler_writes_is_read():
    text = """Thread 0x00007f1 [loader] (most recent call first):
  File "/w/a b.py", line 3 in wait
  File "/w/x.py", line ??? in <lambda>

Current thread 0x00007f2 (most recent call first):
  <no Python frame>
"""
    assert stacks.parse(text) == [
        {
            "name": "loader",
            "main": False,
            "frames": [
                {"file": "/w/a b.py", "line": 3, "function": "wait"},
                {"file": "/w/x.py", "line": None, "function": "<lambda>"},
            ],
        },
        {"name": "", "main": True, "frames": []},
    ]
