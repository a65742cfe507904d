"""trl, peft, diffusers and datasets, unmodified, give the numbers of the reference package on the stand-in."""

import pytest

pytestmark = pytest.mark.timeout(1100)
TOLERANCE = 2e-4  # of float32 sums in another order


def close(mine, theirs):
    """Whether two results are equal, numbers nearly so."""
    if isinstance(theirs, dict):
        return mine.keys() == theirs.keys() and all(close(mine[name], theirs[name]) for name in theirs)
    if isinstance(theirs, list):
        return len(mine) == len(theirs) and all(map(close, mine, theirs))
    return mine == pytest.approx(theirs, rel=TOLERANCE, abs=TOLERANCE) if isinstance(theirs, float) else mine == theirs


@pytest.mark.parametrize(("processes", "programs"), [("1", 12), ("2", 5)])
def test_programs_give_the_numbers_of_the_reference(figures, processes, programs):
    mine, theirs = (
        {name: found for name, found in figures[which][processes].items() if not name.startswith("with_trainer.")}
        for which in ("orc", "reference")
    )
    assert (len(mine), len(theirs)) == (12 if processes == "1" else 9, programs)
    different = {name: (mine[name], theirs[name]) for name in theirs if not close(mine[name], theirs[name])}
    assert not different


def test_streams_of_two_processes_lose_and_repeat_nothing(figures):
    streams = figures["orc"]["2"]["with_datasets.streams"]
    every = list(range(26))
    assert streams["metrics, dispatch=True"] == streams["metrics, dispatch=False"] == every
    assert figures["orc"]["2"]["with_datasets.split_by_node"]["rows"] == every
