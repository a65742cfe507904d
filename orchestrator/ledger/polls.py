"""Polls of clusters: the lease of the process that polls one, the times at which it is polled, and its last answers.

A cluster that is asked over a network is asked by one process at a time, whatever number of them runs passes. Where
users have accounts of their own on it, it is asked about the jobs of each account by itself.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from orc.orchestrator.ledger import leases
from orc.orchestrator.ledger.database import Connection
from orc.orchestrator.ledger.records import columns_of

_TABLE = "cluster_polls"
_LATELY_S = 120.0  # twice the longest interval between two polls


@dataclass(frozen=True)
class ClusterPoll:
    """Row of a cluster. Times are seconds since the epoch."""

    cluster: str
    lease_owner: str | None = None  # who asks it just now
    lease_expires_at: float | None = None
    next_at: float | None = None  # when it is asked again
    interval_s: float | None = None
    polled_at: float | None = None  # when it was asked last
    answered_at: float | None = None  # when it has answered last
    error: str | None = None  # why it did not answer the last time
    account: str = ""  # about whose jobs it was asked; empty where it has no accounts of users


_COLUMNS = columns_of(ClusterPoll)


def find(connection: Connection, cluster: str, account: str = "") -> ClusterPoll | None:
    """Return what is known of *cluster*; `None` before it is polled for the first time."""
    rows = connection.tuples(
        f"SELECT {_COLUMNS} FROM cluster_polls WHERE cluster = :c AND account = :a",  # noqa: S608
        {"c": cluster, "a": account},
    )
    return ClusterPoll(*rows[0]) if rows else None


def all_polls(connection: Connection) -> list[ClusterPoll]:
    """Return the poll records of all clusters, by name and account."""
    rows = connection.tuples(f"SELECT {_COLUMNS} FROM cluster_polls ORDER BY cluster, account")  # noqa: S608
    return [ClusterPoll(*row) for row in rows]


def by_cluster(connection: Connection, only: str | None = None) -> list[ClusterPoll]:
    """Return one row for each cluster, by name: that of the account for which it was polled last, with the error of
    another one about which it was asked at about the same time.

    With *only*, a user, errors about the accounts of others do not say more than that there are some.
    """
    newest: dict[str, ClusterPoll] = {}
    every = [_without_names(poll, only) for poll in all_polls(connection)]
    for poll in every:
        before = newest.get(poll.cluster)
        if before is None or (poll.polled_at or 0.0) > (before.polled_at or 0.0):
            newest[poll.cluster] = poll
    for poll in every:
        last = newest[poll.cluster]
        if poll.error and not last.error and (poll.polled_at or 0.0) >= (last.polled_at or 0.0) - _LATELY_S:
            newest[poll.cluster] = replace(last, error=f"{poll.account}: {poll.error}".removeprefix(": "))
    return [newest[cluster] for cluster in sorted(newest)]


def _without_names(poll: ClusterPoll, only: str | None) -> ClusterPoll:
    if only is None or not poll.error or not poll.account or poll.account.partition(" ")[0] == only:
        return poll
    return replace(poll, account="", error="it could not be asked with the account of another user")


def take_lease(connection: Connection, cluster: str, owner: str, now: float, ttl_s: float, account: str = "") -> bool:
    """Take the lease of *cluster*, the right to poll it; False while another owner has it."""
    return leases.take(connection, _TABLE, {"cluster": cluster, "account": account}, owner, now, ttl_s)


def record(connection: Connection, poll: ClusterPoll, owner: str) -> bool:
    """Store what a poll has shown and give the lease back; False (and nothing stored) when *owner* has lost it."""
    known = {name: getattr(poll, name) for name in ("next_at", "interval_s", "polled_at", "answered_at", "error")}
    return leases.give_back(connection, _TABLE, {"cluster": poll.cluster, "account": poll.account}, owner, **known)


def release(connection: Connection, cluster: str, owner: str, account: str = "") -> None:
    """Give the lease back without a result, if it is still *owner*'s."""
    leases.give_back(connection, _TABLE, {"cluster": cluster, "account": account}, owner)


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
