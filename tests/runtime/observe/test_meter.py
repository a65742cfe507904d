"""What is counted: steps, samples, tokens, waits and operations of the training loop, and nothing else."""

import itertools
import json
import time
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from orc.runtime import Accelerator, AcceleratorState
from orc.runtime.core.context import reset_default
from orc.runtime.observe import meter, reporter, watch
from orc.runtime.observe.flops import FlopCount, known_peak, peak_tflops
from orc.runtime.observe.reporter import combine


@pytest.fixture(autouse=True)
def job(tmp_path, monkeypatch):
    """A job directory; metrics are on in it."""
    for name in ("RANK", "WORLD_SIZE", "ORC_ATTEMPT_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("ORC_JOB_DIR", str(tmp_path))
    monkeypatch.setenv("ORC_ATTEMPT", "3")
    monkeypatch.setenv("ORC_METRICS_INTERVAL_S", "600")  # one line, at the end
    monkeypatch.setattr(reporter, "FIRST_WINDOW_S", 600.0)
    AcceleratorState._reset_state()
    reset_default()
    yield tmp_path
    watch.close_all()


def lines(job):
    path = job / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


class Clock:
    """Time that passes when a test says so: what else the machine does makes no step longer."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds


@pytest.fixture
def clock(monkeypatch):
    """What steps are measured with."""
    clock = Clock()
    monkeypatch.setattr(meter, "_clock", clock)
    monkeypatch.setattr(watch, "time", SimpleNamespace(monotonic=time.monotonic, perf_counter=clock))
    return clock


class Slow(Dataset):
    def __init__(self, items, wait_s, clock):
        self.items, self.wait_s, self.clock = items, wait_s, clock

    def __len__(self):
        return len(self.items)

    def __getitem__(self, index):
        self.clock.sleep(self.wait_s)
        return self.items[index]


def prepared(data, batch_size=4, width=8, **options):
    accelerator = Accelerator(cpu=True, **options)
    model = nn.Linear(width, 16, bias=False)
    objects = (model, torch.optim.SGD(model.parameters(), 0.01), DataLoader(data, batch_size=batch_size))
    return accelerator, *accelerator.prepare(*objects)


def test_a_run_leaves_a_line_about_itself(job, clock):
    accelerator, model, optimizer, loader = prepared(TensorDataset(torch.randn(40, 8)))
    for _ in range(2):
        for (x,) in loader:
            accelerator.backward(model(x).square().mean())
            optimizer.step()
            optimizer.zero_grad()
            clock.sleep(0.005)
    accelerator.end_training()
    [line] = lines(job)
    assert (line["attempt"], line["step"], line["epoch"], line["ranks"], line["world_size"]) == (3, 20, 1, 1, 1)
    assert line["steps"] == 19  # the one whose operations were counted is slower and not timed
    assert line["step_s"] == pytest.approx(0.005)
    assert line["samples_per_s"] == pytest.approx(4 / line["step_s"], rel=1e-3)
    assert line["tokens_per_s"] is None
    assert line["loss"] > 0
    # y = x W: 2 * 4 * 8 * 16 forward, the same for W's gradient; x needs none
    assert line["tflops"] == pytest.approx(2 * (2 * 4 * 8 * 16) / line["step_s"] / 1e12, rel=1e-3)
    assert line["mfu"] is None  # nobody knows a CPU's peak


def test_operations_of_a_whole_accumulation_window_are_counted(job, monkeypatch):
    monkeypatch.setenv("ORC_PEAK_TFLOPS", "0.001")
    accelerator, model, optimizer, loader = prepared(
        TensorDataset(torch.randn(40, 8)), batch_size=2, gradient_accumulation_steps=5
    )
    for (x,) in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(x).square().mean())
            optimizer.step()
            optimizer.zero_grad()
    accelerator.end_training()
    assert accelerator._watching.meter.flops == 5 * 2 * (2 * 2 * 8 * 16)
    [line] = lines(job)
    assert line["steps"] == 3
    assert line["samples_per_s"] == pytest.approx(10 / line["step_s"], rel=1e-3)
    assert line["mfu"] == pytest.approx(line["tflops"] / 0.001, rel=1e-3)


def test_waiting_for_data_is_told_from_computing(job, clock):
    accelerator, model, optimizer, loader = prepared(Slow(torch.randn(40, 8), 0.005, clock))
    for x in loader:  # 20 ms of reading, 5 ms of work
        accelerator.backward(model(x).square().mean())
        optimizer.step()
        clock.sleep(0.005)
    accelerator.end_training()
    assert lines(job)[-1]["data_wait"] == pytest.approx(0.8)


def test_evaluation_and_saving_are_no_part_of_steps(job, tmp_path, clock):
    accelerator, model, optimizer, loader = prepared(TensorDataset(torch.randn(40, 8)))
    evaluation = accelerator.prepare(DataLoader(Slow(torch.randn(10, 8), 0.02, clock)))
    accelerator.register_save_state_pre_hook(lambda *_: clock.sleep(0.5))
    for index, (x,) in enumerate(loader):
        accelerator.backward(model(x).square().mean())
        optimizer.step()
        clock.sleep(0.01)
        if index == 5:
            for y in evaluation:
                model(y)
            accelerator.save_state(tmp_path / "saved")
    accelerator.end_training()
    line = lines(job)[-1]
    assert line["steps"] == 9
    assert line["step_s"] == pytest.approx(0.01)
    assert line["slowest_step_s"] == pytest.approx(0.01)
    assert line["other_s"] == pytest.approx(0.2 + 0.5)


def test_tokens_are_counted_where_batches_name_them(job):
    data = [{"input_ids": torch.zeros(7, dtype=torch.long), "x": torch.randn(8)} for _ in range(40)]
    accelerator, model, optimizer, loader = prepared(data)
    for batch in loader:
        accelerator.backward(model(batch["x"]).square().mean())
        optimizer.step()
    accelerator.end_training()
    line = lines(job)[-1]
    assert line["tokens_per_s"] == pytest.approx(28 / line["step_s"], rel=1e-3)


def test_a_script_can_tell_its_tokens_itself(job):
    data = [{"input_ids": torch.zeros(7, dtype=torch.long), "x": torch.randn(8)} for _ in range(40)]
    accelerator, model, optimizer, loader = prepared(data)
    for batch in loader:
        accelerator.count_tokens(5)
        accelerator.backward(model(batch["x"]).square().mean())
        optimizer.step()
    accelerator.end_training()
    line = lines(job)[-1]
    # the first batch was looked at before the script could say that it counts itself
    assert line["tokens_per_s"] * line["step_s"] * line["steps"] == pytest.approx(9 * 5 + 28, rel=1e-3)


def test_the_last_batch_counts_the_samples_it_has(job):
    accelerator, _, _, loader = prepared(TensorDataset(torch.randn(10, 8)))
    loader.end_of_dataloader, loader.remainder = True, 2
    meter = accelerator._watching.meter
    passing = meter.timed(loader, iter([1]))
    next(passing)
    meter.step(loader)
    assert meter.samples == 2


def test_a_loop_that_is_left_early_leaves_no_counter_behind(job):
    accelerator, model, optimizer, loader = prepared(TensorDataset(torch.randn(40, 8)))
    for _ in range(3):
        for index, (x,) in enumerate(loader):
            accelerator.backward(model(x).square().mean())
            if index == 1:
                break
            optimizer.step()
    assert accelerator._watching.meter._passes == []
    from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

    assert _get_current_dispatch_mode_stack() == []


def test_results_are_bitwise_the_same_with_and_without_metrics(job, monkeypatch):
    weights = []
    for metrics in ("yes", "no"):
        monkeypatch.setenv("ORC_METRICS", metrics)
        AcceleratorState._reset_state()
        reset_default()
        torch.manual_seed(0)
        accelerator, model, optimizer, loader = prepared(TensorDataset(torch.randn(40, 8)))
        for (x,) in loader:
            accelerator.backward(model(x).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        assert (accelerator._watching.meter is None) == (metrics == "no")
        weights.append(model.weight.detach().clone())
        accelerator.end_training()
    assert torch.equal(*weights)


def test_compiled_models_are_not_counted(job):
    accelerator, model, optimizer, loader = prepared(TensorDataset(torch.randn(40, 8)), dynamo_backend="eager")
    for (x,) in loader:
        accelerator.backward(model(x).square().mean())
        optimizer.step()
    accelerator.end_training()
    assert accelerator._watching.meter.flops is None
    assert lines(job)[-1]["tflops"] is None


def test_operations_of_attention_are_counted():
    count = FlopCount()
    q = torch.randn(2, 4, 16, 8)
    count.start()
    with nn.attention.sdpa_kernel(nn.attention.SDPBackend.MATH):
        nn.functional.scaled_dot_product_attention(q, q, q)
    assert count.stop() == 2 * (2 * 2 * 4 * 16 * 16 * 8)
    assert not count.counting


def test_peaks_are_configured_or_known():
    assert peak_tflops(torch.device("cpu")) is None
    assert peak_tflops(torch.device("cpu"), 3.5) == 3.5


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989.4),
        ("NVIDIA H100 PCIe", 756.0),
        ("NVIDIA A100-SXM4-40GB", 312.0),
        ("NVIDIA A10", 125.0),
        ("NVIDIA A10G", 70.0),
        ("NVIDIA L40S", 362.1),
        ("Tesla T4", 65.0),
        ("Tesla V100-SXM2-16GB", 125.0),
        ("NVIDIA GeForce RTX 4090", 165.2),
        ("AMD Instinct MI300X", 1307.4),
        ("NVIDIA RTX A4000", None),
        ("NVIDIA RTX A1000", None),
        ("NVIDIA T400 4GB", None),
        ("NVIDIA GeForce RTX 4090 D", None),
        ("NVIDIA GeForce RTX 3090 Ti", None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA A100-SXM4-40GB MIG 3g.20gb", None),
    ],
)
def test_a_peak_is_that_of_exactly_this_device(name, peak):
    assert known_peak(name) == peak


# ---- one line for all ranks


def window(step_s, data_wait=0.1, **changes):
    return {
        "steps": 10,
        "window_s": 10.0,
        "step_s": step_s,
        "slowest_step_s": 2 * step_s,
        "samples_per_s": 100.0,
        "tokens_per_s": 50.0,
        "data_wait": data_wait,
        "other_s": 0.0,
        "tflops": 100.0,
        **changes,
    }


def test_ranks_are_summed_averaged_and_compared():
    line = combine({0: window(0.1), 1: window(0.3, 0.5, tflops=50.0)}, own=0, peak=300.0)
    assert (line["step_s"], line["step_s_min"], line["step_s_max"], line["slowest_rank"]) == (0.2, 0.1, 0.3, 1)
    assert (line["tokens_per_s"], line["samples_per_s"], line["ranks"]) == (100.0, 100.0, 2)
    assert (line["data_wait"], line["data_wait_max"]) == (0.3, 0.5)
    assert (line["tflops"], line["mfu"]) == (75.0, 0.25)


def test_memory_is_that_of_the_fullest_gpu_and_none_on_cpus():
    memory = {"memory_allocated": 3, "memory_reserved": 5, "memory_peak": 4}
    line = combine({0: window(0.1, **memory), 1: window(0.1, **{**memory, "memory_peak": 5})}, own=0, peak=None)
    assert {name: line[name] for name in memory} == {**memory, "memory_peak": 5}
    assert not set(memory) & set(combine({0: window(0.1)}, own=0, peak=None))


def test_among_ranks_in_step_the_one_that_waits_for_data_is_the_slowest():
    assert combine({0: window(0.101), 1: window(0.1), 2: window(0.1, 0.6)}, own=0, peak=None)["slowest_rank"] == 2


@pytest.mark.distributed
def test_rank_0_writes_what_all_ranks_measured(job, run_ranks):
    def train():
        accelerator = Accelerator(cpu=True)
        model = nn.Linear(8, 16)
        data = TensorDataset(torch.randn(20_000, 8))
        model, optimizer, loader = accelerator.prepare(
            model, torch.optim.SGD(model.parameters(), 0.01), DataLoader(data, batch_size=2)
        )
        for (x,) in loader:
            accelerator.backward(model(x).square().mean())
            optimizer.step()
            time.sleep(0.01)
            if accelerator.is_main_process and [line["ranks"] for line in lines(job)[-2:]] == [2, 2]:
                accelerator.set_trigger()
            if accelerator.check_trigger():
                break
        accelerator.end_training()
        return optimizer.steps

    steps, _ = run_ranks(2, train, env={"ORC_JOB_DIR": str(job), "ORC_METRICS_INTERVAL_S": "0.4"})
    written = lines(job)
    assert written[-2]["ranks"] == written[-1]["ranks"] == 2
    assert written[-1]["step"] == steps
    told = json.loads((job / "ranks.json").read_text())["ranks"]
    assert set(told) == {"0", "1"}
    assert all(0 < rank["step"] <= steps and rank["step_s"] > 0 for rank in told.values())
    for line in written:
        assert line["step_s_min"] <= line["step_s"] <= line["step_s_max"]
        own = 4 / line["samples_per_s"]  # rank 0's time per step: all ranks have the same batch together
        assert any(own == pytest.approx(line[which], rel=1e-3) for which in ("step_s_min", "step_s_max"))


def test_a_file_that_cannot_be_written_does_not_stop_training(job, monkeypatch, caplog):
    monkeypatch.setenv("ORC_JOB_DIR", str(job / "gone"))
    AcceleratorState._reset_state()
    reset_default()
    accelerator, model, optimizer, loader = prepared(TensorDataset(torch.randn(40, 8)))
    for (x,) in loader:
        accelerator.backward(model(x).square().mean())
        optimizer.step()
    accelerator.end_training()
    assert sum("metrics are not written any more" in record.message for record in caplog.records) == 1


def test_the_first_lines_come_soon_and_then_ever_more_slowly(job, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(reporter, "FIRST_WINDOW_S", 1.0)
    monkeypatch.setattr(reporter, "time", SimpleNamespace(monotonic=lambda: now[0], time=lambda: now[0]))
    numbers = dict.fromkeys(("steps", "busy_s", "waited_s", "samples", "tokens", "other_s", "slowest_s", "flops"), 0)
    counts = SimpleNamespace(**numbers, epoch=0, loss=None, loss_reader=None)
    context = SimpleNamespace(
        rank=0,
        is_main=True,
        world_size=1,
        device=torch.device("cpu"),
        topology=SimpleNamespace(peers=1),
        env=SimpleNamespace(job=SimpleNamespace(attempt=1, restart=0, attempt_dir=None)),
    )
    report = reporter.Reporter(context, counts, job / "m.jsonl", 10.0)
    for tick in range(600):  # a minute: the first step is taken after three seconds
        now[0] += 0.1
        if tick > 30:
            counts.steps, counts.busy_s = counts.steps + 1, counts.busy_s + 0.1
        report.poll(counts.steps)
    at = [json.loads(line)["at"] - 100 for line in (job / "m.jsonl").read_text().splitlines()]
    apart = [after - before for before, after in itertools.pairwise(at)]
    assert 3 < at[0] < 4.5
    assert apart[0] == pytest.approx(1.5, abs=0.2)
    assert all(after > before - 0.15 for before, after in itertools.pairwise(apart))  # a tick of the clock
    assert apart[-1] == pytest.approx(10, abs=0.2)
