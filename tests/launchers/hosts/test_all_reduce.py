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
from orc.launchers.hosts import all_reduce, diagnostics
from orc.launchers.hosts.all_reduce import HostSpeed
from orc.launchers.hosts.all_reduce_probe import (
    between_gpus,
    multiply,
    partner,
    places,
    reduce_together,
    to_other_hosts,
)
from orc.launchers.hosts.diagnostics import BlockedConnection, failed_hosts, find_blocked_pairs, peers_of
from orc.launchers.remote.programs import Program, source
from orc.launchers.remote.transport import LocalTransport, Process


def transports(*names: str) -> dict[str, Any]:
    return {name: LocalTransport() for name in names}


PYTHONS = dict.fromkeys("abc", sys.executable)


def test_hosts_that_can_talk_are_fine() -> None:
    assert diagnostics.probe_ports(transports("a", "b", "c"), PYTHONS) == ([], {})


def test_a_python_in_the_home_directory_is_that_of_each_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from orc.launchers.hosts import checks

    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "mine").symlink_to(sys.executable)
    pythons = dict.fromkeys("ab", "~/mine")
    assert diagnostics.probe_ports(transports("a", "b"), pythons) == ([], {})
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
        text = text.replace("from orc.launchers.agent.gpus import gpu_count, nvidia_smi", "")
        text = text.replace("poll.register(server, select.POLLIN)", "") + "\nmain()\n"
        return super().stream((options["python"], "-I", "-S", "-c", text, *arguments), timeout_s=options["timeout_s"])


def test_a_host_that_nobody_reaches_is_named_with_each_peer() -> None:
    blocked, failed = diagnostics.probe_ports({**transports("a", "b"), "c": Deaf()}, PYTHONS)
    assert failed == {}
    assert sorted((one.source, one.target) for one in blocked) == [("a", "c"), ("b", "c")]
    assert all("refused" in one.reason for one in blocked)
    assert failed_hosts(blocked) == ["c"]
    assert "a to c cannot talk: no connection to a free port" in find_blocked_pairs(blocked, {})[0].what


def test_a_host_that_cannot_be_asked_is_named() -> None:
    blocked, failed = diagnostics.probe_ports(transports("a", "b"), {"a": sys.executable, "b": "/no/python"})
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
        self.forgets: int | None = None  # a GPU whose values do not reach the others
        nccl = SimpleNamespace(all_reduce=self.all_reduce)
        self.cuda = SimpleNamespace(device_count=lambda: 3, synchronize=lambda device: None, nccl=nccl)

    def all_reduce(self, pieces: list[torch.Tensor]) -> None:
        total = sum((piece for at, piece in enumerate(pieces) if at != self.forgets), torch.zeros_like(pieces[0]))
        for piece in pieces:
            piece.copy_(total)

    def device(self, kind: str, index: int = 0) -> SimpleNamespace:
        return SimpleNamespace(type=kind, index=index)

    def ones(self, *shape: int, device: SimpleNamespace) -> torch.Tensor:
        self.tried.append(device.index)
        if device.index == self.ill:
            raise RuntimeError("CUDA error: uncorrectable ECC error encountered\nmore")
        return torch.ones(*[2] * len(shape))


def test_every_gpu_of_a_host_is_tried() -> None:
    double = Torch()
    found = places(double, double.device("cuda"))
    assert [multiply(double, device, 2) > 0 for device in found] == [True] * 3
    assert double.tried == [0, 1, 2]
    assert len(places(double, double.device("cpu"))) == 1
    with pytest.raises(SystemExit, match=r"uncorrectable ECC error encountered$"):
        multiply(Torch(ill=1), found[1], 2)


def test_the_gpus_of_a_host_reduce_together_and_what_they_give_is_checked() -> None:
    double = Torch()
    assert reduce_together(double, places(double, double.device("cuda")), 4 << 20) > 0
    double.forgets = 1
    with pytest.raises(SystemExit, match="an all-reduce over the 3 GPUs of this host gives a wrong sum"):
        reduce_together(double, places(double, double.device("cuda")), 4 << 20)
    with pytest.raises(SystemExit, match="over the 3 GPUs of this host: CUDA error: uncorrectable ECC error enc"):
        reduce_together(Torch(ill=1), places(double, double.device("cuda")), 4 << 20)


def test_a_host_that_is_far_below_what_its_hardware_promises_is_named_even_alone() -> None:
    sound = HostSpeed("a", 50.0, 20e3, 21e3, 9e5, 340e3, ("NVLink", 478e3), ("mlx5_0", 50e3))
    ill = HostSpeed("b", 50.0, 20e3, 1100.0, 9e5, 17e3, ("NVLink", 478e3), ("mlx5_0", 50e3))
    assert all_reduce.find_broken_promises([sound, HostSpeed("c", 50.0, 90.0, 80.0, 80.0)]) == []
    found = all_reduce.find_broken_promises([ill])
    assert [(finding.where, finding.level, finding.what) for finding in found] == [
        ("b", "warning", "its GPUs reduce at 17.0 GB/s, where NVLink promises 478"),
        ("b", "warning", "it sends at 1.1 GB/s, where mlx5_0 promises 50"),
    ]


def test_gpus_that_talk_through_the_memory_of_their_host_over_pci_express_are_sound() -> None:
    two_sockets = HostSpeed("a", 50.0, 20e3, 21e3, 9e5, 7e3, ("PCI Express", 31.5e3))
    ill = HostSpeed("b", 50.0, 20e3, 21e3, 9e5, 3e3, ("PCI Express", 31.5e3))
    assert [finding.where for finding in all_reduce.find_broken_promises([two_sockets, ill])] == ["b"]


SMI = """#!/bin/sh
case "$1" in
  nvlink) cat "{place}/nvlink" ;;
  topo) cat "{place}/topo" ;;
  *) printf '4, 16\\n5, 16\\n' ;;
esac
"""
LINKS = """GPU {0}: NVIDIA H100 80GB HBM3 (UUID: GPU-{0})
\t Link 0: 26.562 GB/s
\t Link 1: 26.562 GB/s
"""
TOPOLOGY = """\tGPU0\tGPU1\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID
GPU0\t X \tNV18\tPXB\t0-55\t0\t\tN/A
GPU1\tNV18\t X \tSYS\t0-55\t0\t\tN/A
NIC0\tPXB\tSYS\t X
"""


def test_nvlink_promises_where_it_joins_every_two_gpus_and_else_pci_express(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=":")
    assert between_gpus() is None
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/nvidia-smi").write_text(SMI.format(place=tmp_path))
    (tmp_path / "bin/nvidia-smi").chmod(0o755)
    (tmp_path / "nvlink").write_text(LINKS.format(0) + LINKS.format(1))
    (tmp_path / "topo").write_text(TOPOLOGY)
    assert between_gpus() == ("NVLink", 53124.0)
    (tmp_path / "topo").write_text(TOPOLOGY.replace("NV18", "SYS"))
    assert between_gpus() == ("PCI Express", 16 * 1969.0)  # of the slower one
    (tmp_path / "topo").write_text(TOPOLOGY)
    (tmp_path / "nvlink").write_text(LINKS.format(0) + "GPU 1: NVIDIA H100 (UUID: GPU-1)\n\t Link 0: <inactive>\n")
    assert between_gpus() == ("PCI Express", 16 * 1969.0)


def test_the_network_promises_what_its_fastest_port_that_is_up_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NCCL_IB_DISABLE", raising=False)
    assert to_other_hosts("eth0", str(tmp_path)) is None
    (tmp_path / "class/net/eth0").mkdir(parents=True)
    (tmp_path / "class/net/eth0/speed").write_text("-1\n")  # of a virtual machine
    assert to_other_hosts("eth0", str(tmp_path)) is None
    (tmp_path / "class/net/eth0/speed").write_text("25000\n")
    assert to_other_hosts("eth0", str(tmp_path)) == ("eth0", 3125.0)
    for card, rate, state in (("mlx5_0", "400 Gb/sec (4X NDR)", "4: ACTIVE"), ("mlx5_1", "800 Gb/sec (8X)", "1: DOWN")):
        port = tmp_path / f"class/infiniband/{card}/ports/1"
        port.mkdir(parents=True)
        (port / "rate").write_text(rate + "\n")
        (port / "state").write_text(state + "\n")
    assert to_other_hosts("eth0", str(tmp_path)) == ("mlx5_0", 50000.0)
    monkeypatch.setenv("NCCL_IB_DISABLE", "1")
    assert to_other_hosts("eth0", str(tmp_path)) == ("eth0", 3125.0)
