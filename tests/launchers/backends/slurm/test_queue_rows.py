"""What squeue and sacct print, read field by field."""

from __future__ import annotations

import pytest

from orc.launchers.backends.slurm.queue_rows import expand_nodes, parse_sacct, parse_squeue


def test_a_running_job_in_squeue() -> None:
    (row,) = parse_squeue("12|orc-d-a1|RUNNING|1700000000|1700000010|1700003610|1:00:00|node[1-2]|cpu|2|None\n")
    assert (row.job_id, row.name, row.state) == ("12", "orc-d-a1", "RUNNING")
    assert (row.submitted_at, row.started_at, row.limit_s) == (1700000000.0, 1700000010.0, 3600.0)
    assert row.nodes == ("node1", "node2")
    assert row.reason == ""
    assert not row.waiting
    assert not row.ended


def test_the_expected_start_of_a_waiting_job_is_not_its_start() -> None:
    (row,) = parse_squeue("12|orc-d-a1|PENDING|1700000000|1700009999|N/A|30:00||cpu|2|Resources")
    assert row.waiting
    assert row.started_at is None
    assert row.reason == "Resources"


def test_a_reason_may_hold_the_separator() -> None:
    (row,) = parse_squeue("1|n|PENDING|1|N/A|N/A|30:00||cpu|1|odd|reason")
    assert row.reason == "odd|reason"


def test_noise_between_the_rows_is_left_out() -> None:
    assert parse_squeue("slurm_load_jobs warning\n\n|||\n") == []


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("30:00", 1800.0), ("1:30:00", 5400.0), ("2-01:00:00", 176400.0), ("UNLIMITED", None), ("Partition_Limit", None)],
)
def test_time_limits(text: str, seconds: float | None) -> None:
    (row,) = parse_squeue(f"1|n|RUNNING|1|1|1|{text}||cpu|1|None")
    assert row.limit_s == seconds


def test_a_cancelled_job_in_sacct_names_who_did_it() -> None:
    (row,) = parse_sacct("4|orc-d-a1|CANCELLED by 1000|1|2|3|00:30:00|node[1-2]|0:15|None assigned")
    assert (row.state, row.by, row.signal, row.exit_code, row.failed_node) == ("CANCELLED", "1000", 15, 0, "")
    assert row.ended


def test_a_failed_node_in_sacct() -> None:
    (row,) = parse_sacct("4|orc-d-a1|NODE_FAIL|1|2|3|00:30:00|node[1-2]|1:0|node2")
    assert row.failed_node == "node2"


def test_a_job_without_nodes_in_sacct() -> None:
    (row,) = parse_sacct("4|orc-d-a1|PENDING|1|Unknown|Unknown|00:30:00|None assigned|0:0|None assigned")
    assert row.nodes == ()
    assert row.started_at is None


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("", ()),
        ("node1", ("node1",)),
        ("node[1-3,7]", ("node1", "node2", "node3", "node7")),
        ("node[08-11]", ("node08", "node09", "node10", "node11")),
        ("a1,b[1-2]-ib,c", ("a1", "b1-ib", "b2-ib", "c")),
        ("r[1-2]n[1-2]", ("r1n1", "r1n2", "r2n1", "r2n2")),
        ("(null)", ("(null)",)),
    ],
)
def test_node_lists(text: str, names: tuple[str, ...]) -> None:
    assert expand_nodes(text) == names
