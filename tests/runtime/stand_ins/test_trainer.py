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
    assert mine == theirs
