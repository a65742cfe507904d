"""The GPU of a rank, on record; here it is a double."""

import json
from types import SimpleNamespace

import pytest
import torch

from orc.runtime.observe import device
from orc.runtime.observe.device import announce, device_facts, device_memory, networks, note_memory, start_line

NAME = "NVIDIA H100 80GB HBM3"


@pytest.fixture
def context(tmp_path, monkeypatch):
    """Rank 9 of two nodes of eight GPUs, in a job."""
    properties = SimpleNamespace(name=NAME, uuid="GPU-aaaa", pci_domain_id=0, pci_bus_id=0x3B, pci_device_id=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 27, 3))
    (tmp_path / "node-1").mkdir()
    job = SimpleNamespace(attempt_dir=str(tmp_path), restart=2)
    return SimpleNamespace(
        rank=9, world_size=16, local_world_size=8, node_rank=1, device=torch.device("cuda", 1),
        env=SimpleNamespace(job=job),
    )  # fmt: skip


@pytest.fixture
def system(tmp_path):
    """/sys of a machine with four InfiniBand cards, two on each NUMA node."""
    place = tmp_path / "sys" / "bus/pci/devices/0000:3b:00.0"
    place.mkdir(parents=True)
    (place / "numa_node").write_text("1\n")
    for number in range(4):
        card = tmp_path / "sys" / f"class/infiniband/mlx5_{number}/device"
        card.mkdir(parents=True)
        (card / "numa_node").write_text(f"{number // 2}\n")
    return tmp_path / "sys"


def test_the_line_says_which_gpu_it_is_and_what_nccl_goes_over(context, system):
    assert start_line(device_facts(context, system)) == (
        f"orc: rank 9 of 16 trains on {NAME} (GPU-aaaa, PCI 0000:3b:00.0, NUMA node 1), NCCL 2.27.3 over mlx5_2, mlx5_3"
    )
    context.world_size = context.local_world_size  # of one node: nothing goes over a network
    assert start_line(device_facts(context, system)).endswith("NUMA node 1), NCCL 2.27.3")
    context.rank, context.world_size, context.local_world_size = 0, 1, 1
    alone = start_line(device_facts(context, system.parent))  # and a machine that tells of no NUMA nodes
    assert alone == f"orc: rank 0 of 1 trains on {NAME} (GPU-aaaa, PCI 0000:3b:00.0)"


def test_without_infiniband_nccl_goes_over_the_interface_that_it_is_held_to(system, monkeypatch):
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "=eth1")
    assert networks(0, system) == ["mlx5_0", "mlx5_1"]
    assert networks(None, system) == ["mlx5_0", "mlx5_1", "mlx5_2", "mlx5_3"]
    assert networks(0, system.parent) == ["eth1"]
    monkeypatch.setenv("NCCL_IB_DISABLE", "1")
    assert networks(0, system) == ["eth1"]


def test_a_rank_of_a_job_leaves_its_gpu_and_then_its_memory_on_record(context, tmp_path, monkeypatch, capsys):
    for _ in range(2):  # a second Accelerator says nothing twice
        announce(context)
    said = capsys.readouterr().err
    assert said.startswith(f"orc: rank 9 of 16 trains on {NAME} (GPU-aaaa, PCI 0000:3b:00.0")
    assert said.count("\n") == 1
    stats = {"allocated_bytes.all.current": 3, "reserved_bytes.all.current": 5, "allocated_bytes.all.peak": 4}
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda device: stats)
    note_memory(context, device_memory(context.device))
    record = json.loads((tmp_path / "node-1" / "device-9.json").read_text())
    assert (record["uuid"], record["pci"], record["restart"]) == ("GPU-aaaa", "0000:3b:00.0", 2)
    assert [record[name] for name in device.MEMORY] == [3, 5, 4]
    assert [path.name for path in (tmp_path / "node-1").iterdir()] == ["device-9.json"]


def test_on_a_cpu_and_outside_of_a_job_nothing_is_said(context, tmp_path, capsys):
    context.device = torch.device("cpu")
    announce(context)
    note_memory(context, device_memory(context.device))
    context.device, context.env.job.attempt_dir = torch.device("cuda"), None
    announce(context)
    assert capsys.readouterr().err == ""
    assert list((tmp_path / "node-1").iterdir()) == []
