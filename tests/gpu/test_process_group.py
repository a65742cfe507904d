"""One rank in a process group: NCCL beside gloo, a device mesh, and parameters that ``fully_shard`` has cut."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset

from orc.runtime import Accelerator, AcceleratorState, DataLoaderConfiguration, FullyShardedDataParallelPlugin
from orc.runtime.collectives.exchange import all_gather_flat


def test_a_mesh_opens_a_group_for_the_device_and_for_the_cpu(device):
    accelerator = Accelerator()
    topology = accelerator.ctx.set_topology({"dp_shard": 1}, by="test")
    mesh = topology.mesh
    assert (mesh.device_type, mesh.mesh_dim_names) == (device.type, ("dp_shard",))
    group = mesh.get_group("dp_shard")
    for place in {device, torch.device("cpu")}:
        total = torch.ones(4, device=place)
        dist.all_reduce(total, group=group)
        gathered = torch.empty(4, device=place)
        all_gather_flat(gathered, total, group)
        assert gathered.tolist() == [1.0] * 4
    found = [None]
    dist.all_gather_object(found, "here", group=group)
    assert found == ["here"]
    accelerator.end_training()
    assert not dist.is_initialized()


def test_a_mesh_of_two_dimensions_has_a_group_along_each(device):
    accelerator = Accelerator()
    topology = accelerator.ctx.set_topology({"dp_shard": 1, "tp": 1}, by="test")
    assert topology.mesh.mesh_dim_names == ("dp_shard", "tp")
    for name in ("dp_shard", "tp"):
        for place in {device, torch.device("cpu")}:
            total = torch.ones(4, device=place)
            dist.all_reduce(total, group=topology.mesh.get_group(name))
            assert total.tolist() == [1.0] * 4
    accelerator.end_training()


@pytest.mark.cuda_only
def test_loaders_and_steps_work_in_a_group_that_the_script_opened_with_nccl_alone(device):
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    try:
        rows = torch.arange(24.0).reshape(12, 2)

        class Stream(IterableDataset):
            def __iter__(self):
                return iter(rows)

        for dispatch in (False, True):
            AcceleratorState._reset_state(reset_partial_state=True)
            accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(dispatch_batches=dispatch or None))
            for given in (DataLoader(rows, batch_size=4, shuffle=True), DataLoader(Stream(), batch_size=4)):
                batches = list(accelerator.prepare(given))
                assert all(batch.device == device for batch in batches)
                assert torch.equal(torch.cat(batches).sum(0).cpu(), rows.sum(0))
        model = accelerator.prepare(torch.nn.Linear(2, 2))
        accelerator.backward(model(batches[0]).sum())
    finally:
        dist.destroy_process_group()


@pytest.mark.cuda_only
def test_the_backend_of_the_device_is_nccl():
    accelerator = Accelerator()
    _ = accelerator.ctx.topology.mesh
    assert "cuda:nccl" in str(dist.get_backend_config())
    accelerator.end_training()


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_a_model_that_the_script_has_sharded_trains_like_a_whole_one(device, precision):
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    accelerator = Accelerator(mixed_precision=precision)
    torch.manual_seed(0)
    whole = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 4)).to(device)
    model = fully_shard(copy.deepcopy(whole), mesh=accelerator.ctx.topology.mesh)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.01))
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
    by_hand = torch.optim.AdamW(whole.parameters(), lr=0.01)
    inputs = torch.randn(8, 16, generator=torch.Generator().manual_seed(1)).to(device)
    for _ in range(5):
        loss = model(inputs).square().mean()
        accelerator.backward(loss)
        norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        expected = whole(inputs).square().mean()
        expected.backward()
        wanted = torch.nn.utils.clip_grad_norm_(whole.parameters(), 1.0)
        by_hand.step()
        by_hand.zero_grad()
        tolerance = 1e-5 if precision == "no" else 0.05
        assert loss.item() == pytest.approx(expected.item(), rel=tolerance)
        assert float(norm) == pytest.approx(float(wanted), rel=tolerance)
    accelerator.end_training()


@pytest.mark.parametrize(("version", "offload"), [(1, False), (2, False), (2, True)])
def test_a_model_that_prepare_shards_trains_like_a_whole_one(device, version, offload):
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=version,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["Linear"],
        cpu_offload=offload,
        use_orig_params=True,
    )
    accelerator = Accelerator(fsdp_plugin=plugin)
    torch.manual_seed(0)
    whole = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 4)).to(device)
    model = copy.deepcopy(whole).cpu()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.01))
    by_hand = torch.optim.AdamW(whole.parameters(), lr=0.01)
    inputs = torch.randn(8, 16, generator=torch.Generator().manual_seed(1)).to(device)
    for _ in range(5):
        loss = model(inputs).square().mean()
        accelerator.backward(loss)
        norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        expected = whole(inputs).square().mean()
        expected.backward()
        wanted = torch.nn.utils.clip_grad_norm_(whole.parameters(), 1.0)
        by_hand.step()
        by_hand.zero_grad()
        assert loss.item() == pytest.approx(expected.item(), rel=1e-4)
        assert float(norm) == pytest.approx(float(wanted), rel=1e-4)
    accelerator.end_training()


def test_a_compiled_model_that_is_sharded_trains_like_a_whole_one(device, compiler):
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["Linear"]
    )
    accelerator = Accelerator(fsdp_plugin=plugin, dynamo_backend=compiler)
    torch.manual_seed(0)
    whole = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 4)).to(device)
    model = copy.deepcopy(whole)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.01))
    by_hand = torch.optim.AdamW(whole.parameters(), lr=0.01)
    inputs = torch.randn(8, 16, generator=torch.Generator().manual_seed(1)).to(device)
    for _ in range(5):
        loss = model(inputs).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        expected = whole(inputs).square().mean()
        expected.backward()
        by_hand.step()
        by_hand.zero_grad()
        assert loss.item() == pytest.approx(expected.item(), rel=1e-3)
    accelerator.end_training()


class Unit(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1024, 1024, bias=False, dtype=torch.bfloat16)

    def forward(self, inputs):
        return self.layer(inputs)


@pytest.mark.cuda_only
@pytest.mark.filterwarnings("ignore:.*trained in mixed precision")
def test_sharding_holds_one_unit_whole_on_the_device_and_none_in_float32_on_the_host(allocated):
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["Unit"]
    )
    accelerator = Accelerator(fsdp_plugin=plugin, mixed_precision="bf16")
    model = torch.nn.Sequential(*(Unit() for _ in range(16)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)  # holds the parameters as they were
    size, before = 16 * 4 * 2**20, allocated()  # in float32
    torch.cuda.reset_peak_memory_stats()
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profiler:
        model, optimizer = accelerator.prepare(model, optimizer)
    host = peak = 0
    for event in sorted(profiler.profiler.kineto_results.events(), key=lambda one: one.start_ns()):
        if event.name() == "[memory]" and event.device_type() == torch.autograd.DeviceType.CPU:
            host += event.nbytes()
            peak = max(peak, host)
    assert peak < size / 16
    assert torch.cuda.max_memory_allocated() - before < 1.4 * size, "the shards, and one unit: with all it were twice"
    assert allocated() - before < 1.1 * size
    accelerator.end_training()
