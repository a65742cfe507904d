"""Polling: times at which, and processes by which, a cluster is polled. Pure.

A cluster that is asked over a network is asked by one process at a time, whatever number of them runs passes: the row
of the cluster in the ledger (``cluster_polls``) is its lease, and remembers when it is asked next.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from orc.orchestrator.ledger.polls import ClusterPoll

SHORTEST_S = 2.0  # between two polls while states change
LONGEST_S = 60.0
GROWTH = 1.5  # of the interval with each poll that finds nothing new
ERROR_GROWTH = 2.0  # of the interval with each poll that gets no answer
JITTER = 0.1  # of the interval, more or less: the clusters of many processes are not all asked at once
FRESH_S = 1.0  # a person who looks is shown an answer of this age without another poll
# Longer than most polls. One that takes longer may meet another one: harmless, because every write names a revision.
LEASE_S = 90.0


def next_interval(interval_s: float, *, changed: bool, failed: bool = False) -> float:
    """Return the seconds until the next poll of a cluster, after one *interval_s* after its predecessor.

    A poll that brought something new, or the first one, makes it the shortest.
    """
    if changed or interval_s < SHORTEST_S:
        return SHORTEST_S
    return min(interval_s * (ERROR_GROWTH if failed else GROWTH), LONGEST_S)


def spread(interval_s: float, random: float) -> float:
    """Return *interval_s* with its jitter; *random* is between 0 and 1."""
    return interval_s * (1.0 + JITTER * (2.0 * random - 1.0))


def is_due(poll: ClusterPoll | None, now: float, *, moved_at: float, max_age_s: float | None) -> bool:
    """Return True when the cluster is to be polled now.

    *moved_at* is the newest change of one of its jobs: what was just sent or cancelled is looked at soon, whatever the
    interval. *max_age_s* is for a person who looks: an answer older than that is not good enough; `None` is a scheduled
    pass, which keeps to the interval. A clock that was set back makes it due.
    """
    if poll is None or poll.polled_at is None or poll.polled_at > now:
        return True
    if max_age_s is not None:
        return now - poll.polled_at >= max_age_s
    soon = moved_at > poll.polled_at and now - poll.polled_at >= SHORTEST_S
    return soon or poll.next_at is None or poll.next_at <= now or poll.next_at > now + 2 * LONGEST_S
