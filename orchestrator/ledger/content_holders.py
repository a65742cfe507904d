"""Holders of contents: which user has had a content or a tree in hands, known by its digest alone."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from orc.orchestrator.ledger.database import Connection, batches, insert, one_of


def add(connection: Connection, username: str, digests: Iterable[str], now: float) -> None:
    """Note that the user has, or has had, what these digests name."""
    rows = [{"username": username, "digest": digest, "at": now} for digest in dict.fromkeys(digests)]
    insert(
        connection, "content_holders", *rows, conflict="ON CONFLICT (username, digest) DO UPDATE SET at = excluded.at"
    )


def held(connection: Connection, username: str, digests: Sequence[str]) -> set[str]:
    """Return those of *digests* that the user is recorded to have."""
    found: set[str] = set()
    for some in batches(digests):
        these, parameters = one_of("digest", some)
        query = f"SELECT digest FROM content_holders WHERE username = :user AND {these}"  # noqa: S608
        found |= {row[0] for row in connection.tuples(query, {"user": username, **parameters})}
    return found


def forget_user(connection: Connection, username: str) -> None:
    """Forget what the user has had: the name may be another person's from now on."""
    connection.execute("DELETE FROM content_holders WHERE username = :user", {"user": username})


def forget(connection: Connection, before: float) -> int:
    """Delete the notes of before that time, whose contents are uploaded again when needed; return their number."""
    return connection.execute("DELETE FROM content_holders WHERE at < :before", {"before": before})
