"""Launchers that live on the first node alone reach the others through their agents, not through SSH."""

from __future__ import annotations

import json
import signal
from types import SimpleNamespace

import pytest
from polling import until

from orc.launchers.agent import calls
from orc.launchers.agent.config import AgentConfig
from orc.launchers.agent.node import Node

# mpirun in miniature: one `ssh` for each host of the host file, each starts the ranks of its node; the first failure
# ends the others. Ranks are numbered in Open MPI's variables, and node 0's environment is passed on to all.
LAUNCHER = """
import os, shlex, signal, subprocess, sys, time
hosts = [line.split() for line in open(sys.argv[1])]
program = sys.argv[2:]
env = {n: v for n, v in os.environ.items() if n.startswith(("ORC_", "MASTER_"))}
calls, rank, size = [], 0, sum(int(n) for _, n in hosts)
for host, n in hosts:
    lines = []
    for local in range(int(n)):
        own = {**env, "OMPI_COMM_WORLD_RANK": rank, "OMPI_COMM_WORLD_LOCAL_RANK": local,
               "OMPI_COMM_WORLD_SIZE": size, "OMPI_COMM_WORLD_LOCAL_SIZE": n}
        words = " ".join(f"{n}={shlex.quote(str(v))}" for n, v in own.items())
        lines.append(f"env {words} {shlex.join(program)} & pids=\\"$pids $!\\"")
        rank += 1
    script = "\\n".join([*lines, "trap 'kill $pids; wait; exit 143' TERM", "status=0",
                        "for p in $pids; do wait $p || status=$?; done", "exit $status"])
    calls.append(subprocess.Popen(["ssh", "-x", "-o", "BatchMode=yes", "me@" + host, script], stdin=subprocess.DEVNULL))
def stop(*_):
    for call in calls:
        call.terminate()
signal.signal(signal.SIGTERM, stop)
while any(call.poll() is None for call in calls) and not any(call.poll() for call in calls):
    time.sleep(0.01)
bad = next((call.poll() for call in calls if call.poll()), 0)
if bad:
    stop()
for call in calls:
    call.wait()
print("launcher ends with", bad, flush=True)
sys.exit(1 if bad else 0)
"""


@pytest.fixture
def called(attempt):
    def make(script, /, nnodes=2, nproc=2, launcher=LAUNCHER, **changes):
        command = {
            "spawn": "launcher",
            "primary": "first",
            "remote_shell": True,
            "launcher": ["{python}", "-c", launcher, "{attempt_dir}/hosts"],
            "hostfiles": {"hosts": "{host} {nproc}\n"},
            "program": ["{python}", "train.py"],
            "env": {},
        }
        return attempt(script, command=command, nnodes=nnodes, nproc=nproc, **changes)

    return make


def start(job):
    return [job.start(node) for node in range(job.config["nnodes"])]


def ends(agents):
    return [process.wait(60) for process in agents]


def test_a_launcher_on_the_first_node_starts_ranks_on_all(called):
    job = called(
        """
        import json, os
        names = "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT ORC_NODE_RANK NODE_RANK".split()
        print(json.dumps({name: os.environ.get(name) for name in names}))
        """,
        nnodes=3,
    )
    assert ends(start(job)) == [0, 0, 0], [job.node_log(node) for node in range(3)]
    seen = [json.loads(job.log(rank)) for rank in range(6)]
    assert [s["RANK"] for s in seen] == list("012345")
    assert [s["LOCAL_RANK"] for s in seen] == list("010101")
    assert [s["ORC_NODE_RANK"] for s in seen] == list("001122"), "of the node where it runs, not of the launcher's"
    assert {(s["WORLD_SIZE"], s["LOCAL_WORLD_SIZE"], s["MASTER_ADDR"]) for s in seen} == {("6", "2", "127.0.0.1")}
    assert len({s["MASTER_PORT"] for s in seen}) == 1
    for node in range(3):
        assert list(job.exit(node)["ranks"]) == [str(2 * node), str(2 * node + 1)]
    assert "launcher ends with 0" in job.node_log(0)
    assert "node 0 calls: " in job.node_log(2)
    assert job.remains() == []


def test_the_failing_rank_on_another_node_is_the_first_failure(called):
    job = called(
        """
        import os, sys, time
        print("here", flush=True)
        if os.environ["RANK"] == "3":
            time.sleep(0.5)
            sys.exit(42)
        while True:
            time.sleep(0.1)
        """
    )
    assert ends(start(job)) == [42, 42]
    record = job.exit(1)
    assert (record["outcome"], record["reason"]) == ("crash", "rank 3 exited with 42")
    assert record["first_failure"]["log_tail"] == "here"
    assert job.exit(0)["outcome"] == "peer"
    assert job.remains() == []


def test_a_launcher_that_fails_by_itself_is_the_reason_on_all_nodes(called):
    job = called("pass", launcher="import sys; sys.exit('no such device')")
    assert ends(start(job)) == [1, 1]
    assert (job.exit(0)["outcome"], job.exit(0)["reason"]) == ("crash", "the launcher exited with 1")
    assert "no such device" in job.exit(0)["first_failure"]["log_tail"]
    assert job.exit(1)["outcome"] == "peer"


def test_ranks_that_saved_on_another_node_were_preempted(called):
    job = called(
        """
        import signal, sys, time
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
        print("ready", flush=True)
        while True:
            time.sleep(0.1)
        """
    )
    agents = start(job)
    for rank in range(4):
        job.until_log("ready", rank)
    agents[1].send_signal(signal.SIGTERM)
    assert ends(agents) == [75, 75]
    assert {job.exit(node)["outcome"] for node in range(2)} == {"preempted"}


PROBE = """
import subprocess, sys
done = subprocess.run(["ssh"] + sys.argv[2].split("|"), capture_output=True, text=True)
print(repr((done.returncode, done.stdout, done.stderr)), flush=True)
"""


@pytest.mark.parametrize(
    ("arguments", "answer"),
    [
        ("-x|-o|PasswordAuthentication=no|node-1|echo $((6 * 7)); exit 3", "(3, '42\\n', '')"),
        ("-2|-a|-x|-lroot|node-1|pwd", "/job-1/work\\n', '')"),
        ("node-1|-p|22|kill -9 $$", "(137, "),
        ("nobody|true", "(255, '', 'orc agent: nobody is no host of this attempt"),
        ("node-1", "usage: rsh"),
    ],
)
def test_what_a_launcher_may_ask_a_host(called, arguments, answer):
    job = called("pass", launcher=PROBE)
    job.config["command"]["launcher"].append(arguments)
    job.write()
    assert ends(start(job)) == [0, 0]
    assert answer in job.node_log(0), job.node_log(0)


def test_names_and_addresses_of_the_hosts_are_understood(tmp_path):
    hosts = [{"name": "gpu1", "address": "10.0.0.1"}, {"name": "gpu2", "address": "fd00::2"}]
    config = SimpleNamespace(nnodes=2, hosts=hosts)
    found = {
        name: calls.resolve_node(name, config, str(tmp_path))
        for name in ("gpu1", "gpu2", "gpu2.cluster.example", "10.0.0.1", "fd00::2", "node-1", "gpu3")
    }
    assert list(found.values()) == [0, 1, 1, 0, 1, 1, None]


ABANDON = """
import os, pathlib, signal, subprocess, sys, time
call = subprocess.Popen(["ssh", "node-1", "echo begun > ../begun; exec sleep 600"])
while not os.path.exists("../begun"):
    time.sleep(0.01)
call.send_signal(getattr(signal, sys.argv[2]))
print("the caller ended with", call.wait(), flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize(("number", "status"), [("SIGTERM", 143), ("SIGKILL", -9)])
def test_a_call_ends_with_its_caller(called, number, status):
    job = called("pass", launcher=ABANDON)
    job.config["command"]["launcher"].append(number)
    job.write()
    agents = start(job)
    until(lambda: f"the caller ended with {status}" in job.node_log(0), what="the caller's end")
    until(lambda: list((job.directory / "calls").glob("*.done.json")), what="the end of the call")
    (done,) = (job.directory / "calls").glob("*.done.json")
    assert json.loads(done.read_text())["status"] == 143
    (job.directory / "cancel.json").write_text('{"grace_s": 0}')
    assert ends(agents) == [143, 143]
    assert job.remains() == []


def test_a_cancellation_that_has_ended_the_first_node_already_is_the_reason_on_the_others_too(called):
    job = called("pass")
    (job.directory / "node-0").mkdir()
    (job.directory / "node-1").mkdir()
    (job.directory / "cancel.json").write_text('{"grace_s": 0}')
    over = {"restart": 0, "outcome": "cancelled", "reason": "cancelled", "exit_status": 143}
    (job.directory / "node-0/exit.json").write_text(json.dumps(over))
    node = Node(AgentConfig(job.config), 1, "test:1")
    with (job.root / "log").open("wb") as log:
        node.log_fd = log.fileno()
        ending = node.follow_first_node()
    assert (ending["outcome"], ending["exit_status"]) == ("cancelled", 143)


def test_one_node_needs_no_calls(called):
    direct = LAUNCHER.replace('["ssh", "-x", "-o", "BatchMode=yes", "me@" + host, script]', '["sh", "-c", script]')
    job = called("import os; print(os.environ['RANK'], os.environ['MASTER_ADDR'])", nnodes=1, launcher=direct)
    assert ends(start(job)) == [0]
    assert [job.log(rank) for rank in range(2)] == ["0 127.0.0.1\n", "1 127.0.0.1\n"]
