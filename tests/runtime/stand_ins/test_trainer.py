"""Transformers' Trainer, unmodified, gives on the runtime what it gives on the real accelerate."""

import pytest

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(1100)]


@pytest.mark.parametrize("processes", ["1", "2"])
def test_the_trainer_gives_the_numbers_of_the_reference(figures, processes):
    mine, theirs = (
        {name: found for name, found in figures[which][processes].items() if name.startswith("with_trainer.")}
        for which in ("orc", "reference")
    )
    assert len(theirs) == 11
    assert {name: mine[name] for name in theirs} == theirs


def test_pieces_of_sequences_by_deepspeed_give_the_numbers_of_whole_ones(figures):
    whole, pieces = (figures["orc"][processes]["with_trainer.sequences"] for processes in ("1", "2"))
    assert whole["steps"] == pieces["steps"] == 12  # not more for the loaders of two processes
    assert pieces["loss"] == pytest.approx(whole["loss"], rel=1e-4)
    assert pieces["norm"] == pytest.approx(whole["norm"], rel=1e-3)
    assert pieces["weights"] == pytest.approx(whole["weights"], rel=1e-4)
