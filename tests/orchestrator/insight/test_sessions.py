"""What is made of measurements and stacks. Pure."""

from __future__ import annotations

from typing import Any

from orc.orchestrator.cli.commands.nodes import HEADER, load_row
from orc.orchestrator.insight.sessions import Group, Sample, grouped, ranges, steps_per_second


def thread(*functions: str, main: bool = True) -> dict[str, Any]:
    return {"name": "", "main": main, "frames": [{"file": "a.py", "line": 1, "function": f} for f in functions]}


def test_ranks_with_equal_stacks_are_one_group_and_the_odd_one_comes_first() -> None:
    waiting, stuck = [thread("poll", main=False), thread("all_reduce", "step")], [thread("read", "load")]
    answers = [
        {"ranks": [{"rank": 0, "threads": waiting}, {"rank": 1, "threads": waiting}]},
        {"ranks": [{"rank": 2, "threads": stuck}, {"rank": 3, "threads": [], "error": "it does not answer"}]},
        {"ranks": [{"rank": 4, "threads": waiting}]},
    ]
    groups = grouped(answers)
    assert [(group.ranks, group.error) for group in groups] == [
        ((2,), ""),
        ((3,), "it does not answer"),
        ((0, 1, 4), ""),
    ]
    assert groups[2] == Group((0, 1, 4), (("a.py", 1, "all_reduce"), ("a.py", 1, "step")))


def test_numbers_that_follow_each_other_are_a_range() -> None:
    assert ranges([0, 1, 2, 5, 7, 8]) == "0-2,5,7-8"
    assert (ranges([3]), ranges([])) == ("3", "")


def test_speed_is_told_only_where_it_can_be() -> None:
    first = {"at": 10.0, "progress": {"step": 100}}
    assert steps_per_second(first, {"at": 14.0, "progress": {"step": 130}}) == 7.5
    assert steps_per_second(first, {"at": 14.0, "progress": {"step": 20}}) is None  # it began anew
    assert steps_per_second(first, {"at": 14.0, "progress": {}}) is None
    assert steps_per_second(None, first) is None


def test_a_node_that_cannot_be_asked_keeps_its_row() -> None:
    shown = load_row(Sample("job-1", 2, "node3", {}, error="no route to host"))
    assert shown[:4] == ("job-1", "2", "node3", "no route to host")
    assert len(shown) == len(HEADER)


def test_gpus_are_summed_up() -> None:
    gpu = {"index": 0, "utilisation": 90, "memory_used_mib": 30720, "memory_mib": 81920, "temperature_c": 60}
    memory = {"memory_allocated": 3e9, "memory_reserved": 4e9, "memory_peak": 3.5e9}
    data = {
        "state": "running",
        "cpu_percent": 12.3,
        "cpus": 64,
        "load": 3.0,
        "memory_used": 1e9,
        "memory_total": 5e9,
        "gpus": [gpu, {**gpu, "utilisation": 100}],
        "ranks": [
            {"rank": 0, "cpu_percent": 99.0, "rss": 2e9, **memory},
            {"rank": None, "cpu_percent": 1.0, "rss": 1e6},
        ],
        "progress": {"step": 12},
    }
    shown = dict(zip(HEADER, load_row(Sample("j", 0, "h", data, 1.5)), strict=True))
    assert (shown["GPU"], shown["RANKS"], shown["RANK MEM"]) == ("2: 95% 60 GiB", "1", "2.0 GB")
    assert shown["RANK GPU MEM"] == "3.0 GB of 4.0 GB, peak 3.5 GB"
    assert (shown["STEP"], shown["STEP/S"]) == ("12", "1.5")
