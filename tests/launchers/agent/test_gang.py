"""Several nodes: they meet, fail together, notice silence, and one parent sees them end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from polling import until

from orc.launchers.agent import network
from orc.launchers.agent.config import AgentConfig
from orc.launchers.agent.errors import LaunchFailure
from orc.launchers.agent.node import Node
from orc.launchers.agent.procfs import is_running
from orc.launchers.agent.ranks import address
from orc.launchers.agent.records import read_json

from .conftest import AGENT, IDLE


def gang(job, owner="local:orc-job-1-a1", **environ):
    return subprocess.run(
        [sys.executable, "-I", "-S", AGENT, "gang", job.directory / "agent.json", "--owner", owner],
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
        timeout=60,
    )


def gang_pid(job):
    return read_json(str(job.directory / "gang.json"))["pid"]


def gone(job):
    lease = read_json(str(job.directory / "gang.json"))
    return not is_running(lease["pid"], lease["pid_start"], lease["boot_id"])


def test_nodes_that_start_apart_meet_at_one_address(attempt):
    job = attempt("import os; print(os.environ['MASTER_ADDR'], os.environ['MASTER_PORT'])", nnodes=2)
    second = job.start(1)
    until(lambda: (job.record("heartbeat.json", 1) or {}).get("state") in ("setup", "waiting"))
    assert job.log(1) == ""
    first = job.start(0)
    assert [first.wait(60), second.wait(60)] == [0, 0]
    assert job.log(0) == job.log(1)
    addr, port = job.log(0).split()
    assert addr == "127.0.0.1"
    assert 20000 <= int(port) <= 32767


def test_a_slow_setup_on_one_node_is_waited_for(attempt):
    slow = 'test "$ORC_NODE_RANK" = 0 || until test -e ../go; do sleep 0.05; done'
    job = attempt("print('ran')", nnodes=2, setup=[slow], startup_timeout_s=600.0)
    second = job.start(1)
    until(lambda: job.record("heartbeat.json", 1))
    began = time.time()
    first = job.write(startup_timeout_s=0.5).start(0)  # over long before the setup is, but node 1 has started

    def still_waits() -> bool:
        beat = job.record("heartbeat.json", 0) or {"at": 0, "state": ""}
        return beat["state"] == "waiting" and beat["at"] > began + 1.0

    until(still_waits)
    (job.root / "jobs/job-1/go").touch()
    assert [first.wait(60), second.wait(60)] == [0, 0]


@pytest.mark.parametrize("missing", [0, 1])
def test_a_node_that_never_starts_is_a_node_failure(attempt, missing):
    job = attempt("print('never')", nnodes=2, startup_timeout_s=0.5)
    assert job.run(1 - missing) == 1
    record = job.exit(1 - missing)
    assert (record["outcome"], record["peer_lost"]) == ("peer", True)
    assert f"node {missing} did not start within 0.5 s" in record["reason"]
    assert job.log(1 - missing) == ""


@pytest.mark.parametrize("silent", [0, 1])
def test_a_node_that_falls_silent_is_a_node_failure(attempt, silent):
    job = attempt(IDLE, nnodes=3, peer_timeout_s=6.0)
    agents = [job.start(node) for node in range(3)]
    job.until_log("ready", *range(3))
    agents[silent].kill()
    others = [node for node in range(3) if node != silent]
    assert [agents[node].wait(60) for node in others] == [1, 1]
    for node in others:
        record = job.exit(node)
        assert (record["outcome"], record["peer_lost"]) == ("peer", True)
        assert f"node {silent}" in record["reason"]


def test_ranks_that_answer_75_to_a_crash_elsewhere_were_not_preempted(attempt):
    job = attempt(
        """
        import os, signal, sys, time
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
        print("ready", flush=True)
        until = time.monotonic() + (1 if os.environ["RANK"] == "1" else 600)
        while time.monotonic() < until:
            time.sleep(0.1)
        sys.exit(3)
        """,
        nnodes=2,
    )
    assert [process.wait(60) for process in [job.start(0), job.start(1)]] == [3, 3]
    assert job.exit(0)["outcome"] == "peer"


def test_a_gang_detaches_at_once_and_runs_all_nodes(attempt):
    job = attempt(IDLE, nnodes=2)
    assert gang(job).returncode == 0  # its pipes are closed too, though the ranks go on
    job.until_log("ready", *range(2))
    status = Path(f"/proc/{gang_pid(job)}/stat").read_text().rpartition(")")[2].split()
    assert int(status[3]) == gang_pid(job), "it leads a session of its own"
    assert int(status[4]) == 0, "it has no terminal"
    os.kill(gang_pid(job), signal.SIGTERM)
    until(lambda: gone(job))
    assert {job.exit(node)["outcome"] for node in range(2)} == {"preempted"}


def test_a_second_gang_is_turned_away(attempt):
    job = attempt(IDLE)
    assert gang(job).returncode == 0
    second = gang(job)
    assert second.returncode == 76
    assert "held by local:orc-job-1-a1" in second.stderr
    (job.directory / "cancel.json").write_text('{"grace_s": 0}')
    until(lambda: gone(job))
    assert gang(job).returncode == 76, "an attempt that is over stays over"


def test_secrets_brought_by_a_late_copy_do_not_stay(attempt):
    job = attempt("pass", secrets=["TOKEN"])
    (job.directory / "secrets.json").write_text('{"TOKEN": "x"}')
    assert gang(job).returncode == 0
    until(lambda: gone(job))
    (job.directory / "secrets.json").write_text('{"TOKEN": "x"}')
    assert gang(job).returncode == 76
    assert not (job.directory / "secrets.json").exists()


def on_exit(tmp_path):
    """A command that writes down that, and in which environment, it was started."""
    script = "import json, os, sys; print(json.dumps(dict(os.environ)), file=open(sys.argv[1], 'a'))"
    target = tmp_path / "ended"
    return target, {"argv": [sys.executable, "-c", script, str(target)], "env": {"ORC_STATE_DIR": "/state"}}


def test_the_next_pass_is_started_once_when_all_nodes_have_ended(attempt, tmp_path):
    target, command = on_exit(tmp_path)
    job = attempt("pass", nnodes=2, on_exit=command)
    assert gang(job, KEPT="yes", ORC_ATTEMPT_DIR="/another").returncode == 0
    until(lambda: target.exists() and target.read_text().endswith("\n"))
    until(lambda: gone(job))
    (line,) = target.read_text().splitlines()
    env = json.loads(line)
    assert (env["ORC_STATE_DIR"], env["KEPT"]) == ("/state", "yes")
    assert "ORC_ATTEMPT_DIR" not in env, "it is no part of the attempt that has ended"
    assert all(job.record("exit.json", node) for node in range(2))


def test_a_killed_agent_is_noticed_at_once_and_its_node_cleaned_up(attempt, tmp_path):
    target, command = on_exit(tmp_path)
    job = attempt(
        """
        import subprocess, time
        subprocess.Popen(["sleep", "600"], start_new_session=True)
        print("ready", flush=True)
        time.sleep(600)
        """,
        nnodes=2,
        on_exit=command,
        peer_timeout_s=600.0,
    )
    assert gang(job).returncode == 0
    job.until_log("ready", *range(2))
    os.kill(job.record("lease.json", 1)["pid"], signal.SIGKILL)
    until(target.exists, what="the next pass")
    assert job.remains() == []
    assert job.record("exit.json", 1) is None
    assert (job.exit(0)["outcome"], job.exit(0)["peer_lost"]) == ("peer", True)
    assert "the agent of node 1 was killed by SIGKILL" in job.exit(0)["reason"]


def test_nodes_outlive_their_gang_process_and_start_the_next_pass_themselves(attempt, tmp_path):
    target, command = on_exit(tmp_path)
    job = attempt(
        f"""
        import os, time
        print("ready", flush=True)
        while not os.path.exists({str(tmp_path / "go")!r}):
            time.sleep(0.02)
        """,
        nnodes=2,
        on_exit=command,
        secrets=["TOKEN"],
    )
    (job.directory / "secrets.json").write_text('{"TOKEN": "x"}')
    assert gang(job).returncode == 0
    job.until_log("ready", *range(2))
    os.kill(gang_pid(job), signal.SIGKILL)
    (tmp_path / "go").touch()
    until(target.exists, what="the next pass")
    assert {job.exit(node)["outcome"] for node in range(2)} == {"succeeded"}
    assert len(target.read_text().splitlines()) <= 1
    assert not (job.directory / "secrets.json").exists()


def test_two_jobs_never_choose_the_same_port():
    ports = [network.Port() for _ in range(20)]
    try:
        numbers = {port.number for port in ports}
        assert len(numbers) == 20
        only = network.Port(first=min(numbers), last=max(numbers))
        assert only.number not in numbers
        only.close()
        with pytest.raises(LaunchFailure, match="no free TCP port"):
            network.Port(first=ports[0].number, last=ports[0].number)
    finally:
        for port in ports:
            port.close()
    again = network.Port(first=ports[0].number, last=ports[0].number)
    assert again.number == ports[0].number
    again.close()


def test_whoever_is_to_have_a_port_can_listen_on_it_while_it_is_held():
    import socket

    port = network.Port()
    with socket.create_server(("", port.number)), pytest.raises(OSError, match="in use"):
        socket.create_server(("", port.number))
    port.close()


def test_a_port_that_somebody_listens_on_is_not_chosen():
    import socket

    with socket.socket() as listener:
        free = network.Port()
        number = free.number
        free.close()
        listener.bind(("127.0.0.1", number))
        listener.listen()
        with pytest.raises(LaunchFailure):
            network.Port(first=number, last=number)


def test_the_address_of_a_host_whose_name_is_its_loopback_is_its_real_one(monkeypatch):
    import socket

    def resolve(host, *_, **__):
        if host == "192.0.2.1":  # the route to the world
            return [(socket.AF_INET, socket.SOCK_DGRAM, 0, "", ("192.0.2.1", 9))]
        if host == "peer":  # Debian: a host's own name is 127.0.1.1
            return [(socket.AF_INET, socket.SOCK_DGRAM, 0, "", ("127.0.1.1", 9))]
        raise socket.gaierror(f"no such host: {host}")

    class Probe:
        def __init__(self, *_):
            self.where = ""

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

        def connect(self, where):
            self.where = where[0]

        def getsockname(self):
            return ("127.0.0.1" if self.where.startswith("127.") else "10.1.2.3", 5)

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    monkeypatch.setattr(socket, "socket", Probe)
    assert network.own_address(["unknown", "peer"]) == "10.1.2.3"


def test_without_any_route_the_host_name_is_the_address(monkeypatch):
    import socket

    def resolve(*_, **__):
        raise socket.gaierror("no network")

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    assert network.own_address(["peer"]) == os.uname().nodename


def test_an_address_given_by_the_scheduler_is_taken(attempt):
    far = [{"host": "other", "boot_id": "other", "net": "other"}]
    job = attempt("pass", nnodes=2)
    node = Node(AgentConfig(job.config), 0, "x:1", master_host="login-1")
    assert address(node, far) == "login-1"
