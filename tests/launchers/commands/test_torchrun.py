"""What is rendered for torchrun."""

from __future__ import annotations

import pytest

TWO_NODES = {"nodes": 2, "procs_per_node": 4}


def test_the_static_rendezvous_is_the_one_that_the_agent_published(build) -> None:
    command = build("torchrun", args={"lr": 0.1}, resources=TWO_NODES, grace=45.5)
    assert command.spawn == "launcher"
    assert command.launcher == (
        "{python}",
        "-m",
        "torch.distributed.run",
        "--nnodes={nnodes}",
        "--node-rank={node_rank}",
        "--nproc-per-node={nproc}",
        "--rdzv-backend=static",
        "--master-addr={master_addr}",
        "--master-port={master_port}",
        "--rdzv-id={rdzv_id}",
        "--max-restarts=0",
        "--log-dir={attempt_dir}/node-{node_rank}/launcher",
        "--no-python",
    )
    assert command.program == ("{python}", "train.py", "--lr", "0.1")
    assert command.env == {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "47"}


def test_c10d_launchers_meet_at_node_0_which_is_told_that_it_is_the_host(build) -> None:
    options = {"rdzv_backend": "c10d", "max_restarts": 2, "rdzv_conf": {"join_timeout": 30, "x": "y"}}
    command = build("torchrun", options, resources={"nodes": "2:4"}, grace=10)
    assert command.launcher == (
        "{python}",
        "-m",
        "torch.distributed.run",
        "--nnodes={min_nodes}:{nnodes}",
        "--nproc-per-node={nproc}",
        "--rdzv-backend=c10d",
        "--rdzv-endpoint={master_addr}:{master_port}",
        "--rdzv-id={rdzv_id}",
        "--rdzv-conf=is_host={is_host},join_timeout=30,last_call_timeout=10,close_timeout=10,"
        "keep_alive_interval=2,keep_alive_max_attempt=4,read_timeout=20,x=y",
        "--max-restarts=2",
        "--log-dir={attempt_dir}/node-{node_rank}/launcher",
        "--local-addr={node_addr}",
        "--no-python",
    )
    assert command.env["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] == "1"
    assert command.settle_s > 120  # a round may need its whole join_timeout


def test_a_launcher_that_may_not_restart_ranks_is_not_waited_for(build) -> None:
    usual = build("torchrun").settle_s
    assert build("torchrun", {"rdzv_backend": "c10d"}).settle_s == usual


@pytest.mark.parametrize(
    ("options", "nodes", "elastic"),
    [
        ({"rdzv_backend": "c10d", "max_restarts": 1}, "2:4", True),
        ({"rdzv_backend": "c10d", "max_restarts": 1}, 4, False),
        ({"rdzv_backend": "c10d"}, "2:4", False),
        ({}, "2:4", False),
    ],
)
def test_only_launchers_that_may_restart_ranks_go_on_with_fewer_nodes(build, options, nodes, elastic) -> None:
    assert build("torchrun", options, resources={"nodes": nodes}).elastic is elastic


def test_the_address_that_is_given_stays(build) -> None:
    launcher = build("torchrun", {"rdzv_backend": "c10d", "local_addr": "10.0.0.7"}).launcher
    assert [word for word in launcher if word.startswith("--local-addr")] == ["--local-addr=10.0.0.7"]


def test_ports_and_ways_that_collide_are_never_used(build) -> None:
    for options in ({}, {"rdzv_backend": "c10d"}):
        launcher = " ".join(build("torchrun", options).launcher)
        assert "29500" not in launcher
        assert "29400" not in launcher
        assert "standalone" not in launcher


def test_options_become_flags(build) -> None:
    options = {
        "monitor_interval": 0.5,
        "role": "trainer",
        "rdzv_conf": {"timeout": 60, "a": "b"},
        "virtual_local_rank": True,
    }
    launcher = build("torchrun", options).launcher
    assert launcher[-5:] == (
        "--monitor-interval=0.5",
        "--role=trainer",
        "--rdzv-conf=timeout=60,a=b",
        "--virtual-local-rank",
        "--no-python",
    )
    assert "--virtual-local-rank" not in build("torchrun", {"virtual_local_rank": False}).launcher


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"monitor_intervall": 1}, "unknown option 'monitor_intervall', did you mean 'monitor_interval'?"),
        ({"rdzv_conf": "a=b"}, "option rdzv_conf = 'a=b': expected a mapping"),
        ({"max_restarts": 3}, "option max_restarts needs rdzv_backend: c10d; with a static rendezvous restarted"),
        ({"max_restarts": 3, "rdzv_backend": "static"}, "option max_restarts needs rdzv_backend: c10d"),
        ({"max_restarts": -1, "rdzv_backend": "c10d"}, "option max_restarts = -1: expected at least 0"),
        ({"rdzv_backend": "c10"}, "option rdzv_backend = 'c10': expected one of static, c10d, did you mean 'c10d'?"),
        ({"rdzv_backend": "c10d", "rdzv_conf": {"is_host": 1}}, "option rdzv_conf: is_host cannot be given"),
        ({"rdzv_endpoint": "h:1"}, "option rdzv_endpoint cannot be given: node 0 publishes a free port"),
        ({"nnodes": 3}, "option nnodes cannot be given: it follows from resources.nodes"),
        ({"log_dir": "x"}, "option log_dir cannot be given: each rank's output is in its own log"),
    ],
)
def test_options_that_cannot_be_taken_are_refused(refusal, options: dict[str, object], reason: str) -> None:
    assert refusal("torchrun", options).startswith(reason)
