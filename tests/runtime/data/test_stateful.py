"""Loaders that torchdata's StatefulDataLoader reads, and loaders that travel to another process."""

import pickle
import subprocess
import sys

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from orc.runtime import Accelerator, DataLoaderConfiguration, DataLoaderShard, current_context


class Numbers(IterableDataset):
    """0, 1, 2, ... that knows where it is, and what it was asked to go on from."""

    loaded = None

    def __init__(self, count):
        self.count, self.at = count, 0

    def __iter__(self):
        while self.at < self.count:
            self.at += 1
            yield torch.tensor([self.at - 1, -1 if self.loaded is None else self.loaded])
        self.at = 0

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = self.loaded = state["at"]


class Plain(IterableDataset):
    """0, 1, 2, ... without a state."""

    def __iter__(self):
        return iter(range(12))


def stateful_accelerator(**options):
    return Accelerator(dataloader_config=DataLoaderConfiguration(use_stateful_dataloader=True, **options))


def first_column(batches):
    return [[row[0] for row in batch.tolist()] for batch in batches]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_stream_goes_on_from_its_own_state_also_in_workers(workers, tmp_path):
    accelerator = stateful_accelerator()
    loader = accelerator.prepare(DataLoader(Numbers(23), batch_size=2, num_workers=workers))
    assert isinstance(loader, StatefulDataLoader)
    whole = first_column(loader)
    source = iter(loader)
    for _ in range(5):
        next(source)
    accelerator.save_state(str(tmp_path / "state"))
    assert first_column(source) == whole[5:]
    accelerator.free_memory()

    again = accelerator.prepare(DataLoader(Numbers(23), batch_size=2, num_workers=workers))
    accelerator.load_state(str(tmp_path / "state"))
    rest = list(again)
    assert first_column(rest) == whole[5:]
    assert all(row[1] > 0 for batch in rest for row in batch.tolist()), "the stream was read again from its start"
    assert first_column(again) == whole
    other = accelerator.prepare(DataLoader(Numbers(23), batch_size=2, num_workers=1))  # their state fits nobody else
    accelerator.free_memory()
    other.load_state_dict(accelerator.prepare(again).state_dict())
    assert first_column(other) == whole


def test_map_style_data_keeps_its_place_and_its_order(run_ranks):
    def body():
        torch.manual_seed(3)
        accelerator = stateful_accelerator()
        loader, other = (accelerator.prepare(DataLoader(range(40), batch_size=2, shuffle=True)) for _ in range(2))
        source = iter(loader)
        for _ in range(4):
            next(source)
        other.load_state_dict(loader.state_dict())
        rest = [batch.tolist() for batch in source]
        dispatched = stateful_accelerator(dispatch_batches=True).prepare(DataLoader(Numbers(16), batch_size=2))
        return rest, [batch.tolist() for batch in other], isinstance(dispatched, StatefulDataLoader), len([*dispatched])

    for rest, continued, stateful, rounds in run_ranks(2, body):
        assert (rest, stateful, rounds) == (continued, True, 4)
        assert len(rest) == 6


def test_the_class_itself_takes_the_option():
    assert isinstance(DataLoaderShard(range(4), use_stateful_dataloader=True), StatefulDataLoader)
    assert not isinstance(DataLoaderShard(range(4)), StatefulDataLoader)


def test_without_torchdata_the_option_says_what_to_install():
    code = """
import sys
sys.modules["torchdata"] = None
from orc.runtime import Accelerator, DataLoaderConfiguration
from torch.utils.data import DataLoader
try:
    DataLoaderConfiguration(use_stateful_dataloader=True)
except ImportError as error:
    assert "pip install 'torchdata>=0.8.0'" in str(error), error
else:
    sys.exit("it was taken")
accelerator = Accelerator()
accelerator.dataloader_config.use_stateful_dataloader = True
try:
    accelerator.prepare(DataLoader(range(4)))
except ImportError as error:
    print("refused")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "refused\n"


@pytest.mark.parametrize("stateful", [False, True])
def test_prepared_loaders_can_be_pickled_in_the_middle_of_a_pass(stateful):
    accelerator = stateful_accelerator() if stateful else Accelerator()
    for data in (range(12), Plain()):
        loader = accelerator.prepare(DataLoader(data, batch_size=2, shuffle=isinstance(data, range)))
        source = iter(loader)
        next(source)
        copy = pickle.loads(pickle.dumps(loader))
        assert type(copy) is type(loader)
        assert copy.context is current_context()
        assert len([*copy]) == 6
        assert len([*source]) == 5


def test_a_pickle_in_another_process_says_who_it_was_without_a_process_group(run_ranks):
    def body():
        accelerator = Accelerator(gradient_accumulation_steps=3, mixed_precision="bf16")
        loader = accelerator.prepare(DataLoader(range(12), batch_size=2, shuffle=True))
        parameters = [torch.nn.Parameter(torch.zeros(2))]
        optimizer = accelerator.prepare(torch.optim.SGD(parameters, lr=0.1))
        key = accelerator.ctx.key
        data = pickle.dumps((accelerator, loader, optimizer))
        assert len(key) > 8
        assert key not in data
        code = """
import pickle, sys
accelerator, loader, optimizer = pickle.loads(sys.stdin.buffer.read())
print(accelerator.process_index, accelerator.num_processes, accelerator.device, accelerator.mixed_precision)
print(accelerator.gradient_accumulation_steps, len(loader), optimizer.param_groups[0]["lr"])
try:
    accelerator.wait_for_everyone()
except RuntimeError as error:
    print("process group" in str(error))
"""
        done = subprocess.run([sys.executable, "-c", code], input=data, capture_output=True, timeout=60)
        return done.stdout.decode() + done.stderr.decode()

    first, second = run_ranks(2, body)
    assert first == "0 2 cpu bf16\n3 3 0.1\nTrue\n"
    assert second == first.replace("0 2 cpu", "1 2 cpu")


def test_a_seedable_order_needs_no_seed_of_the_script():
    torch.seed()  # may have 64 bits
    torch.random.default_generator.manual_seed(2**63 + 5)
    loader = Accelerator(dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True)).prepare(
        DataLoader(range(10), shuffle=True)
    )
    assert sorted(int(batch) for batch in loader) == list(range(10))
