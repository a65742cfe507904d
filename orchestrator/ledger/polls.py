"""Polls of clusters: the turns of processes to poll one, and its last answers.

Where users have accounts of their own on a cluster, it is asked about the jobs of each account by itself.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from orc.orchestrator.ledger.database import Connection

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
    """Take the turn to poll *cluster*; False while another owner has it."""
    connection.execute(
        "INSERT INTO cluster_polls (cluster, account) VALUES (:cluster, :account) "
        "ON CONFLICT (cluster, account) DO NOTHING",
        {"cluster": cluster, "account": account},
    )
    # A lease that ends later than any lease given now was given before the clock was set back.
    taken = connection.execute(
        "UPDATE cluster_polls SET lease_owner = :owner, lease_expires_at = :expires "
        "WHERE cluster = :cluster AND account = :account AND "
        "(lease_owner IS NULL OR lease_owner = :owner OR lease_expires_at <= :now OR lease_expires_at > :latest)",
        {
            "cluster": cluster,
            "account": account,
            "owner": owner,
            "expires": now + ttl_s,
            "now": now,
            "latest": now + 10 * ttl_s,
        },
    )
    return taken == 1


def record(connection: Connection, poll: ClusterPoll, owner: str) -> bool:
    """Store what a poll has shown and give the turn back; False (and nothing stored) when *owner* has lost it."""
    stored = connection.execute(
        "UPDATE cluster_polls SET lease_owner = NULL, lease_expires_at = NULL, next_at = :next_at, "
        "interval_s = :interval_s, polled_at = :polled_at, answered_at = :answered_at, error = :error "
        "WHERE cluster = :cluster AND account = :account AND lease_owner = :owner",
        {
            "cluster": poll.cluster,
            "account": poll.account,
            "owner": owner,
            "next_at": poll.next_at,
            "interval_s": poll.interval_s,
            "polled_at": poll.polled_at,
            "answered_at": poll.answered_at,
            "error": poll.error,
        },
    )
    return stored == 1


def release(connection: Connection, cluster: str, owner: str, account: str = "") -> None:
    """Give the turn back without a result, if it is still *owner*'s."""
    connection.execute(
        "UPDATE cluster_polls SET lease_owner = NULL, lease_expires_at = NULL "
        "WHERE cluster = :cluster AND account = :account AND lease_owner = :owner",
        {"cluster": cluster, "account": account, "owner": owner},
    )
