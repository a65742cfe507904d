"""Training on a device: placement, precision, the loss scale, compiling, metrics, memory."""

import copy
import json
import os
import time
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from orc.runtime import (
    Accelerator,
    AcceleratorState,
    DataLoaderConfiguration,
    GradScalerKwargs,
    ProfileKwargs,
    TorchDynamoPlugin,
    find_executable_batch_size,
    get_max_memory,
    release_memory,
)
from orc.runtime.launch.numa import cores_near, override_numa_affinity, pci_address


def samples(count=64):
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(count, 8, generator=generator)
    return TensorDataset(inputs, inputs.sum(1, keepdim=True))


def network():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))


def train(accelerator, model, steps=20, clip=None):
    """Losses of *steps* steps."""
    model = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(samples(), batch_size=16))
    losses = []
    while len(losses) < steps:
        for inputs, wanted in loader:
            with accelerator.accumulate(model):
                loss = torch.nn.functional.mse_loss(model(inputs), wanted)
                accelerator.backward(loss)
                if clip:
                    accelerator.clip_grad_norm_(model.parameters(), clip)
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.item())
    return losses[:steps]


def by_hand(device, model, steps=20):
    model = copy.deepcopy(model).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses = []
    while len(losses) < steps:
        for inputs, wanted in DataLoader(samples(), batch_size=16):
            loss = torch.nn.functional.mse_loss(model(inputs.to(device)), wanted.to(device))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return losses[:steps]


def test_training_gives_the_losses_of_a_loop_by_hand(device):
    accelerator = Accelerator()
    assert accelerator.device == device
    assert train(accelerator, network()) == pytest.approx(by_hand(device, network()), rel=1e-5)


@pytest.mark.parametrize("pinned", [False, pytest.param(True, marks=pytest.mark.cuda_only)])
@pytest.mark.parametrize("workers", [0, 2])
def test_batches_come_to_the_device_whole_and_in_order(device, pinned, workers):
    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(non_blocking=pinned))
    given = DataLoader(samples(50), batch_size=16, pin_memory=pinned, num_workers=workers)
    rows = []
    for inputs, wanted in accelerator.prepare(given):
        assert inputs.device == wanted.device == device
        rows.append(inputs.cpu())
    assert torch.equal(torch.cat(rows), samples(50).tensors[0])


def slow_sums(loader, device, cycles):
    """The sum of each batch, which the device begins to compute long after the host has let go of the batch."""
    sums = []
    for batch in loader:
        if device.type == "cuda":
            torch.cuda._sleep(cycles)
        sums.append(batch.sum(dtype=torch.float64))
        del batch
    return sums


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("prefetched", [True, False])
def test_a_batch_keeps_its_values_until_the_device_has_read_them(device, prefetched, workers):
    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(prefetch_to_device=prefetched))
    rows = torch.randn(32, 1 << 18)
    given = DataLoader(rows, batch_size=2, pin_memory=device.type == "cuda", num_workers=workers)
    sums = slow_sums(accelerator.prepare(given), device, 10_000_000)
    assert torch.stack(sums).tolist() == pytest.approx(rows.view(16, -1).sum(1, dtype=torch.float64).tolist())


@pytest.mark.cuda_only
def test_a_copy_beside_a_step_takes_none_of_its_time(device, figure):
    batches = [torch.full((1 << 24,), float(number)).pin_memory() for number in range(8)]  # 64 MiB each
    for name, prefetched in (("in front of it", False), ("beside it", True)):
        accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(prefetch_to_device=prefetched))
        loader = accelerator.prepare(DataLoader(batches, batch_size=None, pin_memory=True))
        for _ in range(2):
            torch.cuda.synchronize()
            began = time.perf_counter()
            sums = slow_sums(loader, device, 10_000_000)
            torch.cuda.synchronize()
            took = time.perf_counter() - began
        assert [value.item() for value in sums] == [float(number << 24) for number in range(8)]
        figure(f"a step whose batch of 64 MiB is copied {name}", 1000 * took / 8, "ms")
        AcceleratorState._reset_state()


def test_a_dispatched_stream_comes_to_the_device(device):
    class Rows(IterableDataset):
        def __iter__(self):
            return iter(samples(20).tensors[0])

    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(dispatch_batches=True))
    batches = list(accelerator.prepare(DataLoader(Rows(), batch_size=8)))
    assert all(batch.device == device for batch in batches)
    assert torch.equal(torch.cat(batches).cpu(), samples(20).tensors[0])


def test_bf16_computes_in_bf16_and_hands_out_float32(device):
    accelerator = Accelerator(mixed_precision="bf16")
    seen = []

    class Probe(torch.nn.Module):
        def forward(self, inputs):
            seen.append(inputs.dtype)
            return inputs

    plain = network()
    model = accelerator.prepare(torch.nn.Sequential(*copy.deepcopy(plain), Probe()))
    output = model(samples().tensors[0].to(device))
    assert (seen, output.dtype) == ([torch.bfloat16], torch.float32)
    assert all(parameter.dtype == torch.float32 for parameter in model.parameters())
    assert train(accelerator, plain) == pytest.approx(by_hand(device, plain), rel=0.1, abs=0.02)


@pytest.mark.cuda_only
def test_fp16_skips_steps_that_overflow_and_halves_the_scale(device):
    accelerator = Accelerator(
        mixed_precision="fp16", kwargs_handlers=[GradScalerKwargs(init_scale=1024.0, growth_interval=1000)]
    )
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)
    inputs = samples().tensors[0].to(device)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    accelerator.backward(model(inputs).sum() * float("inf"))
    optimizer.step()
    schedule.step()
    assert optimizer.step_was_skipped
    assert accelerator.scaler.get_scale() == 512.0
    assert schedule.get_last_lr() == [0.1]
    assert all(torch.equal(one, other) for one, other in zip(before, model.parameters(), strict=True))
    optimizer.zero_grad()
    accelerator.backward(model(inputs).mean())
    norm = accelerator.clip_grad_norm_(model.parameters(), 1e6)
    assert 0 < norm.item() < 1e3, "unscaled"
    optimizer.step()
    schedule.step()
    assert not optimizer.step_was_skipped
    assert schedule.get_last_lr() == [0.05]


@pytest.mark.cuda_only
def test_fp16_learns():
    accelerator = Accelerator(mixed_precision="fp16", kwargs_handlers=[GradScalerKwargs(init_scale=1024.0)])
    losses = train(accelerator, network(), 40, clip=1.0)
    assert losses[-1] < losses[0] / 2


def test_a_compiled_model_learns_the_same(device, compiler):
    losses = train(Accelerator(dynamo_backend=compiler), network())
    assert losses == pytest.approx(by_hand(device, network()), rel=1e-3)


def test_sums_over_items_and_accumulation_stay_on_the_device(device):
    accelerator = Accelerator(gradient_accumulation_steps=2)
    model = network()
    expected = copy.deepcopy(model).to(device)
    model, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
    inputs = samples().tensors[0].to(device)
    for part in (inputs[:10], inputs[10:64]):
        with accelerator.accumulate(model):
            count = torch.tensor(len(part), device=device)
            accelerator.backward(model(part).square().sum(), normalize_by=count)
            if accelerator.sync_gradients:
                norm = accelerator.clip_grad_norm_(model.parameters(), 1e9)
    expected(inputs).square().mean().backward()
    for mine, theirs in zip(model.parameters(), expected.parameters(), strict=True):
        assert torch.allclose(mine.grad, theirs.grad, rtol=1e-4, atol=1e-5)
    assert norm.device == device


def test_gathered_metrics_are_on_the_device_and_complete(device):
    accelerator = Accelerator()
    rows, texts = [], []
    for inputs, _ in accelerator.prepare(DataLoader(samples(50), batch_size=16)):
        rows.append(accelerator.gather_for_metrics(inputs))
        texts += accelerator.gather_for_metrics([str(len(inputs))], use_gather_object=True)
    assert all(row.device == device for row in rows)
    assert (sum(map(len, rows)), texts) == (50, ["16", "16", "16", "2"])
    assert accelerator.reduce(torch.ones(2, device=device), "mean").device == device


def test_memory_comes_back(device, allocated):
    accelerator = Accelerator()
    before = allocated()
    model = torch.nn.Linear(1024, 1024, bias=False)
    optimizer = torch.optim.AdamW(model.parameters())
    model, optimizer = accelerator.prepare(model, optimizer)
    accelerator.backward(model(torch.ones(4, 1024, device=device)).sum())
    optimizer.step()
    if device.type == "cuda":
        assert allocated() - before > 12 * 2**20, "weights, gradients, two moments"
    model, optimizer = accelerator.free_memory(model, optimizer)
    model, optimizer = release_memory(model, optimizer)
    assert allocated() - before < 2**20


@pytest.mark.cuda_only
def test_a_batch_that_does_not_fit_is_made_smaller_until_it_does(device):
    tried = []
    room = torch.cuda.mem_get_info(device)[1]

    @find_executable_batch_size(starting_batch_size=8)
    def allocate(batch_size):
        tried.append(batch_size)
        torch.empty(batch_size * (room // 4), dtype=torch.uint8, device=device)
        return batch_size

    found = allocate()
    assert tried == [8, 7, 6, 5, 4, 3][: len(tried)], "a tenth smaller each time, rounded down"
    assert 0 < found == tried[-1] < 4, "less than the whole memory"


@pytest.mark.cuda_only
def test_the_profiler_sees_kernels(device, tmp_path):
    accelerator = Accelerator()
    handler = ProfileKwargs(activities=["cpu", "cuda"], output_trace_dir=tmp_path)
    with accelerator.profile(handler) as profiler:
        torch.ones(256, 256, device=device) @ torch.ones(256, 256, device=device)
        torch.cuda.synchronize()
    assert any(event.device_type.name == "CUDA" for event in profiler.events())
    assert list(tmp_path.glob("profile_*.json"))


@pytest.mark.cuda_only
def test_the_memory_of_the_device_is_known(device):
    free = get_max_memory()
    assert 0 < free[device.index] <= torch.cuda.mem_get_info(device)[1]


def test_memory_stays_what_it_was_after_the_first_steps(device, allocated):
    accelerator = Accelerator(gradient_accumulation_steps=2)
    model = network()
    model, optimizer, loader = accelerator.prepare(
        model, torch.optim.AdamW(model.parameters()), DataLoader(samples(), batch_size=16)
    )
    taken = []
    for _ in range(50):
        for inputs, wanted in loader:
            with accelerator.accumulate(model):
                loss = torch.nn.functional.mse_loss(model(inputs), wanted)
                accelerator.backward(loss)
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
        accelerator.gather_for_metrics(loss.detach())
        taken.append(allocated())
    assert len(taken) == 50
    assert max(taken[5:]) == min(taken[5:])


@pytest.mark.cuda_only
def test_a_run_opens_no_context_on_another_device(device):
    others = [index for index in range(torch.cuda.device_count()) if index != device.index]
    if not others:
        pytest.skip("there is one device")
    train(Accelerator(), network(), 4, clip=1.0)
    assert [torch._C._cuda_hasPrimaryContext(index) for index in others] == [False] * len(others)


# ---- CUDA graphs, while a thread beside them writes metrics


@pytest.fixture
def measured(monkeypatch, tmp_path):
    """Lines of ``metrics.jsonl``, which this test's run writes as often as it can, once the run has ended."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ORC_METRICS", "1")
    monkeypatch.setenv("ORC_METRICS_INTERVAL_S", "0.05")
    return lambda: [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.cuda_only
def test_a_step_that_is_captured_beside_metrics_replays(device, measured):
    accelerator = Accelerator()
    model = network()
    model, optimizer, loader = accelerator.prepare(
        model, torch.optim.SGD(model.parameters(), lr=0.05), DataLoader(samples(), batch_size=16, pin_memory=True)
    )
    inputs, wanted = torch.zeros(16, 8, device=device), torch.zeros(16, 1, device=device)

    def forward_and_backward():
        loss = torch.nn.functional.mse_loss(model(inputs), wanted)
        accelerator.backward(loss)
        return loss

    def captured():
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                optimizer.zero_grad()
                forward_and_backward()
        torch.cuda.current_stream().wait_stream(side)
        optimizer.zero_grad()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            loss = forward_and_backward()
            began = time.monotonic()
            while time.monotonic() < began + 0.06:  # the thread looks at the run meanwhile
                pass
        return graph, loss

    losses = []
    while len(losses) < 50:
        for rows, targets in loader:
            inputs.copy_(rows)
            wanted.copy_(targets)
            if len(losses) < 20:
                graph, loss = captured()
            graph.replay()
            optimizer.step()
            losses.append(loss.item())
    accelerator.end_training()
    assert losses[:50] == pytest.approx(by_hand(device, network(), 50), rel=1e-3)
    assert measured()


@pytest.mark.cuda_only
def test_a_model_that_is_compiled_to_cuda_graphs_learns_beside_metrics(device, compiler, measured):
    accelerator = Accelerator(dynamo_plugin=TorchDynamoPlugin(backend=compiler, mode="reduce-overhead"))
    losses = train(accelerator, network(), 50)
    accelerator.end_training()
    assert losses == pytest.approx(by_hand(device, network(), 50), rel=1e-3)
    assert measured()


# ---- figures, which no test compares with anything


@pytest.mark.cuda_only
def test_a_step_costs_no_more_launches_than_one_by_hand(device, figure):
    accelerator = Accelerator()
    model, twin = network(), network().to(device)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    by_hand = torch.optim.AdamW(twin.parameters())
    inputs = samples().tensors[0].to(device)

    def prepared_step():
        accelerator.backward(model(inputs).square().mean())
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    def plain_step():
        twin(inputs).square().mean().backward()
        torch.nn.utils.clip_grad_norm_(twin.parameters(), 1.0)
        by_hand.step()
        by_hand.zero_grad()

    def launches(step):
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
            step()
            torch.cuda.synchronize()
        return sum(event.device_type.name == "CUDA" for event in profiler.events())

    taken: dict[str, list[float]] = {"orc": [], "by hand": []}
    for _ in range(5):
        for name, step in (("orc", prepared_step), ("by hand", plain_step)):
            step()
            torch.cuda.synchronize()
            began = time.perf_counter()
            for _ in range(100):
                step()
            torch.cuda.synchronize()
            taken[name].append((time.perf_counter() - began) / 100)
    for name, times in taken.items():
        figure(f"a step of a tiny model, {name}", 1e6 * sorted(times)[2], "us")
    mine, theirs = launches(prepared_step), launches(plain_step)
    figure("kernels of such a step, orc", mine, "")
    figure("kernels of such a step, by hand", theirs, "")
    assert mine <= theirs


@pytest.mark.cuda_only
def test_a_process_stays_on_the_cores_near_its_gpu(device):
    address = pci_address(device.index)
    assert Path("/sys/bus/pci/devices", address).exists()
    before = os.sched_getaffinity(0)
    try:
        override_numa_affinity(device.index)
        assert os.sched_getaffinity(0) == (cores_near(address) & before or before)
    finally:
        os.sched_setaffinity(0, before)
