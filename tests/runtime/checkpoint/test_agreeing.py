"""Barriers, one rank at a time: what it writes on the store, what it reads there, and how long it waits."""

import itertools
import json
import threading
import time
from types import SimpleNamespace

import pytest

from orc.runtime.checkpoint.errors import CheckpointError, RankMissing
from orc.runtime.checkpoint.replication import barrier as module
from orc.runtime.checkpoint.replication import relay
from orc.runtime.checkpoint.replication.barrier import Barrier, agree_on_no_error, wait_for_readers
from orc.runtime.core.store import ANSWER_S, LocalStore, StoreError, StoreTimeout


class Store(LocalStore):
    """A store on which nobody is waited for: what is not there is late."""

    def __init__(self):
        super().__init__()
        self.waits, self.answers, self.broken = [], [], set()

    def wait(self, keys, timeout):
        self.waits.append((list(keys), timeout.total_seconds()))
        for key in keys:
            if any(part in key for part in self.broken):
                raise StoreError("no line")
            if not self.check([key]):
                raise StoreTimeout(f"nobody has written {key}")

    def set(self, key, value):
        if any(part in key for part in self.broken):
            raise StoreError("no line")
        super().set(key, value)

    def clone(self, answer_s=ANSWER_S):
        self.answers.append(answer_s)
        return self

    def said(self, key):
        return json.loads(self.get(f"orc/barrier/1/{key}"))


class Context:
    def __init__(self, rank, world_size=2, store=None, key=b"k", timeout_s=30.0):
        self.rank, self.world_size, self.store, self.key = rank, world_size, store, key
        self.config = SimpleNamespace(timeout_s=timeout_s)


@pytest.fixture(autouse=True)
def still(monkeypatch):
    """A clock that stands, and no verdict that anybody has yet to read."""
    monkeypatch.setattr(time, "monotonic", lambda: 100.0)
    monkeypatch.setattr(module, "_unread", {})


@pytest.fixture
def store():
    return Store()


def rank_0(store, *others, world_size=2, what="saving", **options):
    """The barrier of rank 0, where the others have brought *others* already."""
    for rank, value in enumerate(others, 1):
        store.set(f"orc/barrier/1/1/{rank}", json.dumps([what, value]))
    return Barrier(Context(0, world_size, store, **options))


def rank_1(store, verdict=None, **options):
    """The barrier of rank 1, where rank 0 has given *verdict* already."""
    if verdict is not None:
        store.set("orc/barrier/1/1/verdict", json.dumps(verdict))
    return Barrier(Context(1, 2, store, **options))


def said(kind, act):
    with pytest.raises(kind) as told:
        act()
    assert type(told.value) is kind
    return str(told.value)


def test_a_rank_by_itself_agrees_with_itself():
    barrier = Barrier(Context(0, world_size=1))
    assert barrier.hold("saving", 5, lambda values: values) == [5]
    barrier.part()
    assert said(CheckpointError, lambda: barrier.hold("saving", "full", agree_on_no_error)) == "full"


def test_rank_0_collects_judges_and_tells(store):
    barrier = rank_0(store, 7, 9, world_size=3)
    assert barrier.hold("saving", 5, lambda values: {"all": values}) == {"all": [5, 7, 9]}
    assert store.waits == [([f"orc/barrier/1/1/{rank}" for rank in range(3)], 30.0)]
    assert store.said("1/0") == ["saving", 5]
    assert store.said("1/verdict") == [None, {"all": [5, 7, 9]}, False]
    assert module._unread == {(id(store), "barrier/1"): (store, ["orc/barrier/1/1/left/1", "orc/barrier/1/1/left/2"])}


def test_threads_of_one_process_need_not_be_seen_off(store):
    assert rank_0(store, 7, key=b"").hold("saving", 5, sum) == 12
    assert module._unread == {}


def test_another_rank_brings_its_value_and_says_that_it_has_read_the_verdict(store):
    assert rank_1(store, [None, {"all": 3}, False]).hold("saving", 5, None) == {"all": 3}
    assert store.said("1/1") == ["saving", 5]
    assert store.waits == [(["orc/barrier/1/1/verdict"], 35.0)], "a little longer than rank 0 waits for the others"
    assert store.get("orc/barrier/1/1/left/1") == b""


@pytest.mark.parametrize("rank", [0, 1])
def test_a_meeting_may_have_a_patience_of_its_own(store, rank):
    barrier = rank_0(store, 7) if rank == 0 else rank_1(store, [None, 1, False])
    barrier.hold("saving", 5, len, timeout_s=7.0)
    assert store.waits[0][1] == (7.0 if rank == 0 else 12.0)


def test_patience_is_what_was_asked_for_or_configured_or_ten_minutes():
    assert Barrier(Context(0), 3.0).timeout_s == 3.0
    assert Barrier(Context(0)).timeout_s == 30.0
    assert Barrier(Context(0, timeout_s=None)).timeout_s == 600.0


def test_time_that_has_passed_is_not_waited_for_again(store, monkeypatch):
    clock = iter([100.0, 110.0, 200.0])
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    rank_0(store, 7).hold("saving", 5, len)
    assert store.waits == [(["orc/barrier/1/1/0", "orc/barrier/1/1/1"], 20.0)]


@pytest.mark.parametrize(("rank", "least"), [(0, 0.001), (1, 5.0)])
def test_whoever_is_late_still_looks(store, monkeypatch, rank, least):
    clock = itertools.chain([100.0], itertools.repeat(200.0))
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    (rank_0(store, 7) if rank == 0 else rank_1(store, [None, 1, False])).hold("saving", 5, len)
    assert store.waits[0][1] == least


def test_a_verdict_that_is_an_error_is_one_on_every_rank(store):
    barrier = rank_0(store, "full")
    assert said(CheckpointError, lambda: barrier.hold("saving", None, agree_on_no_error)) == "rank 1: full"
    assert store.said("1/verdict") == ["rank 1: full", None, False]
    assert list(module._unread.values()) == [(store, ["orc/barrier/1/1/left/1"])], "it is to be read too"
    other = Store()
    assert said(CheckpointError, lambda: rank_1(other, ["no", None, False]).hold("saving", 5, None)) == "no"
    assert other.check(["orc/barrier/1/1/left/1"])
    assert said(RankMissing, lambda: rank_1(Store(), ["gone", None, True]).hold("saving", 5, None)) == "gone"


def test_what_fails_on_rank_0_itself_is_told_to_those_who_wait(store):
    def fail(values):
        raise OverflowError("too many")

    with pytest.raises(OverflowError, match="too many"):
        rank_0(store, 7).hold("saving", 5, fail)
    assert store.said("1/verdict") == ["saving: rank 0 failed: OverflowError: too many", None, True]


@pytest.mark.parametrize(
    ("came", "names"), [([], "ranks 1, 2, 3 of 4"), ([2], "ranks 1, 3 of 4"), ([1, 3], "rank 2 of 4")]
)
def test_ranks_that_do_not_come_are_named(store, came, names):
    barrier = rank_0(store, world_size=4)
    for rank in came:
        store.set(f"orc/barrier/1/1/{rank}", json.dumps(["saving", 7]))
    text = f"saving: {names} did not come within 7.5 s. Every rank must call it; do not put it under is_main_process"
    assert said(RankMissing, lambda: barrier.hold("saving", 5, len, timeout_s=7.5)) == text
    assert store.said("1/verdict") == [text, None, True]
    assert list(module._unread.values()) == [(store, [f"orc/barrier/1/1/left/{rank}" for rank in came])]


def test_who_comes_at_the_last_moment_has_come(store, monkeypatch):
    def wait(keys, timeout):
        store.set("orc/barrier/1/1/1", json.dumps(["saving", 7]))
        raise StoreTimeout("late")

    monkeypatch.setattr(store, "wait", wait)
    assert rank_0(store).hold("saving", 5, sum) == 12


def test_ranks_that_are_elsewhere_are_named_with_the_place(store):
    barrier = rank_0(store, 7, world_size=4)
    store.set("orc/barrier/1/1/2", json.dumps(["loading", 7]))
    store.set("orc/barrier/1/1/3", json.dumps(["checking", 7]))
    assert said(RankMissing, lambda: barrier.hold("saving", 5, len)) == (
        "rank 0 is in saving, but rank 2: loading; rank 3: checking: the ranks do not run in step"
    )


def test_rank_0_that_does_not_come_or_is_gone_is_told(store):
    assert said(RankMissing, lambda: rank_1(store).hold("saving", 5, None)) == (
        "saving: rank 0 has not come within 30 s, rank 1 is here; every rank must call it "
        "(nobody has written orc/barrier/1/1/verdict)"
    )
    assert said(RankMissing, lambda: rank_1(Store()).hold("saving", 5, None, timeout_s=7.5)).startswith(
        "saving: rank 0 has not come within 7.5 s, rank 1 is here"
    )


@pytest.mark.parametrize("part", ["1/1", "verdict"])
def test_a_store_that_is_gone_is_told(store, part):
    store.broken.add(part)
    barrier = rank_1(store)
    assert said(RankMissing, lambda: barrier.hold("saving", 5, None)) == (
        "saving: rank 0 is gone, rank 1 is here (no line)"
    )


def test_a_verdict_counts_even_if_nobody_can_be_told_that_it_was_read(store):
    store.broken.add("left")
    assert rank_1(store, [None, 3, False]).hold("saving", 5, None) == 3


def test_the_store_holds_the_last_two_meetings_and_no_more(store):
    barrier, one = Barrier(Context(0, 3, store)), Barrier(Context(1, 3, store))
    for number in range(1, 5):
        for rank in (1, 2):
            store.set(f"orc/barrier/1/{number}/{rank}", json.dumps(["saving", rank]))
            store.set(f"orc/barrier/1/{number}/left/{rank}", "")
        assert barrier.hold("saving", 0, sum) == 3
        assert one.hold("saving", 1, None) == 3
        kept = [f"orc/barrier/1/{n}/{name}" for n in range(max(number - 1, 1), number + 1) for name in
                ("0", "1", "2", "left/1", "left/2", "verdict")]  # fmt: skip
        assert store.list_keys() == kept


def test_meetings_of_one_run_are_told_apart_by_their_order_and_name(store):
    context = Context(0, 2, store)
    names = [Barrier(context)._name, Barrier(context)._name, Barrier(context, name="background")._name]
    assert names == ["barrier/1", "barrier/2", "background/1"]
    assert Barrier(Context(0, 2, store))._name == "barrier/1"
    group = threading.Event()  # a script that makes another Accelerator has another context of the same group
    for expected in ("barrier/1", "barrier/2"):
        again = Context(1, 2, store)
        again.group = group
        assert Barrier(again)._name == expected


def test_a_meeting_has_a_connection_of_its_own_whose_answers_may_take_as_long_as_it_waits(store):
    barrier = rank_0(store, 7)
    barrier.hold("saving", 5, len)
    barrier.relay()
    barrier.part()
    assert store.answers == [max(ANSWER_S, 30.0)]
    for patience_s in (ANSWER_S / 2, ANSWER_S * 2):
        Barrier(Context(0, 2, store), patience_s).relay()
    assert store.answers[1:] == [ANSWER_S, ANSWER_S * 2]
    assert said(CheckpointError, lambda: Barrier(Context(1)).hold("saving", 5, None)) == (
        "saving and loading with several processes needs the store of their run"
    )


def test_every_transfer_has_a_place_of_its_own(store, monkeypatch):
    monkeypatch.setattr(relay, "Relay", lambda *arguments: arguments)
    barrier = Barrier(Context(1, 2, store), 3.0)
    assert [barrier.relay(), barrier.relay()] == [
        (store, "orc/barrier/1/relay/1/", 3.0),
        (store, "orc/barrier/1/relay/2/", 3.0),
    ]


def test_a_rank_parts_with_a_word_and_rank_0_waits_for_it(store):
    first, second = rank_0(store, 7), Barrier(Context(1, 2, store))
    first.hold("saving", 5, len)
    second.hold("saving", 7, None)
    second.part()
    assert store.get("orc/barrier/1/2/1") == b""
    store.waits.clear()
    first.part()
    assert store.waits == [(["orc/barrier/1/2/1"], 10.0)]
    assert module._unread == {}, "who parts has read the last verdict"
    assert store.list_keys() == ["orc/barrier/1/2/1"]


def test_who_has_agreed_on_nothing_may_part_too(store):
    store.set("orc/barrier/1/1/1", "")
    Barrier(Context(0, 2, store)).part()
    assert store.waits == [(["orc/barrier/1/1/1"], 10.0)]


def test_rank_0_parts_from_nobody_for_long(store):
    barrier = rank_0(store, 7)
    barrier.hold("saving", 5, len)
    barrier.part(3.0)
    assert store.waits[1:] == [(["orc/barrier/1/2/1"], 3.0)]
    assert len(module._unread) == 1, "nobody has read the verdict"
    store.broken.add("orc")
    Barrier(Context(1, 2, store)).part()


def test_the_end_waits_for_those_who_have_not_read_all_together_and_no_longer(store, monkeypatch):
    clock = iter([100.0, 100.5, 103.0, 107.0])
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    for name in "abc":
        module._unread[0, name] = store, [f"{name}/left/1"]
    wait_for_readers()
    assert store.waits == [(["c/left/1"], 4.5), (["b/left/1"], 2.0), (["a/left/1"], 0.0)]
    assert module._unread == {}


def test_errors_are_told_with_their_ranks_in_order():
    assert agree_on_no_error([None, "", None]) is None
    assert said(CheckpointError, lambda: agree_on_no_error([None, "z", "a"])) == "rank 1: z; rank 2: a"
