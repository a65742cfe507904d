"""Where a loader is: positions that are saved, and the passes and the cursor they come from."""

import pytest

from orc.runtime.data.position import Cursor, Cut, Pass, cut_at, next_epoch, offset_of


def position(**changes):
    return {
        "epoch": 4,
        "live": True,
        "rounds": 3,
        "offset": 0,
        "global_batch": 8,
        "length": 50,
        "key": {"kind": "sequential"},
        "generator": None,
    } | changes


@pytest.mark.parametrize(("offset", "taken"), [(0, 24), (24, 24), (21, 21), (1, 1)])
def test_the_samples_taken_are_the_offset_or_else_whole_rounds(offset, taken):
    assert offset_of(position(offset=offset)) == taken


@pytest.mark.parametrize(
    ("offset", "global_batch", "cut"),
    [
        (0, 8, Cut()),
        (24, 8, Cut()),
        (0, 4, Cut(3, 24)),
        (12, 4, Cut()),
        (21, 8, Cut(3, 21)),
    ],
)
def test_rounds_are_cut_anew_only_where_they_would_lie_elsewhere(offset, global_batch, cut):
    assert cut_at(position(offset=offset), global_batch) == cut


def test_nothing_is_cut_anew_at_the_start_of_an_epoch():
    assert cut_at(position(rounds=0), 5) == Cut(rounds=0, samples=0, batches=0)


def test_after_the_last_batch_the_next_epoch_is_left():
    finished = position(offset=50, finished=True, batches=6)
    before = dict(finished)
    assert next_epoch(finished) == position(
        epoch=5, live=False, rounds=0, offset=0, key=None, finished=False, batches=6
    )
    assert finished == before


@pytest.mark.parametrize("changes", [{}, {"finished": False}, {"finished": True, "live": False}])
def test_before_the_last_batch_the_position_is_left_as_it_is(changes):
    where = position(**changes)
    assert next_epoch(where) is where


def test_a_pass_counts_its_samples_from_the_cut_on():
    assert (Pass(done=5).rounds, Pass(done=5).samples(8)) == (5, 40)
    continued = Pass(done=5, cut=Cut(rounds=3, samples=30))
    assert (continued.rounds, continued.samples(8)) == (2, 46)


def test_setting_the_epoch_gives_up_a_restored_position_of_another():
    cursor = Cursor(pending=position())
    cursor.set_epoch(4)
    assert (cursor.epoch, cursor.pending) == (4, position())
    cursor.set_epoch(5)
    assert (cursor.epoch, cursor.pending) == (5, None)
    cursor.set_epoch(6)
    assert (cursor.epoch, cursor.pending) == (6, None)
