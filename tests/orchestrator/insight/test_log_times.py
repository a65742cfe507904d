"""Logs of ranks as one."""

from __future__ import annotations

from orc.orchestrator.insight.log_times import UNKNOWN, merged


def test_lines_of_ranks_come_by_their_times_and_those_without_stay_with_the_line_before():
    logs = {
        1: b"no time yet\n2026-01-01T00:00:02Z b\n  goes on\n",
        0: b"2026-01-01T00:00:01Z a\n2026-01-01T00:00:03Z c\n",
    }
    found = list(merged(logs))
    texts = [(rank, line.decode().split("Z ")[-1].strip()) for _, rank, line in found]
    assert texts == [(1, "no time yet"), (0, "a"), (1, "b"), (1, "goes on"), (0, "c")]
    assert [at == UNKNOWN for at, _, _ in found] == [True, False, False, False, False]
