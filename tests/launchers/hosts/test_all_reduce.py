"""Hosts tried in pairs and all together; here all of them are this machine."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from orc.launchers.errors import BackendError
from orc.launchers.hosts import all_reduce, ports
from orc.launchers.hosts.all_reduce import HostSpeed
from orc.launchers.hosts.all_reduce_probe import multiply, partner, places
from orc.launchers.hosts.ports import BlockedConnection, failed_hosts, find_blocked_pairs, peers_of
from orc.launchers.remote.programs import Program, source
from orc.launchers.remote.transport import LocalTransport, Process


def transports(*names: str) -> dict[str, Any]:
    return {name: LocalTransport() for name in names}


PYTHONS = dict.fromkeys("abc", sys.executable)


def test_hosts_that_can_talk_are_fine() -> None:
    assert ports.probe_ports(transports("a", "b", "c"), PYTHONS) == ([], {})


def test_a_python_in_the_home_directory_is_that_of_each_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from orc.launchers.hosts import checks

    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "mine").symlink_to(sys.executable)
    pythons = dict.fromkeys("ab", "~/mine")
    assert ports.probe_ports(transports("a", "b"), pythons) == ([], {})
    facts_by_host = checks.gather_facts(transports("a", "b"), dict.fromkeys("ab", str(tmp_path)), pythons)
    assert [one.error for one in facts_by_host] == [None, None]


class Deaf(LocalTransport):
    """Listens where nobody can connect: its firewall lets only SSH through."""

    def stream_program(self, program: Program, arguments: Sequence[str] = (), **options: Any) -> Process:
        text = source(program.module).replace(
            'print(json.dumps({"port": server', 'server.close(); print(json.dumps({"port": server'
        )
        text = text.replace('server.getsockname()[1], "addresses"', '1, "addresses"')
        address = "reachable_addresses = lambda *_: ['127.0.0.1']"  # the text runs by itself
        text = text.replace("from orc.launchers.agent.network import reachable_addresses", address)
        text = text.replace("from orc.launchers.agent.gpus import gpu_count", "")
        text = text.replace("poll.register(server, select.POLLIN)", "") + "\nmain()\n"
        return super().stream((options["python"], "-I", "-S", "-c", text, *arguments), timeout_s=options["timeout_s"])


def test_a_host_that_nobody_reaches_is_named_with_each_peer() -> None:
    blocked, failed = ports.probe_ports({**transports("a", "b"), "c": Deaf()}, PYTHONS)
    assert failed == {}
    assert sorted((one.source, one.target) for one in blocked) == [("a", "c"), ("b", "c")]
    assert all("refused" in one.reason for one in blocked)
    assert failed_hosts(blocked) == ["c"]
    assert "a to c cannot talk: no connection to a free port" in find_blocked_pairs(blocked, {})[0].what


def test_a_host_that_cannot_be_asked_is_named() -> None:
    blocked, failed = ports.probe_ports(transports("a", "b"), {"a": sys.executable, "b": "/no/python"})
    assert (blocked, list(failed)) == ([], ["b"])
    (finding,) = find_blocked_pairs(blocked, failed)
    assert (finding.level, finding.where) == ("error", "b")


def test_pairs_are_told_once_and_the_failed_hosts_are_few() -> None:
    star = [
        BlockedConnection(a, b, "no answer")
        for a, b in (("n1", "n2"), ("n2", "n1"), ("n2", "n3"), ("n4", "n2"), ("n5", "n6"))
    ]
    assert failed_hosts(star) == ["n2", "n5"]
    texts = [finding.what for finding in find_blocked_pairs(star, {})]
    assert len(texts) == 4
    assert texts[0].startswith("n1 and n2 cannot talk")


def test_many_hosts_are_tried_with_few_connections_and_each_from_several() -> None:
    names = [f"n{number}" for number in range(256)]
    tried = {name: peers_of(names, index) for index, name in enumerate(names)}
    assert sum(len(targets) for targets in tried.values()) <= 256 * 16
    by_target = [sum(name in targets for targets in tried.values()) for name in names]
    assert min(by_target) >= 10
    assert peers_of(names[:4], 1) == ["n0", "n2", "n3"]


@pytest.mark.parametrize("world", [2, 3, 4, 7])
def test_in_a_tournament_everybody_meets_everybody_once(world: int) -> None:
    met = set()
    for turn in range(world + world % 2 - 1):
        for rank in range(world):
            other = partner(rank, world, turn)
            assert partner(other, world, turn) == rank
            met.add(frozenset((rank, other)))
    assert {pair for pair in met if len(pair) == 2} == {frozenset((a, b)) for a in range(world) for b in range(a)}


@pytest.mark.distributed
def test_an_all_reduce_over_all_hosts_is_measured() -> None:
    speeds = all_reduce.run_all_reduce(transports("a", "b"), PYTHONS)
    assert [speed.name for speed in speeds] == ["a", "b"]
    for speed in speeds:
        assert 5 < speed.latency_us < 1e6
        assert speed.mb_s > 1
        assert speed.best_mb_s > 1
        assert speed.gflops > 0.1


def test_a_host_where_the_all_reduce_cannot_run_is_named() -> None:
    with pytest.raises(BackendError, match=r"/no/python") as caught:
        all_reduce.run_all_reduce(transports("a", "b"), {"a": "/no/python", "b": sys.executable})
    assert "command not found" in caught.value.what


def test_a_slow_host_is_named_among_at_least_three() -> None:
    fast, slow = (1000.0, 80.0), (90.0, 10.0)
    speeds = [HostSpeed(name, 50.0, 90.0, *speed) for name, speed in (("a", fast), ("b", slow), ("c", fast))]
    found = all_reduce.find_slow_hosts(speeds)
    assert [(finding.where, finding.level) for finding in found] == [("b", "warning")] * 2
    assert found[0].what == "its network is slow: 90 MB/s at best, the median host has 1000"
    assert found[1].what == "it computes slowly: 10 GFLOP/s, the median host does 80"
    assert all_reduce.find_slow_hosts(speeds[:2]) == []


class Torch:
    """A torch with three GPUs, of which one may be ill."""

    def __init__(self, ill: int | None = None) -> None:
        self.tried: list[int] = []
        self.ill = ill
        self.cuda = SimpleNamespace(device_count=lambda: 3, synchronize=lambda device: None)

    def device(self, kind: str, index: int = 0) -> SimpleNamespace:
        return SimpleNamespace(type=kind, index=index)

    def ones(self, *shape: int, device: SimpleNamespace) -> torch.Tensor:
        self.tried.append(device.index)
        if device.index == self.ill:
            raise RuntimeError("CUDA error: uncorrectable ECC error encountered\nmore")
        return torch.ones(2, 2)


def test_every_gpu_of_a_host_is_tried() -> None:
    double = Torch()
    found = places(double, double.device("cuda"))
    assert [multiply(double, device, 2) > 0 for device in found] == [True] * 3
    assert double.tried == [0, 1, 2]
    assert len(places(double, double.device("cpu"))) == 1
    with pytest.raises(SystemExit, match=r"uncorrectable ECC error encountered$"):
        multiply(Torch(ill=1), found[1], 2)
