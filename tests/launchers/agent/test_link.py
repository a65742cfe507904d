"""Nodes that share no file system: each with a root of its own on this machine, joined by the link."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest
from polling import until

from orc.launchers.agent import network
from orc.launchers.agent.processes import signal_process
from orc.launchers.attempts.confidential import new_link_token
from orc.launchers.attempts.records import merge

from .conftest import guard_of

IDLE = """
import time
print("ready", flush=True)
while True:
    time.sleep(0.1)
"""


def test_nodes_without_shared_files_meet_run_and_end_together(linked):
    all_of_them = linked(
        "import os; print(os.environ['RANK'], os.environ['MASTER_ADDR'], os.environ['MASTER_PORT'])", nnodes=3, nproc=2
    )
    all_of_them.start_all()
    all_of_them.until_over()
    seen = [all_of_them.nodes[rank // 2].log(rank).split() for rank in range(6)]
    assert [s[0] for s in seen] == list("012345")
    assert {s[1] for s in seen} == {"127.0.0.1"}
    assert len({s[2] for s in seen}) == 1
    # Node 0 has everybody's records.
    records = [all_of_them.exit(node, seen_from=0) for node in range(3)]
    assert merge(records, 3).succeeded
    assert sorted(int(r) for record in records for r in record["ranks"]) == list(range(6))
    for job in all_of_them.nodes:
        assert not (job.directory / "link.json").exists()
        assert not list(job.directory.rglob("*.tmp"))


def test_the_interface_of_the_connection_is_given_to_the_ranks(linked):
    script = "import os; print(os.environ['GLOO_SOCKET_IFNAME'], os.environ['NCCL_SOCKET_IFNAME'])"
    both = linked(script, env={"NCCL_SOCKET_IFNAME": "mine"})
    both.start_all()
    both.until_over()
    assert [both.nodes[node].log(node) for node in range(2)] == ["lo mine\n"] * 2


def test_ipv6_leads_to_an_ipv6_master_address(linked):
    both = linked("import os; print(os.environ['MASTER_ADDR'])")
    both.start_all(address="::1")
    both.until_over()
    assert [both.nodes[node].log(node) for node in range(2)] == ["::1\n"] * 2


def test_of_several_addresses_one_that_works_is_taken(linked):
    both = linked("import os; print(os.environ['MASTER_ADDR'])")
    both.start(0)
    port = both.hub["port"]
    # Nobody at home; no route; unknown; the right one.
    addresses = ["127.0.0.2x", "192.0.2.1", "no-such-host.invalid", "127.0.0.1"]
    both.start(1, hub={"port": port, "addresses": addresses})
    both.until_over()
    assert both.nodes[1].log(1) == "127.0.0.1\n"


def test_a_failure_on_one_host_stops_the_others_with_its_status(linked):
    script = """
        import os, sys, time
        print("ready", flush=True)
        time.sleep(0.5)
        while True:
            if os.environ["RANK"] == "2":
                sys.exit(9)
            time.sleep(0.1)
    """
    three = linked(script, nnodes=3)
    three.start_all()
    three.until_over()
    assert (three.exit(2)["outcome"], three.exit(2)["exit_status"]) == ("crash", 9)
    for node in (0, 1):
        assert three.exit(node)["outcome"] == "peer"
        assert "rank 2 exited with 9" in three.exit(node)["reason"]
    verdict = merge([three.exit(node, seen_from=0) for node in range(3)], 3)
    assert (verdict.cause, verdict.first_failure.rank) == ("crash", 2)


@pytest.mark.parametrize("where", [0, 1])
def test_a_cancellation_on_any_host_ends_all(linked, where):
    three = linked(IDLE, nnodes=3)
    three.start_all()
    three.until_ready()
    (three.nodes[where].directory / "cancel.json").write_text('{"grace_s": 1, "reason": "enough"}')
    three.until_over()
    assert {three.exit(node)["outcome"] for node in range(3)} == {"cancelled"}


def test_a_notice_to_one_host_reaches_all(linked):
    both = linked(
        """
        import signal, sys, time
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
        print("ready", flush=True)
        while True:
            time.sleep(0.1)
        """
    )
    both.start_all()
    both.until_ready()
    os.kill(both.lease(1)["pid"], signal.SIGTERM)
    both.until_over()
    assert {both.exit(node)["outcome"] for node in range(2)} == {"preempted"}


@pytest.mark.parametrize("dead", [0, 1])
def test_a_killed_agent_is_noticed_long_before_silence_would_tell(linked, dead):
    three = linked(IDLE, nnodes=3, peer_timeout_s=600.0)
    three.start_all()
    three.until_ready()
    os.kill(three.lease(dead)["pid"], signal.SIGKILL)
    others = [node for node in range(3) if node != dead]
    three.until_over(*others)
    for node in others:
        record = three.exit(node)
        assert (record["outcome"], record["peer_lost"]) == ("peer", True)
        assert f"node {dead}" in record["reason"]
    until(lambda: three.nodes[dead].remains() == [], what="its ranks die with it")


def test_a_killed_process_of_the_link_is_replaced_and_nothing_is_lost(linked, tmp_path):
    go = tmp_path / "go"
    three = linked(
        f"""
        import os, time
        print("ready", flush=True)
        while not os.path.exists({str(go)!r}):
            time.sleep(0.02)
        """,
        nnodes=3,
    )
    three.start_all()
    three.until_ready()
    for node in (0, 2):
        pid = three.process_of_link(node)
        os.kill(pid, signal.SIGKILL)
        until(lambda node=node, pid=pid: three.process_of_link(node) != pid)
    until(lambda: three.link(0).get("connected") == [1, 2], what="both come back")
    go.touch()
    three.until_over()
    assert {three.exit(node, seen_from=0)["outcome"] for node in range(3)} == {"succeeded"}


def test_a_stopped_host_is_lost_after_the_time_out_and_stops_itself(linked):
    both = linked(IDLE, peer_timeout_s=5.0)
    both.start_all()
    both.until_ready()
    pid, link = both.lease(1)["pid"], both.process_of_link(1)
    guard = until(lambda: guard_of(pid))
    for stopped in (pid, link, guard):
        os.kill(stopped, signal.SIGSTOP)
    both.until_over(0)
    assert "node 1 has been silent for 5 s" in both.exit(0)["reason"]
    for woken in (pid, guard):
        os.kill(woken, signal.SIGCONT)
    until(lambda: "stopping: " in both.log(1))  # before the link brings what node 0 has said
    signal_process(link, signal.SIGCONT)
    both.until_over(1)
    assert both.exit(1)["outcome"] == "peer"
    assert "node 1 was stopped for" in both.exit(1)["reason"], "it does not wait for others to be silent again"
    assert both.nodes[1].remains() == []


def test_a_node_that_is_cut_off_stops_itself_although_node_0_has_succeeded(linked):
    both = linked(
        "import os, time\nprint('ready', flush=True)\nwhile os.environ['RANK'] == '1':\n    time.sleep(0.1)",
        peer_timeout_s=5.0,
    )
    both.start_all()
    until(lambda: (both.nodes[1].record("exit.json", 0) or {}).get("outcome") == "succeeded")
    time.sleep(6.0)
    assert not both.over(1), "node 0 stays, and is heard of, as long as another node runs"
    frozen = [both.lease(0)["pid"], both.process_of_link(0)]
    for pid in frozen:
        os.kill(pid, signal.SIGSTOP)
    try:
        both.until_over(1)
    finally:
        for pid in frozen:
            os.kill(pid, signal.SIGCONT)
    assert "node 0 has been silent for 5 s" in both.exit(1)["reason"]
    assert both.nodes[1].remains() == []
    both.until_over(0)


def test_a_node_that_was_cancelled_before_it_started_runs_nothing(attempt):
    job = attempt("print('ran')")
    assert job.run() == 0
    job.write(attempt_dir=str(job.directory.with_name("a2")))  # the working copy is there
    job.directory.joinpath("cancel.json").write_text('{"grace_s": 0, "reason": "cancelled"}')
    assert job.run() == 143
    assert (job.exit()["outcome"], job.exit()["ranks"], job.log()) == ("cancelled", {}, "")


def test_a_token_that_is_not_the_attempts_is_turned_away_on_both_sides(linked):
    both = linked("print('never')", peer_timeout_s=1.0)
    both.start(0)
    assert both.start(1, token=new_link_token())["state"] == "held"
    both.until_over(1)
    assert "node 0 is lost: it cannot be reached: 127.0.0.1" in both.exit(1)["reason"]
    until(lambda: both.link(0).get("connected") == [])
    os.kill(both.lease(0)["pid"], signal.SIGTERM)
    both.until_over(0)
    assert both.nodes[1].log(1) == both.nodes[0].log(0) == ""


def test_a_port_where_nobody_listens_is_named(linked):
    both = linked("print('never')", peer_timeout_s=1.0)
    both.start(1, port=1)
    both.until_over(1)
    assert "127.0.0.1 port 1: Connection refused" in both.exit(1)["reason"]


def test_calls_go_over_the_link_between_any_two_nodes(linked):
    launcher = """
import subprocess, sys
def ssh(*words):
    done = subprocess.run(["ssh", *words], capture_output=True, text=True)
    print(done.returncode, repr(done.stdout), done.stderr, flush=True)
ssh("gpu1", "echo one $ORC_NODE_RANK; exit 3")
ssh("gpu2", "echo two $ORC_NODE_RANK; ssh gpu1 'echo from two; exit 4'")
"""
    command = {
        "spawn": "launcher",
        "primary": "first",
        "remote_shell": True,
        "launcher": ["{python}", "-c", launcher],
        "program": ["{python}", "train.py"],
        "env": {},
    }
    names = [{"name": f"gpu{node}", "address": f"10.0.0.{node}"} for node in range(3)]
    three = linked("pass", nnodes=3, command=command, hosts=names)
    three.start_all()
    three.until_over()
    assert "3 'one 1\\n'" in three.log(0)
    assert "4 'two 2\\nfrom two\\n'" in three.log(0)
    assert {three.exit(node)["outcome"] for node in range(3)} == {"succeeded"}


ELASTIC = {
    "spawn": "launcher",
    # It starts its rank anew when that is killed, as those do that can go on without a node.
    "launcher": ["{python}", "-c", "import subprocess, sys\nwhile subprocess.call(sys.argv[1:]) == -9:\n    pass"],
    "program": ["{python}", "train.py"],
    "env": {"RANK": "{node_rank}", "LOCAL_RANK": "0"},
}


def test_an_elastic_gang_goes_on_without_a_lost_node(linked, tmp_path):
    go = tmp_path / "go"
    script = f"""
        import os, time
        print("ready", flush=True)
        while not os.path.exists({str(go)!r}):
            time.sleep(0.02)
    """
    three = linked(script, nnodes=3, min_nodes=2, command=ELASTIC)
    three.start_all()
    three.until_ready()
    os.kill(three.lease(2)["pid"], signal.SIGKILL)
    until(lambda: "node 2 is lost" in three.log(0) and "going on with 2 nodes" in three.log(0))
    go.touch()
    three.until_over(0, 1)
    records = [three.exit(node, seen_from=0) for node in range(2)]
    assert [record["outcome"] for record in records] == ["succeeded", "succeeded"], three.log(0)
    assert records[0]["lost_nodes"] == [2]
    verdict = merge(records, 3)
    assert verdict.succeeded
    assert verdict.complete


@pytest.mark.parametrize("dead", [[0], [1, 2]])
def test_an_elastic_gang_ends_with_its_first_node_or_with_too_few(linked, dead):
    three = linked(IDLE, nnodes=3, min_nodes=2, command=ELASTIC)
    three.start_all()
    three.until_ready()
    for node in dead:
        os.kill(three.lease(node)["pid"], signal.SIGKILL)
    others = [node for node in range(3) if node not in dead]
    three.until_over(*others)
    for node in others:
        assert (three.exit(node)["outcome"], three.exit(node)["peer_lost"]) == ("peer", True)


def test_a_lost_node_that_comes_back_is_refused_and_stops_itself(linked):
    three = linked(IDLE, nnodes=3, min_nodes=2, command=ELASTIC, peer_timeout_s=5.0)
    three.start_all()
    three.until_ready()
    frozen = [three.lease(2)["pid"], three.process_of_link(2)]
    for pid in frozen:
        os.kill(pid, signal.SIGSTOP)
    until(lambda: "going on with 2 nodes" in three.log(0))
    for pid in frozen:
        os.kill(pid, signal.SIGCONT)
    three.until_over(2)
    assert three.exit(2)["outcome"] == "peer"
    time.sleep(1.0)
    assert not three.over(0), three.log(0)
    assert not three.over(1), three.log(1)


def fill(path: Path) -> None:
    """Until there is no room left."""
    with path.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(b"x" * 4096)


@pytest.fixture
def small_disk():
    """``small_disk(directory)`` puts a file system of 1 MiB there, with what is in it."""
    mounted: list[Path] = []

    def mount(directory: Path) -> None:
        kept = directory.with_name(directory.name + ".kept")
        shutil.copytree(directory, kept)
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", directory], check=True)
        mounted.append(directory)
        shutil.copytree(kept, directory, dirs_exist_ok=True)

    yield mount
    for directory in mounted:
        subprocess.run(["umount", "-l", directory], check=True)


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a file system of 1 MiB")
def test_a_full_disk_on_one_host_is_no_silence(linked, small_disk):
    both = linked(IDLE, peer_timeout_s=5.0)
    small_disk(both.nodes[1].directory)
    both.start_all()
    both.until_ready()
    fill(both.nodes[1].directory / "filler")
    full = time.time()
    until(lambda: (both.nodes[0].record("heartbeat.json", 1) or {}).get("at", 0) > full + 2, what="signs of node 1")
    assert not both.over(0), both.log(0)
    (both.nodes[0].directory / "cancel.json").write_text('{"grace_s": 1}')
    both.until_over()
    assert both.exit(0)["outcome"] == "cancelled"
    assert both.exit(1)["outcome"] == both.exit(1, seen_from=0)["outcome"]


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a file system of 1 MiB")
def test_a_rank_that_fills_the_disk_of_its_host_is_the_reason_on_all(linked, small_disk):
    script = """
        import os, time
        print("ready", flush=True)
        while True:
            print("x" * 5000 if os.environ["RANK"] == "1" else "", flush=True)
            time.sleep(0.001)
    """
    both = linked(script)
    small_disk(both.nodes[1].directory)
    both.start_all()
    both.until_over()
    assert both.exit(1)["outcome"] == both.exit(1, seen_from=0)["outcome"] == "crash"
    assert both.exit(0)["outcome"] == "peer"
    assert merge([both.exit(node, seen_from=0) for node in range(2)], 2).first_failure.rank == 1


def test_addresses_are_those_of_the_kernel():
    found = network.own_addresses()
    assert ("lo", "127.0.0.1") in found
    assert network.interface_of("127.0.0.1") == "lo"
    assert network.interface_of("192.0.2.1") is None
    assert [network.plain(a) for a in ("::ffff:10.0.0.1", "fe80::1%eth0", "10.0.0.1")] == [
        "10.0.0.1",
        "fe80::1",
        "10.0.0.1",
    ]


def test_a_node_that_never_joins_is_a_node_failure(linked):
    both = linked("print('never')", startup_timeout_s=0.5, peer_timeout_s=1.0)
    both.start(0)
    both.until_over(0)
    assert "node 1 did not start within 0.5 s or cannot reach this one" in both.exit(0)["reason"]
