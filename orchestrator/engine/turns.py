"""Turns: the order in which QUEUED jobs of one cluster are sent. Pure.

A job's turn is a time: that of its submission, earlier by `PRIORITY_S` for each point of its priority. The earliest
goes first. So a job of a higher priority overtakes those that were submitted at most so many hours before it, and
nobody
waits for ever: after 200 hours even the lowest priority comes before everything that is submitted then.
"""

from __future__ import annotations

PRIORITY_S = 3600.0


def turn(created_at: float, priority: int, job: str, *, head_start_s: float = 0.0) -> tuple[float, float, str]:
    """Return the key by which jobs are sorted: the smallest goes first.

    *head_start_s* is what fair share gives the job's owner (`orc.orchestrator.engine.fair_share`).
    """
    return (created_at - priority * PRIORITY_S - head_start_s, created_at, job)
