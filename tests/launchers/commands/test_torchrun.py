"""What is rendered for torchrun."""

from __future__ import annotations

import pytest


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
