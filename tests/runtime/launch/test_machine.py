"""Cores next to a GPU, the progress bar, autocast for own loops, and the names under `orc.runtime.utils`."""

import importlib
import os
import sys
import types

import pytest
import torch

import orc.runtime
from orc.runtime import RunContext, get_grad_scaler, get_mixed_precision_context_manager, tqdm, use_context
from orc.runtime.core import availability
from orc.runtime.core.errors import LaunchError
from orc.runtime.launch import numa
from orc.runtime.launch.device import binds, claim_gpu, select_device
from orc.runtime.launch.environment import JobFacts, LaunchEnvironment
from orc.runtime.parallel.precision.bf16 import PRECISION


def test_the_gpu_of_a_mac_is_for_one_process(monkeypatch, recwarn):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    alone, first, second = (
        LaunchEnvironment("torchrun", rank, world, rank, world) for rank, world in ((0, 1), (0, 2), (1, 2))
    )
    assert select_device(alone).type == "mps"
    assert select_device(alone, cpu=True).type == "cpu"
    assert not recwarn.list
    assert {select_device(launch).type for launch in (first, second)} == {"cpu"}
    (warning,) = recwarn.list
    assert "2 processes train on the CPU" in str(warning.message)


def asking(gpus, local_rank=0, nproc=1):
    return LaunchEnvironment("orc", local_rank, nproc, local_rank, nproc, job=JobFacts(gpus=gpus))


def test_a_rank_that_finds_fewer_gpus_than_its_job_asks_for_says_why_and_what_to_do(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(LaunchError, match=r"asks for 2 GPUs on each node.* use none: this torch .* built for the CPU"):
        select_device(asking(2))
    monkeypatch.setattr(torch.version, "cuda", "12.8")

    def old():
        raise RuntimeError("The NVIDIA driver on your system is too old (found version 11040).")

    monkeypatch.setattr(torch.cuda, "init", old)
    with pytest.raises(LaunchError, match=r"driver on your system is too old.*ORC_USE_CPU=1"):
        select_device(asking(2))
    assert select_device(asking(2), cpu=True).type == "cpu"
    assert select_device(asking(0)).type == "cpu"


def test_a_rank_that_sees_some_of_the_gpus_takes_its_own_or_refuses(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-aaaa")
    assert select_device(asking(2, local_rank=1, nproc=2)) == torch.device("cuda", 0)
    with pytest.raises(LaunchError, match="can use 1: CUDA_VISIBLE_DEVICES is 'GPU-aaaa'"):
        select_device(asking(2))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    with pytest.raises(LaunchError, match="asks for 64 GPUs on each node, and this process can use 8"):
        select_device(asking(64, nproc=64))


def test_a_task_of_slurm_with_several_gpus_of_its_own_takes_the_first(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    tasks = [LaunchEnvironment("slurm", rank, 4, rank, 4) for rank in range(4)]
    for given in ("2", "a100:2"):
        monkeypatch.setenv("SLURM_GPUS_PER_TASK", given)
        assert [select_device(task).index for task in tasks] == [0, 0, 0, 0]
    monkeypatch.delenv("SLURM_GPUS_PER_TASK")
    with pytest.raises(LaunchError, match="local rank 2 of 4 processes on this machine has no GPU"):
        select_device(tasks[2])


def test_bf16_that_a_gpu_emulates_is_named(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla T4")
    emulates = True
    monkeypatch.setattr(
        torch.cuda, "is_bf16_supported", lambda including_emulation=True: including_emulation and emulates
    )
    ctx = types.SimpleNamespace(device=torch.device("cuda", 0), is_local_main=True)
    with pytest.warns(UserWarning, match="Tesla T4 has no bfloat16 and emulates it.*fp16 is fast there"):
        PRECISION().check(ctx)
    emulates = False
    with pytest.raises(LaunchError, match="needs a newer GPU than Tesla T4; use fp16"):
        PRECISION().check(ctx)


def test_two_ranks_on_one_gpu_are_refused_before_nccl_meets_them():
    store = torch.distributed.HashStore()
    cuda = torch.device("cuda", 0)
    for rank, uuid in ((0, "aaaa"), (1, "bbbb"), (0, "aaaa")):
        claim_gpu(store, asking(2, local_rank=rank, nproc=3), cuda, uuid)
    with pytest.raises(LaunchError, match=r"rank 2 has the same GPU as rank 1 \(bbbb of .*start at most one process"):
        claim_gpu(store, asking(2, local_rank=2, nproc=3), cuda, "bbbb")


def test_a_group_of_two_backends_is_bound_to_its_device_where_torch_can_split_it():
    cuda, both = torch.device("cuda", 1), "cpu:gloo,cuda:nccl"
    assert [binds(cuda, both, version) for version in ("2.4.1", "2.9.1+cu128", "2.10.0+cu130")] == [False, False, True]
    assert binds(cuda, "nccl", "2.4.1")
    assert not binds(torch.device("cpu"), "gloo", "2.10.0")
    assert not binds(cuda, "gloo", "2.10.0"), "ranks may share it"


def test_lists_of_cores():
    assert numa.parse_cores("0-3,8,10-11\n") == {0, 1, 2, 3, 8, 10, 11}
    assert numa.parse_cores("\n") == set()


@pytest.fixture
def a_machine(tmp_path, monkeypatch):
    """Two nodes; GPU 0 is attached to node 1. Records the affinity that is set."""
    gpu = tmp_path / "pci/0000:3b:00.0"
    gpu.mkdir(parents=True)
    (gpu / "numa_node").write_text("1\n")
    (tmp_path / "nodes/node1").mkdir(parents=True)
    (tmp_path / "nodes/node1/cpulist").write_text("4-5\n")
    chosen = []
    monkeypatch.setattr(os, "sched_setaffinity", lambda pid, cores: chosen.append(sorted(cores)))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    properties = types.SimpleNamespace(pci_domain_id=0, pci_bus_id=0x3B, pci_device_id=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    real = numa.cores_near
    monkeypatch.setattr(numa, "cores_near", lambda address: real(address, tmp_path / "pci", tmp_path / "nodes"))
    numa.set_numa_affinity.cache_clear()
    yield types.SimpleNamespace(chosen=chosen, gpu=gpu)
    numa.set_numa_affinity.cache_clear()


def test_a_process_runs_next_to_its_gpu(a_machine, caplog):
    caplog.set_level("INFO")
    numa.set_numa_affinity(0)
    numa.set_numa_affinity(0)
    assert a_machine.chosen == [[4, 5]]
    assert not caplog.text
    numa.override_numa_affinity(0, verbose=True)
    assert len(a_machine.chosen) == 2
    assert "runs on the cores [4, 5]" in caplog.text


def test_a_machine_without_nodes_changes_nothing(a_machine):
    (a_machine.gpu / "numa_node").write_text("-1\n")
    numa.override_numa_affinity(0)
    (a_machine.gpu / "numa_node").unlink()
    numa.override_numa_affinity(0)
    assert a_machine.chosen == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="has a GPU")
def test_affinity_needs_a_gpu():
    with pytest.raises(RuntimeError, match="no CUDA device"):
        numa.override_numa_affinity(0)


@pytest.fixture
def bars(monkeypatch):
    """A stand-in for the package tqdm; the keywords of every bar that was made."""
    made = []
    auto = types.ModuleType("tqdm.auto")
    auto.tqdm = lambda *args, **kwargs: made.append(kwargs) or args[0]
    package = types.ModuleType("tqdm")
    package.__file__ = "tqdm.py"
    monkeypatch.setitem(sys.modules, "tqdm", package)
    monkeypatch.setitem(sys.modules, "tqdm.auto", auto)
    availability.is_package.cache_clear()
    yield made
    availability.is_package.cache_clear()


def test_one_bar_per_machine(bars):
    shown = []
    for rank in range(4):
        with use_context(RunContext.fake(rank, 4, nodes=2)):
            assert list(tqdm(range(3), desc="x")) == [0, 1, 2]
            shown.append(not bars[-1]["disable"])
            tqdm(range(3), main_process_only=False)
            assert "disable" not in bars[-1]
            tqdm(range(3), disable=True)
            assert bars[-1]["disable"] is True
    assert shown == [True, False, True, False]


def test_a_bar_without_tqdm_says_what_to_install(monkeypatch):
    monkeypatch.setattr("orc.runtime.observe.progress_bar.is_package", lambda name: False)
    with pytest.raises(ImportError, match="pip install tqdm"):
        tqdm(range(3))


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_autocast_and_scaler_of_the_current_settings(precision, monkeypatch):
    monkeypatch.setenv("ACCELERATE_FP8_BACKEND", "TE")  # autocast needs no library of fp8
    ctx = RunContext.fake()
    ctx.configure({"mixed_precision": precision})
    with use_context(ctx):
        with get_mixed_precision_context_manager(native_amp=True):
            assert torch.mm(torch.ones(1, 1), torch.ones(1, 1)).dtype == torch.bfloat16
        with get_mixed_precision_context_manager():
            assert torch.mm(torch.ones(1, 1), torch.ones(1, 1)).dtype == torch.float32
        assert get_grad_scaler(init_scale=8.0).get_scale() == 8.0
        sharded = get_grad_scaler(distributed_type="FSDP")
        assert type(sharded).__name__ == "ShardedGradScaler"


@pytest.mark.parametrize("path", ["data_loader", "utils.environment", "utils.operations"])
def test_documented_paths_hold_the_same_names(path):
    module = importlib.import_module(f"orc.runtime.{path}")
    for name in module.__all__:
        assert getattr(module, name) is getattr(orc.runtime, name)
