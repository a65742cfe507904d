"""The profiler: documented counts of operators, trace files, schedules."""

import gzip
import json

import pytest
import torch
from torch import nn

from orc.runtime import Accelerator, ProfileKwargs


class Block(nn.Module):
    def __init__(self, inputs, outputs, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.shortcut = nn.Identity()
        if stride != 1:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x):
        y = self.bn2(self.conv2(torch.relu_(self.bn1(self.conv1(x)))))
        y += self.shortcut(x)
        return torch.relu_(y)


def resnet18():
    """The network of the documented example, operator by operator."""
    layers = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(True), nn.MaxPool2d(3, 2, 1)]
    for inputs, outputs, stride in [(64, 64, 1), (64, 128, 2), (128, 256, 2), (256, 512, 2)]:
        layers += [Block(inputs, outputs, stride), Block(outputs, outputs, 1)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 1000))


def test_the_documented_counts_of_a_resnet18():
    options = ProfileKwargs(activities=["cpu"], record_shapes=True, profile_memory=True, with_flops=True)
    accelerator = Accelerator(cpu=True, kwargs_handlers=[options])
    assert accelerator.profile_handler is options
    model = accelerator.prepare(resnet18())
    with accelerator.profile() as prof, torch.no_grad():
        model(torch.randn(5, 3, 224, 224))
    assert isinstance(prof, torch.profiler.profile)
    table = {event.key: event for event in prof.key_averages()}
    counts = {name: table[f"aten::{name}"].count for name in ("conv2d", "batch_norm", "max_pool2d", "add_")}
    assert counts == {"conv2d": 20, "batch_norm": 20, "max_pool2d": 1, "add_": 28}
    assert (table["aten::conv2d"].flops, table["aten::addmm"].flops) == (18135613440, 5120000)
    assert table["aten::empty"].self_cpu_memory_usage > 90e6
    shapes = [e.input_shapes for e in prof.key_averages(group_by_input_shape=True) if e.key == "aten::conv2d"]
    assert [5, 3, 224, 224] in [shape[0] for shape in shapes]
    assert len(shapes) > 5


@pytest.mark.distributed
def test_each_process_writes_a_chrome_trace(run_ranks, tmp_path):
    def body(folder):
        accelerator = Accelerator(kwargs_handlers=[ProfileKwargs(["cpu"], output_trace_dir=folder / "trace")])
        with accelerator.profile():
            torch.ones(3) @ torch.ones(3)
        return sorted(path.name for path in (folder / "trace").iterdir())

    names = ["profile_0.json", "profile_1.json"]
    assert run_ranks(2, body, tmp_path) == [names, names], "all files are there when the block has ended"
    for name in names:
        trace = json.loads((tmp_path / "trace" / name).read_text())
        (event,) = [event for event in trace["traceEvents"] if event["name"] == "aten::dot"]
        assert event["ph"] == "X"
        assert event["dur"] > 0


def steps(prof, count):
    for index in range(count):
        torch.full((1,), index).sin()
        prof.step()


def test_a_schedule_records_its_cycles():
    ready = []
    schedule = {"wait": 5, "warmup": 1, "active": 3, "repeat": 2, "skip_first": 10}
    options = ProfileKwargs(["cpu"], schedule, on_trace_ready=lambda p: ready.append((p.step_num, sines(p))))
    accelerator = Accelerator(kwargs_handlers=[options])
    with accelerator.profile() as prof:
        steps(prof, 40)
    assert ready == [(19, 3), (28, 3)]
    ready.clear()
    with accelerator.profile() as prof:
        steps(prof, 8)
    assert ready == []


def sines(profiler):
    return sum(event.count for event in profiler.key_averages() if event.key == "aten::sin")


def test_every_cycle_of_a_schedule_is_kept(tmp_path):
    ready = []
    options = ProfileKwargs(
        activities=["cpu"],
        schedule_option={"wait": 1, "warmup": 1, "active": 2, "repeat": 3},
        on_trace_ready=lambda p: ready.append(sines(p)),
        output_trace_dir=str(tmp_path),
    )
    with Accelerator().profile(options) as prof:
        steps(prof, 12)
    assert ready == [2, 2, 2]
    traces = {path.name: json.loads(path.read_text()) for path in tmp_path.iterdir()}
    assert sorted(traces) == ["profile_0.json", "profile_0_cycle0.json", "profile_0_cycle1.json"]
    starts = [
        min(event["ts"] for event in traces[name]["traceEvents"] if event["name"] == "aten::sin")
        for name in ("profile_0_cycle0.json", "profile_0_cycle1.json", "profile_0.json")
    ]
    assert starts == sorted(starts)


def test_nothing_recorded_is_said(tmp_path, caplog):
    options = ProfileKwargs(["cpu"], {"wait": 5, "warmup": 1, "active": 3, "skip_first": 10}, output_trace_dir=tmp_path)
    with Accelerator().profile(options) as prof:
        steps(prof, 8)
    assert list(tmp_path.iterdir()) == []
    assert "nothing was recorded, so no trace was written" in caplog.text


def test_a_block_that_fails_leaves_its_trace_and_its_error(tmp_path):
    def fail():
        with Accelerator().profile(ProfileKwargs(["cpu"], output_trace_dir=tmp_path)):
            torch.ones(1).sin()
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        fail()
    assert "aten::sin" in (tmp_path / "profile_0.json").read_text()


def test_a_script_may_export_the_trace_itself_as_well(tmp_path):
    handler = torch.profiler.tensorboard_trace_handler(str(tmp_path), "worker", use_gzip=True)
    with Accelerator().profile(ProfileKwargs(["cpu"], on_trace_ready=handler, output_trace_dir=tmp_path)) as prof:
        torch.ones(1).sin()
    prof.export_chrome_trace(str(tmp_path / "mine.json"))
    (zipped,) = tmp_path.glob("worker.*.json.gz")
    trace = (tmp_path / "profile_0.json").read_bytes()
    assert gzip.decompress(zipped.read_bytes()) == (tmp_path / "mine.json").read_bytes() == trace


def test_activities_are_those_of_torch():
    cpu = torch.profiler.ProfilerActivity.CPU
    with ProfileKwargs(["CPU", cpu], with_stack=True, with_modules=True).build() as prof:
        torch.ones(1).sin()
    assert prof.activities == {cpu}
    assert (prof.with_stack, prof.with_modules, prof.record_shapes) == (True, True, False)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"activities": ["cpus"]}, "unknown activity 'cpus'; this torch has cpu"),
        ({"schedule_option": {"wait": 1, "warmup": 1, "active": 1, "skipfirst": 1}}, "unknown key 'skipfirst'"),
        ({"schedule_option": {"active": 1}}, "wait, warmup missing"),
    ],
)
def test_wrong_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message), Accelerator().profile(ProfileKwargs(**options)):
        pass
