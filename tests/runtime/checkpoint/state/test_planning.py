"""Plans of sharded saves, with ranks that are threads: what they exchange, and what stays from one save to the next."""

import pickle
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch

from orc.runtime.checkpoint.errors import CheckpointError
from orc.runtime.checkpoint.replication.barrier import Barrier
from orc.runtime.checkpoint.state.planning import ShardPlans
from orc.runtime.core.store import LocalStore

RANKS = 4


class Counted:
    """A store as one rank sees it, which counts the bytes of its values."""

    def __init__(self, store):
        self.store, self.sent, self.read = store, 0, 0

    def clone(self, answer_s=60.0):
        return self

    def set(self, key, value):
        self.sent += len(value)
        self.store.set(key, value)

    def get(self, key):
        value = self.store.get(key)
        self.read += len(value)
        return value

    def __getattr__(self, name):
        return getattr(self.store, name)


class Context:
    """What a barrier wants to know of its rank."""

    def __init__(self, rank, store, ranks):
        self.rank, self.store, self.world_size, self.key = rank, store, ranks, b""
        self.config = SimpleNamespace(timeout_s=20.0)


class Ranks:
    """The plans of several ranks of one run."""

    def __init__(self, ranks=RANKS):
        shared = LocalStore()
        self.stores = [Counted(shared) for _ in range(ranks)]
        self.plans = [ShardPlans(Barrier(Context(rank, store, ranks))) for rank, store in enumerate(self.stores)]

    def agree(self, states, folders=None):
        """All ranks agree; the bytes that each has sent and read for it."""
        before = [(one.sent, one.read) for one in self.stores]
        with ThreadPoolExecutor(len(states)) as pool:
            pending = [
                pool.submit(plans.agree, {folder: {"model": state}}, None)
                for plans, state, folder in zip(self.plans, states, folders or "f" * len(states), strict=True)
            ]
            for one in pending:
                one.result()
        return [(one.sent - sent, one.read - read) for one, (sent, read) in zip(self.stores, before, strict=True)]


def state(tensors, size=3):
    """A state of which every rank has the same, as of replicas."""
    return {f"layer_{number}": torch.zeros(size) for number in range(tensors)}


def test_what_stays_as_it_was_is_agreed_in_a_few_bytes():
    ranks = Ranks()
    first = ranks.agree([state(100)] * RANKS)
    chosen = [plans.values["f"] for plans in ranks.plans]
    again = ranks.agree([state(100)] * RANKS)
    assert [len(plans.values["f"]) for plans in ranks.plans] == [len(values) for values in chosen] == [100, 0, 0, 0]
    assert min(sent for sent, _ in first) > 5000
    assert max(sent for sent, _ in again) < 300
    ranks.agree([state(100)] * 3 + [state(101)])
    assert [len(plans.values["f"]) for plans in ranks.plans] == [100, 0, 0, 1]


def test_a_rank_reads_its_own_choice_alone():
    big = {f"layer_{number}": torch.zeros(20_000) for number in range(60)}
    few, many = ([read for _, read in Ranks(ranks).agree([big] * ranks)[1:]] for ranks in (3, 6))
    assert max(many) <= max(few)


def test_large_parts_that_ranks_have_alike_are_shared_out_and_small_ones_are_the_first_ranks():
    ranks = Ranks()
    ranks.agree([{**state(8), **{f"big_{number}": torch.zeros(20_000) for number in range(8)}}] * RANKS)
    sizes = [[value.numel() for value in plans.values["f"]] for plans in ranks.plans]
    assert sizes[0].count(3) == 8
    assert [one.count(20_000) for one in sizes] == [2] * 4


def test_a_decision_that_failed_is_not_kept():
    ranks = Ranks(2)
    ranks.agree([state(3)] * 2)
    for _ in range(2):
        with pytest.raises(CheckpointError, match="different sharded states"):
            ranks.agree([state(3)] * 2, "fg")
    ranks.agree([state(3)] * 2)
    assert [len(plans.values["f"]) for plans in ranks.plans] == [3, 0]


def test_a_save_that_failed_leaves_no_folder_to_the_next():
    ranks = Ranks(2)
    ranks.agree([state(3)] * 2)  # its files cannot be written: nobody wants its metadata
    ranks.agree([state(3)] * 2, "gg")
    assert [[*plans.values, *plans.lengths] for plans in ranks.plans] == [["g", "g"]] * 2
    assert list(ranks.plans[0].metadata([{"g": [70] * 3}, {"g": []}])) == ["g"]


def test_the_metadata_of_kept_plans_follows_the_lengths():
    lengths = [[{"f": [70 + rank, 40]} for rank in range(RANKS)], [{"f": [70, 90]} for _ in range(RANKS)]]
    states = [{f"a_{rank}": torch.zeros(3), f"b_{rank}": torch.zeros(3)} for rank in range(RANKS)]
    kept = Ranks()
    kept.agree(states)
    before = kept.plans[0].metadata(lengths[0])
    kept.agree(states)
    assert kept.plans[0].metadata(lengths[0]) == before
    fresh = Ranks()
    fresh.agree(states)
    # Pickles that this test has made.
    now, expected = (pickle.loads(one.plans[0].metadata(lengths[1])["f"]) for one in (kept, fresh))
    assert now == expected
    assert list(now.storage_data.items()) == list(expected.storage_data.items())
    assert {place.offset for place in now.storage_data.values()} == {0, 128}
