"""Batches that ranks on one host share in memory."""

import os

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from orc.runtime import Accelerator
from orc.runtime.data.wire import SharedSlots


def test_a_slot_is_free_again_when_the_last_tensor_in_it_is_gone():
    sender, offer, descriptor = SharedSlots.make(2, 5000)
    receiver = SharedSlots.attach(offer)
    os.close(descriptor)
    first, second = sender.take(), sender.take()
    sender.slot(second)[:3] = torch.tensor([1, 2, 3], dtype=torch.uint8)
    bytes_there = receiver.lease(second)
    view = bytes_there[1:3]
    del bytes_there
    assert (first, second, sender.take(), view.tolist()) == (0, 1, None, [2, 3])
    del view
    assert (sender.take(), sender.take()) == (second, None)


@pytest.mark.parametrize("change", [{"proof": "00" * 32}, {"host": ["another", "host"]}, {"size": 4096}, {"file": "/"}])
def test_what_is_not_the_memory_that_was_offered_is_not_used(change):
    _, offer, descriptor = SharedSlots.make(2, 5000)
    assert SharedSlots.attach({**offer, **change}) is None
    os.close(descriptor)


@pytest.mark.parametrize("shared", [True, False])
def test_batches_that_are_kept_keep_their_content(run_ranks, shared):
    class Growing(IterableDataset):
        def __iter__(self):
            for number in range(16):
                x = torch.full((2, 5000 + 2000 * number), number)
                yield {"x": x, "name": [str(number)] * 2, "none": torch.empty(2, 0)}

    def body():
        if not shared:
            SharedSlots.attach = classmethod(lambda cls, offer: None)
        loader = Accelerator().prepare(DataLoader(Growing(), batch_size=None))
        passes = [list(loader), [int(batch["name"][0]) for batch in loader]]
        kept, again = passes
        alone = {batch["x"].untyped_storage().data_ptr() for batch in kept}
        right = all(batch["x"].unique().tolist() == [int(batch["name"][0])] for batch in kept)
        kept[0]["x"].fill_(-1)  # it is the rank's own
        return (right, len(alone), len(kept), kept[0]["none"].shape), again, kept[1]["x"][0, 0].item()

    for rank, (kept, again, untouched) in enumerate(run_ranks(2, body)):
        assert kept == (True, 8, 8, (2, 0))
        assert again == list(range(rank, 16, 2))
        assert untouched == 2 + rank
