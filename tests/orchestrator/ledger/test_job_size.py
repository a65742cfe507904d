"""The size of a job, and the share of its training that is done."""

from __future__ import annotations

import pytest

from orc.orchestrator.ledger.records import JobSize, share_done


@pytest.mark.parametrize(
    ("resources", "size"),
    [({}, (1, 0)), ({"nodes": 2, "gpus_per_node": 8}, (2, 16)), ({"nodes": "2:4", "gpus_per_node": 1}, (4, 4))],
)
def test_an_elastic_job_counts_as_the_most_that_it_takes(resources, size):
    made = JobSize.of({"resources": resources})
    assert (made.nodes, made.gpus) == size


@pytest.mark.parametrize(
    ("args", "progress", "share"),
    [
        (("--epochs", "12"), {"epoch": 3, "step": 120}, 0.25),
        (("--epochs", "12"), {"epoch": 3, "samples": 50, "of": 100}, 3.5 / 12),
        (("--max-steps=200", "--epochs", "3"), {"epoch": 2, "step": 50}, 0.25),
        (("trainer.max_epochs=4",), {"epoch": 1}, None),
        (("max_epochs=4",), {"epoch": 1}, 0.25),
        (("--epochs", "2"), {"epoch": 9}, 1.0),
        (("--epochs", "0"), {"epoch": 1}, None),
        (("--epochs", "nan"), {"epoch": 1}, None),
        (("--lr", "0.1"), {"epoch": 1, "step": 3}, None),
        (("--epochs", "12"), {}, None),
        (("--epochs", "12"), {"epoch": "x"}, None),
        ((), {"epoch": 1}, None),
    ],
)
def test_the_share_that_is_done_is_of_the_steps_or_epochs_that_the_arguments_name(args, progress, share):
    assert share_done({"args": args}, progress) == (None if share is None else pytest.approx(share))
