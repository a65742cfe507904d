"""Ranks that share the work of a batch get the same one, and it counts once."""

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from orc.runtime.core.context import current_context
from orc.runtime.testing import run_threads


class Numbers(IterableDataset):
    def __init__(self, count):
        self.count = count

    def __iter__(self):
        return iter(range(self.count))


def loaders(kind, count=22):
    if kind == "stream":
        return DataLoader(Numbers(count), batch_size=2)
    return DataLoader(TensorDataset(torch.arange(count)), batch_size=2, shuffle=kind == "shuffled")


def numbers(batch):
    return (batch[0] if isinstance(batch, (list, tuple)) else batch).tolist()


def one_epoch(kind, sizes, dispatch):
    from orc.runtime.collectives.metrics import gather_for_metrics
    from orc.runtime.data.prepare import prepare_data_loader

    ctx = current_context()
    ctx.set_topology(sizes, by="test")
    loader = prepare_data_loader(loaders(kind), dispatch_batches=dispatch, rng_types=["generator"])
    mine, gathered, objects = [], [], []
    for batch in loader:
        mine.append(numbers(batch))
        gathered += numbers(gather_for_metrics(batch))
        objects += gather_for_metrics([str(one) for one in numbers(batch)], use_gather_object=True)
    return mine, gathered, objects, loader.total_batch_size


@pytest.mark.parametrize("kind", ["sequential", "shuffled", "stream"])
@pytest.mark.parametrize("dispatch", [False, True])
@pytest.mark.parametrize(
    ("sizes", "shares"),
    [({"dp_replicate": 2, "tp": 2}, [0, 0, 1, 1]), ({"pp": 2, "dp_shard": 2}, [0, 1, 0, 1]), ({"cp": 4}, [0] * 4)],
)
def test_peers_get_the_same_batches_and_metrics_see_each_sample_once(kind, dispatch, sizes, shares):
    ranks = run_threads(4, one_epoch, kind, sizes, dispatch)
    of_share = {}
    for (mine, *_), share in zip(ranks, shares, strict=True):
        assert of_share.setdefault(share, mine) == mine
    for _, gathered, objects, total in ranks:
        assert sorted(gathered) == list(range(22))
        assert [int(one) for one in objects] == gathered
        assert total == 2 * len(of_share)


def test_real_ranks_share_out_data_schedule_and_metrics_by_their_place(run_ranks, tmp_path):
    def train(stop, folder):
        from orc.runtime import Accelerator

        accelerator = Accelerator(cpu=True, rng_types=["generator"])
        ctx = accelerator.ctx
        ctx.set_topology({"dp_replicate": 2, "tp": 2}, by="test")
        torch.manual_seed(0)
        generator = torch.Generator().manual_seed(7)
        data = TensorDataset(torch.arange(40))
        loader = accelerator.prepare(DataLoader(data, batch_size=4, shuffle=True, generator=generator))
        if stop is None:
            accelerator.load_state(folder)
        seen, counted = [], []
        for number, (batch,) in enumerate(loader):
            seen.append(batch.tolist())
            counted += accelerator.gather_for_metrics(batch).tolist()
            if number == stop:
                accelerator.save_state(folder)
                break
        total = accelerator._engine.normalizer._total(3 + ctx.topology.data_rank)
        with accelerator.split_between_processes(list(range(4))) as part:
            pass
        return seen, counted, total, part

    begun, rest = run_ranks(4, train, 1, str(tmp_path / "c")), run_ranks(4, train, None, str(tmp_path / "c"))
    for ranks in (begun, rest):
        assert ranks[0] == ranks[1]
        assert ranks[2] == ranks[3]
    assert sorted(begun[0][1] + rest[0][1]) == list(range(40))
    batches = [batch for rank in (*begun[::2], *rest[::2]) for batch in rank[0]]
    assert sorted(number for batch in batches for number in batch) == list(range(40))
    assert [rank[2:] for rank in begun[::2]] == [(7.0, [0, 1]), (7.0, [2, 3])]


def test_a_schedule_advances_once_for_each_share_of_the_data():
    from orc.runtime.train.scheduler import AcceleratedScheduler

    def steps():
        current_context().set_topology({"dp_replicate": 2, "tp": 2}, by="test")
        optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
        schedule = AcceleratedScheduler(torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: step), optimizer)
        optimizer.step()
        schedule.step()
        return schedule.get_last_lr()

    assert run_threads(4, steps) == [[2]] * 4
