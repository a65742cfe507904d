"""Polls of clusters: the lease of the process that polls one, and its last answers.

Where users have accounts of their own on a cluster, it is asked about the jobs of each account by itself.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from orc.orchestrator.ledger import leases
from orc.orchestrator.ledger.database import Connection

_TABLE = "cluster_polls"
_COLUMNS = "cluster, lease_owner, lease_expires_at, next_at, interval_s, polled_at, answered_at, error, account"
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


def find(connection: Connection, cluster: str, account: str = "") -> ClusterPoll | None:
    """Return what is known of *cluster*; `None` before it is polled for the first time."""
    rows = connection.tuples(
        f"SELECT {_COLUMNS} FROM cluster_polls WHERE cluster = :c AND account = :a",  # noqa: S608
        {"c": cluster, "a": account},
    )
    return ClusterPoll(*rows[0]) if rows else None


def all_polls(connection: Connection) -> list[ClusterPoll]:
    """Return the poll records of all clusters, by name and account."""
    return [
        ClusterPoll(*row)
        for row in connection.tuples(f"SELECT {_COLUMNS} FROM cluster_polls ORDER BY cluster, account")  # noqa: S608
    ]


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
    return leases.give_back(
        connection,
        _TABLE,
        {"cluster": poll.cluster, "account": poll.account},
        owner,
        next_at=poll.next_at,
        interval_s=poll.interval_s,
        polled_at=poll.polled_at,
        answered_at=poll.answered_at,
        error=poll.error,
    )


def release(connection: Connection, cluster: str, owner: str, account: str = "") -> None:
    """Give the lease back without a result, if it is still *owner*'s."""
    leases.give_back(connection, _TABLE, {"cluster": cluster, "account": account}, owner)
