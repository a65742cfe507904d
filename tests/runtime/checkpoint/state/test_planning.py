"""Plans of sharded saves, with ranks that are threads: what they exchange, and what stays from one save to the next."""

import json
import pickle
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from orc.runtime.checkpoint.errors import CheckpointError
from orc.runtime.checkpoint.replication.barrier import Barrier
from orc.runtime.checkpoint.state.planning import ShardLayout, ShardPlans, _boxes, _kinds
from orc.runtime.checkpoint.state.shard_metadata import PLAIN
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
    assert first[0][0] > 5000  # names and sizes, which all have alike
    assert max(sent for sent, _ in first[1:]) < 600
    assert max(sent for sent, _ in again) < 400
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
    assert list(ranks.plans[0].metadata(reports(ranks, [[70] * 3, []], "g"))) == ["g"]


def reports(ranks, lengths, folder="f"):
    """What the ranks report when each has written values of such *lengths*."""
    for plans, written in zip(ranks.plans, lengths, strict=True):
        plans.lengths = {folder: written}
    return [plans.report() for plans in ranks.plans]


def test_the_metadata_of_kept_plans_follows_the_lengths():
    lengths = [[[70 + rank, 40] for rank in range(RANKS)], [[70, 90]] * RANKS]
    states = [{f"a_{rank}": torch.zeros(3), f"b_{rank}": torch.zeros(3)} for rank in range(RANKS)]
    kept = Ranks()
    kept.agree(states)
    before = kept.plans[0].metadata(reports(kept, lengths[0]))
    kept.agree(states)
    assert kept.plans[0].metadata(reports(kept, lengths[0])) == before
    fresh = Ranks()
    fresh.agree(states)
    # Pickles that this test has made.
    now, expected = (pickle.loads(each.plans[0].metadata(reports(each, lengths[1]))["f"]) for each in (kept, fresh))
    assert now == expected
    assert {place.offset for place in now.storage_data.values()} == {0, 128}


def box(offsets, sizes, whole, dtype=torch.float32):
    """A part of a tensor, as a planner writes it down."""
    return TensorWriteData(
        ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)), TensorProperties(dtype), torch.Size(whole)
    )


def plan(**parts):
    """The plan of a rank that holds such parts of tensors; of a value that is no tensor `None`."""
    items = []
    for name, part in parts.items():
        kind = WriteItemType.BYTE_IO if part is None else WriteItemType.SHARD
        items.append(WriteItem(MetadataIndex(name, part and part.chunk.offsets), kind, tensor_data=part))
    return SavePlan(items, planner_data={name: ("model", name) for name in parts})


def layout_of(*plans):
    known = {}
    said = [(known.setdefault(json.dumps(what := _kinds(each)), what), _boxes(each)) for each in plans]
    return ShardLayout(said)


HUGE = 3 * 2**31
GRID = [plan(a=box([4 * (r // 2), 6 * (r % 2)], [4, 6], [8, 12]), s=box([], [], []), n=None) for r in range(4)]
UNEVEN = [
    plan(a=box([0, 0], [5, 3], [7, 3]), b=box([0], [HUGE], [HUGE + 1], torch.bfloat16)),
    plan(
        a=box([5, 0], [2, 3], [7, 3]), b=box([HUGE], [1], [HUGE + 1], torch.bfloat16), c=box([0] * 4, [2] * 4, [2] * 4)
    ),
    plan(a=box([7, 0], [0, 3], [7, 3])),
]


@pytest.mark.parametrize("plans", [GRID, UNEVEN, [plan(n=None)] * 2])
def test_the_metadata_is_the_one_that_torch_would_write(plans):
    laid = layout_of(*plans)
    written = [
        each.items if chosen is None else [each.items[position] for position in chosen]
        for each, chosen in zip(plans, laid.chosen, strict=True)
    ]
    content = laid.metadata("f", [np.array([100 + number for number, _ in enumerate(items)]) for items in written])
    final, expected = DefaultSavePlanner(dedup_save_to_lowest_rank=True).create_global_plan(plans)
    assert [[item.index for item in items] for items in written] == [
        [item.index for item in one.items] for one in final
    ]
    now = pickle.loads(content)  # which this test has made
    assert now.state_dict_metadata == expected.state_dict_metadata
    assert now.planner_data == expected.planner_data
    hints = {item.index: item.index.index for each in final for item in each.items}
    assert {index: index.index for index in now.storage_data} == hints
    for rank, items in enumerate(written):
        places = [now.storage_data[item.index] for item in items]
        assert [(place.relative_path, place.offset, place.length) for place in places] == [
            (f"__{rank}_0.distcp", 128 * number, 100 + number) for number in range(len(items))
        ]


@pytest.mark.parametrize(
    ("parts", "reason"),
    [
        ([box([0], [4], [8]), box([3], [5], [8])], "overlap, or are not all"),
        ([box([0], [4], [8]), box([5], [3], [8])], "overlap, or are not all"),
        ([box([0], [4], [8]), box([4], [5], [8])], "outside"),
        ([box([0], [8], [8]), box([0], [8], [8], torch.int8)], "several kinds"),
        ([box([0], [8], [8]), None], "several kinds"),
        # As many elements as the whole, and yet not the whole.
        ([box([0, 0], [2, 2], [2, 4]), box([0, 1], [2, 2], [2, 4])], "overlap, or are not all"),
    ],
)
def test_parts_that_do_not_make_up_a_tensor_are_refused(parts, reason):
    with pytest.raises(ValueError, match=f"a .*{reason}"):
        layout_of(*(plan(a=part) for part in parts))


def test_of_tensors_that_ranks_have_for_themselves_the_first_is_kept():
    layout = layout_of(plan(a=box([0], [8], [8])), plan(a=box([0], [6], [6])))
    assert layout.chosen == [None, []]


def test_names_of_one_process_may_be_any_words():
    ranks = Ranks(1)
    ranks.agree([{**state(30), "end": torch.zeros(2)}])
    (plans,) = ranks.plans
    plans.lengths["f"] = [100] * len(plans.values["f"])
    metadata = pickle.loads(plans.metadata([plans.report()])["f"])  # which this test has made
    assert metadata.storage_meta.modules == [PLAIN]
    assert "model.end" in metadata.state_dict_metadata
