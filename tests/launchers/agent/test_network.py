"""What ranks know each other by, and which network they are held to."""

from __future__ import annotations

import os
import stat

import pytest

from orc.launchers.agent import network as host_network
from orc.launchers.agent.errors import LaunchFailure
from orc.launchers.agent.records import read_json

TELL = """
    import os
    names = ("MASTER_ADDR", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "ORC_TOKEN")
    print(*(os.environ.get(name, "-") for name in names))
    """
ADDRESSES = [("lo", "127.0.0.1"), ("eth0", "192.168.4.7"), ("ib0", "10.1.0.7"), ("ib0", "10.2.0.7"), ("ib0", "fe80::7")]


def said(job, rank=0):
    return job.log(rank).split()


def start_both(job, **environ):
    agents = [job.start(node, **environ) for node in range(2)]
    for one in agents:
        one.communicate(timeout=60)
    return [one.returncode for one in agents]


def test_ranks_of_one_node_are_kept_on_its_loopback_interface(attempt):
    job = attempt(TELL, nproc=2, network={"interface": "no-such-interface"})
    assert job.run(GLOO_SOCKET_IFNAME="mine") == 0
    assert [said(job, rank)[:3] for rank in range(2)] == [["127.0.0.1", "mine", "=lo"]] * 2


def test_each_incarnation_has_a_token_of_its_own_that_all_of_its_ranks_have(attempt):
    job = attempt(TELL, nnodes=2)
    assert start_both(job) == [0, 0]
    tokens = {said(job, rank)[3] for rank in range(2)}
    assert len(tokens) == 1
    (token,) = tokens
    assert len(bytes.fromhex(token)) == 32
    met = job.directory / "rendezvous-r0.json"
    assert stat.S_IMODE(met.stat().st_mode) == 0o600
    assert token not in (job.directory / "agent.json").read_text()
    job.write(nnodes=1, attempt=2, marker="orc-job-1-a2", attempt_dir=str(job.root / "jobs/job-1/a2"))
    assert job.run() == 0
    assert said(job)[3] != token


def test_an_inherited_token_is_not_passed_on(attempt):
    job = attempt(TELL)
    assert job.run(ORC_TOKEN="f" * 64) == 0
    assert said(job)[3] != "f" * 64


def test_hosts_make_the_token_of_their_ranks_from_that_of_their_link(linked):
    both = linked(TELL)
    both.start_all()
    both.until_over()
    first, second = (said(both.nodes[node], node) for node in range(2))
    assert first[3] == second[3]
    assert len(first[3]) == 64
    for job in both.nodes:
        assert "token" not in (read_json(str(job.directory / "rendezvous-r0.json")) or {})


def test_nodes_meet_where_the_network_of_their_job_is(attempt):
    job = attempt(
        TELL, nnodes=2, network={"interface": "lo", "cidr": "127.0.0.0/8"}, env={"NCCL_SOCKET_IFNAME": "mine"}
    )
    assert start_both(job) == [0, 0]
    assert [said(job, rank)[:3] for rank in range(2)] == [["127.0.0.1", "lo", "=lo"]] * 2


def test_nccl_is_given_a_whole_name_and_no_network_of_ssh_beside_infiniband(tmp_path):
    assert host_network.towards("eth1", str(tmp_path)) == {"GLOO_SOCKET_IFNAME": "eth1", "NCCL_SOCKET_IFNAME": "=eth1"}
    (tmp_path / "sys/class/infiniband/mlx5_0").mkdir(parents=True)
    assert host_network.towards("eth1", str(tmp_path)) == {"GLOO_SOCKET_IFNAME": "eth1"}
    assert host_network.towards(None) == {}


def test_gloo_is_given_the_interface_that_leads_to_the_master(monkeypatch):
    monkeypatch.setattr(host_network, "own_addresses", lambda: ADDRESSES)
    routes = {"10.1.0.1": "10.1.0.7", "node0": "192.168.4.7"}
    monkeypatch.setattr(host_network, "own_address", lambda peers: routes[next(iter(peers))])
    assert host_network.facing("10.1.0.1") == {"GLOO_SOCKET_IFNAME": "ib0"}
    assert host_network.facing("node0") == {"GLOO_SOCKET_IFNAME": "eth0"}


def test_a_node_outside_of_the_network_of_its_job_says_so(attempt):
    job = attempt(TELL, nnodes=2, network={"cidr": "203.0.113.0/24"})
    assert start_both(job) == [77, 77]
    record = job.exit(0)
    assert record["outcome"] == "launch"
    assert record["reason"].startswith("network.cidr is 203.0.113.0/24, and no address of this node lies in it")
    assert "lo 127.0.0.1" in record["reason"]


@pytest.mark.parametrize(
    ("network", "found"),
    [
        ({"interface": "eth0"}, ("eth0", "192.168.4.7")),
        ({"interface": "ib0"}, ("ib0", "10.1.0.7")),
        ({"interface": "ib0", "cidr": "10.2.0.0/16"}, ("ib0", "10.2.0.7")),
        ({"cidr": "10.0.0.0/8"}, ("ib0", "10.1.0.7")),
    ],
)
def test_the_network_names_one_address(monkeypatch, network, found):
    monkeypatch.setattr(host_network, "own_addresses", lambda: ADDRESSES)
    assert host_network.allowed_address(network) == found


@pytest.mark.parametrize(
    ("network", "complaint"),
    [
        ({"interface": "ib7"}, "network.interface is ib7, and this node has lo 127.0.0.1, eth0"),
        ({"interface": "eth0", "cidr": "10.0.0.0/8"}, "no address of interface eth0 lies in it"),
    ],
)
def test_a_network_that_is_not_there_is_named_with_what_is(monkeypatch, network, complaint):
    monkeypatch.setattr(host_network, "own_addresses", lambda: ADDRESSES)
    with pytest.raises(LaunchFailure, match=complaint):
        host_network.allowed_address(network)


def test_a_crash_in_c_shows_where_python_was(attempt):
    job = attempt("import ctypes\nctypes.string_at(0)\n")
    assert job.run() != 0
    record = job.exit()
    assert record["first_failure"]["signal"] == "SIGSEGV"
    assert "Fatal Python error: Segmentation fault" in record["first_failure"]["log_tail"]
    assert f'{os.sep}train.py", line 2 in <module>' in record["first_failure"]["log_tail"]
