"""Worked examples with the numbers that are documented, as a script meets them: by public names, in real ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time

import pytest
import torch
import yaml
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from orc.runtime import Accelerator, BatchSamplerShard, RunContext, skip_first_batches, use_context

pytestmark = pytest.mark.distributed


class Stream(IterableDataset):
    """Numbers from 0; remembers what was read here."""

    def __init__(self, count):
        self.count, self.read = count, []

    def __iter__(self):
        for number in range(self.count):
            self.read.append(number)
            yield number


class Line(torch.nn.Module):
    """One weight, from 0."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1, 1))

    def forward(self, inputs):
        return inputs @ self.weight


def test_batches_that_are_written_down_are_dealt_out_and_cut():
    def shards(batches, **options):
        return [list(BatchSamplerShard(batches, 2, rank, **options)) for rank in range(2)]

    batches = [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert shards(batches) == [[[0, 1, 2, 3]], [[4, 5, 6, 7]]]
    assert shards(batches, split_batches=True) == [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]
    uneven = [*batches, [8, 9]]
    assert shards(uneven) == [[[0, 1, 2, 3], [8, 9, 0, 1]], [[4, 5, 6, 7], [2, 3, 4, 5]]]
    assert shards(uneven, even_batches=False) == [[[0, 1, 2, 3], [8, 9]], [[4, 5, 6, 7]]]
    with use_context(RunContext.fake(1, 2)):
        loader = Accelerator().prepare(DataLoader(range(10), batch_sampler=uneven))
        assert [batch.tolist() for batch in loader] == [[4, 5, 6, 7], [2, 3, 4, 5]]
        assert (loader.total_batch_size, len(loader)) == (8, 2)


def test_a_stream_is_read_on_rank_0_and_a_map_style_dataset_by_all(run_ranks):
    def script():
        accelerator = Accelerator()
        stream = Stream(8)
        streamed, mapped = accelerator.prepare(DataLoader(stream, batch_size=4), DataLoader(range(8), batch_size=4))
        seen = [[batch.tolist() for batch in loader] for loader in (streamed, mapped)]
        return stream.read, seen, [type(loader).__name__ for loader in (streamed, mapped)]

    kinds = ["DataLoaderDispatcher", "DataLoaderShard"]
    assert run_ranks(2, script) == [
        (list(range(8)), [[[0, 1, 2, 3]], [[0, 1, 2, 3]]], kinds),
        ([], [[[4, 5, 6, 7]], [[4, 5, 6, 7]]], kinds),
    ]


def test_observed_sizes_on_four_ranks(run_ranks):
    def script(split):
        from orc.runtime import DataLoaderConfiguration

        accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(split_batches=split))
        loader = accelerator.prepare(DataLoader(range(1600), batch_size=16))
        assert all(len(batch) == loader.total_batch_size // 4 for batch in loader)
        return loader.total_batch_size, len(loader)

    assert run_ranks(4, script, False) == [(64, 25)] * 4
    assert run_ranks(4, script, True) == [(16, 100)] * 4


def test_differently_seeded_ranks_share_out_one_order_and_the_next_epoch_has_another(run_ranks):
    def script():
        accelerator = Accelerator()
        torch.manual_seed(10 + accelerator.process_index)
        loader = accelerator.prepare(DataLoader(range(32), batch_size=4, shuffle=True))
        return [[number for batch in loader for number in batch.tolist()] for _ in range(2)]

    zero, one = run_ranks(2, script)
    for mine, others in zip(zero, one, strict=True):
        assert sorted(mine + others) == list(range(32))
    assert zero[0] != zero[1]
    assert one[0] != one[1]


def test_two_of_ten_batches_are_skipped_once():
    accelerator = Accelerator()
    loader = accelerator.prepare(DataLoader(range(10), batch_size=1))
    for skipped in (accelerator.skip_first_batches(loader, 2), skip_first_batches(loader, 2)):
        assert [batch.item() for batch in skipped] == list(range(2, 10))
        assert [batch.item() for batch in loader] == list(range(10))


def test_four_ranks_gather_their_numbers(run_ranks):
    def script():
        accelerator = Accelerator()
        return accelerator.gather(torch.tensor([accelerator.process_index]))

    for gathered in run_ranks(4, script):
        assert torch.equal(gathered, torch.tensor([0, 1, 2, 3]))


def test_gathering_nine_samples_for_metrics_leaves_out_the_repeated_one(run_ranks):
    def script():
        accelerator = Accelerator()
        loader = accelerator.prepare(DataLoader(range(9), batch_size=5))
        batch = next(iter(loader))
        return accelerator.gather_for_metrics(batch).tolist(), len(accelerator.gather(batch))

    assert run_ranks(2, script) == [(list(range(9)), 10)] * 2


def test_padding_and_reducing_through_the_accelerator(run_ranks):
    def script():
        accelerator = Accelerator()
        rank = accelerator.process_index
        padded = accelerator.pad_across_processes(torch.arange(rank + 1))
        number = torch.arange(2) + 1 + 2 * rank
        return padded, [accelerator.reduce(number, reduction=how).tolist() for how in ("sum", "mean", "none")]

    (zero, reduced), (one, also_reduced) = run_ranks(2, script)
    assert zero.shape == one.shape == torch.Size([2])
    assert (zero.tolist(), one.tolist()) == ([0, 0], [0, 1])
    assert reduced == [[4, 6], [2, 3], [1, 2]]
    assert also_reduced == [[4, 6], [2, 3], [3, 4]]


def test_prompts_are_split_between_ranks(run_ranks):
    def script():
        accelerator = Accelerator()
        seen = []
        for inputs, padding in (
            (["A", "B", "C"], False),
            (["A", "B", "C"], True),
            ({"prompt": ["A", "B", "C"], "seed": [1, 2, 3]}, False),
        ):
            with accelerator.split_between_processes(inputs, apply_padding=padding) as part:
                seen.append(part)
        with (
            pytest.raises(ValueError, match="same length, not 'prompt': 2, 'seed': 1"),
            accelerator.split_between_processes({"prompt": ["A", "B"], "seed": [1]}),
        ):
            pass
        return seen

    assert run_ranks(2, script) == [
        [["A", "B"], ["A", "B"], {"prompt": ["A", "B"], "seed": [1, 2]}],
        [["C"], ["C", "C"], {"prompt": ["C"], "seed": [3]}],
    ]


def test_a_trigger_of_one_rank_needs_no_barrier(run_ranks):
    def script():
        accelerator = Accelerator()
        if accelerator.process_index == 1:
            accelerator.set_trigger()
        else:
            time.sleep(0.3)  # the rank that triggers asks first
        return accelerator.check_trigger(), accelerator.check_trigger()

    assert run_ranks(2, script) == [(True, False), (True, False)]


def test_the_main_process_first_is_a_guard_and_a_barrier_twice(run_ranks, tmp_path):
    def script(path, how):
        accelerator = Accelerator()

        def work():
            if accelerator.is_main_process:
                time.sleep(0.5)
            with open(path, "a") as file:
                file.write(f"{accelerator.process_index}\n")

        if how == "context":
            with accelerator.main_process_first():
                work()
            return
        if accelerator.is_main_process:
            work()
        accelerator.wait_for_everyone()
        if not accelerator.is_main_process:
            work()
        accelerator.wait_for_everyone()

    for how in ("context", "guards"):
        run_ranks(2, script, str(tmp_path / how), how)
        assert (tmp_path / how).read_text() == "0\n1\n"


MISMATCH = """\
import json, os, torch
from orc.runtime import Accelerator, DistributedOperationException, broadcast

accelerator = Accelerator()
try:
    broadcast(torch.zeros([(1, 5), (1, 2, 5)][accelerator.process_index]))
    text = "nothing was raised"
except DistributedOperationException as error:
    text = str(error)
with open(f"{os.environ['RESULTS']}/rank{accelerator.process_index}.json", "w") as file:
    json.dump([accelerator.ctx.config.debug_mode, text], file)
"""
JOB = {"name": "mismatch", "script": "train.py", "launcher": "python", "resources": {"procs_per_node": 2}}


@pytest.mark.parametrize(
    ("words", "variables"),
    [
        (["launch", "--debug", "-n", "2", "train.py"], {}),
        (["launch", "-n", "2", "train.py"], {"ACCELERATE_DEBUG_MODE": "1"}),
        (["submit", "job.yaml", "--follow"], {}),
    ],
    ids=["the flag", "the variable", "the job file"],
)
def test_debug_mode_names_mismatched_shapes_however_it_is_switched_on(words, variables, tmp_path):
    (tmp_path / "train.py").write_text(MISMATCH)
    results = tmp_path / "results"
    results.mkdir()
    job = JOB | {"runtime": {"debug_mode": True}, "env": {"RESULTS": str(results)}}
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(job))
    done = subprocess.run(
        [sys.executable, "-m", "orc.orchestrator.cli.main", *words],
        cwd=tmp_path,
        env=os.environ | {"RESULTS": str(results)} | variables,
        capture_output=True,
        text=True,
        timeout=90,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for rank in range(2):
        switched_on, message = json.loads((results / f"rank{rank}.json").read_text())
        assert switched_on is True
        assert message.startswith("Cannot apply desired operation due to shape mismatches.")
        assert "Operation: `orc.runtime.broadcast`" in message
        assert "Process 0: [1, 5]" in message
        assert "Process 1: [1, 2, 5]" in message


@pytest.mark.parametrize("steps", [1, 2, 4])
def test_accumulated_batches_and_one_full_batch_end_at_the_same_weight_on_two_ranks(run_ranks, steps):
    def script(steps):
        accelerator = Accelerator(gradient_accumulation_steps=steps)
        x = torch.arange(1.0, 9.0)
        loader = DataLoader(TensorDataset(x, 2 * x), batch_size=4 // steps)
        model = Line()
        model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.02), loader)
        for inputs, labels in loader:
            with accelerator.accumulate(model):
                loss = torch.nn.functional.mse_loss(model(inputs.view(-1, 1)), labels.view(-1, 1))
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
        return f"{accelerator.unwrap_model(model).weight.item():.5f}"

    assert run_ranks(2, script, steps) == ["2.04000"] * 2


def test_two_ranks_synchronise_at_every_second_batch_and_the_last(run_ranks):
    def script(with_dataloader):
        from orc.runtime import GradientAccumulationPlugin

        plugin = GradientAccumulationPlugin(num_steps=2, sync_with_dataloader=with_dataloader)
        accelerator = Accelerator(gradient_accumulation_plugin=plugin)
        model, loader = accelerator.prepare(Line(), DataLoader(torch.arange(10.0), batch_size=1))
        seen = []
        for batch in loader:
            with accelerator.accumulate(model):
                accelerator.backward(model(batch.view(-1, 1)).sum())
                gradient = accelerator.unwrap_model(model).weight.grad
                alike = accelerator.gather(gradient).unique().numel() == 1
                assert alike == accelerator.sync_gradients
                if alike:
                    gradient.zero_()
                seen.append(accelerator.sync_gradients)
        return seen

    assert run_ranks(2, script, True) == [[False, True, False, True, True]] * 2
    assert run_ranks(2, script, False) == [[False, True, False, True, False]] * 2
