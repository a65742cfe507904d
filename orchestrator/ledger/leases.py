"""Leases in the ledger: a row is one process's, until it gives it back or its time is over.

A lease is free when nobody holds it, when it has expired, or when its owner was a process of this very machine that is
gone: so a killed ``orc submit`` need not be waited for. A process that has lost its lease changes nothing in the row.
Claims on jobs are leases, and so are the polls of clusters and the retention of old jobs.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from orc.launchers.agent.procfs import boot_id, process_start
from orc.orchestrator.ledger.database import Connection
from orc.orchestrator.ledger.records import select_jobs

# Of a claim on a job. Longer than any backend's own time-out of one submit call; only what died on another machine is
# waited for so long.
CLAIM_S = 300.0


def new_owner() -> str:
    """Return an identity of this process, for one purpose, that no other process has on any machine."""
    pid = os.getpid()
    # Its start, field 22 of /proc/<pid>/stat, tells a process from a later one with the same number.
    return f"{_here()}{pid}/{process_start(pid) or ''}/{os.urandom(4).hex()}"


def is_free(owner: str | None, expires_at: float | None, now: float) -> bool:
    """Return True for a lease that another owner may take."""
    return owner is None or expires_at is None or expires_at <= now or owner_is_gone(owner)


def claim(connection: Connection, job_ids: Sequence[str], owner: str, now: float) -> bool:
    """Take all of the jobs for `CLAIM_S`, or none; False while another owner has one of them."""
    rows = select_jobs(connection, "j.claim_owner, j.claim_expires_at", job_ids)
    if len(rows) < len(job_ids) or not all(_may_take(held, until, owner, now, CLAIM_S) for held, until in rows):
        return False
    connection.executemany(
        "UPDATE jobs SET claim_owner = :owner, claim_expires_at = :expires WHERE id = :id",
        [{"id": job_id, "owner": owner, "expires": now + CLAIM_S} for job_id in job_ids],
    )
    return True


def release(connection: Connection, job_ids: Sequence[str], owner: str) -> None:
    """Give the jobs back that are still *owner*'s."""
    connection.executemany(
        "UPDATE jobs SET claim_owner = NULL, claim_expires_at = NULL WHERE id = :id AND claim_owner = :owner",
        [{"id": job_id, "owner": owner} for job_id in job_ids],
    )


def take(
    connection: Connection, table: str, key: Mapping[str, str], owner: str, now: float, ttl_s: float, due: str = "1 = 1"
) -> bool:
    """Take the row with *key* for *ttl_s*, and make it where there is none; False while another owner has it.

    *due* is what else has to be true of it, in SQL; it may name ``:now``.
    """
    names = ", ".join(key)
    connection.execute(
        f"INSERT INTO {table} ({names}) VALUES ({', '.join(f':{name}' for name in key)}) "  # noqa: S608
        f"ON CONFLICT ({names}) DO NOTHING",
        key,
    )
    ((held, until),) = connection.tuples(
        f"SELECT lease_owner, lease_expires_at FROM {table} WHERE {_is(key)}",  # noqa: S608
        key,
    )
    if not _may_take(held, until, owner, now, ttl_s):
        return False
    taken = connection.execute(
        f"UPDATE {table} SET lease_owner = :owner, lease_expires_at = :expires WHERE {_is(key)} AND {due} "  # noqa: S608
        "AND COALESCE(lease_owner, '') = :held AND COALESCE(lease_expires_at, 0) = :until",
        {**key, "owner": owner, "expires": now + ttl_s, "now": now, "held": held or "", "until": until or 0.0},
    )
    return taken == 1


def give_back(connection: Connection, table: str, key: Mapping[str, str], owner: str, **changes: object) -> bool:
    """Give the row back with *changes* of its columns; False, and nothing is changed, where *owner* has lost it."""
    also = "".join(f", {name} = :{name}" for name in changes)
    given_back = connection.execute(
        f"UPDATE {table} SET lease_owner = NULL, lease_expires_at = NULL{also} "  # noqa: S608
        f"WHERE {_is(key)} AND lease_owner = :owner",
        {**key, "owner": owner, **changes},
    )
    return given_back == 1


def _may_take(held: str | None, until: float | None, owner: str, now: float, ttl_s: float) -> bool:
    # A lease that ends later than any lease given now was given before the clock was set back.
    return held == owner or is_free(held, until, now) or (until is not None and until > now + 10 * ttl_s)


def _is(key: Mapping[str, str]) -> str:
    return " AND ".join(f"{name} = :{name}" for name in key)


_abandoned: set[str] = set()  # owners of this process whose claims the ledger did not take back


def abandon(owner: str) -> None:
    """Take *owner*, an identity of this process, for gone: it will do nothing more with what it has claimed."""
    _abandoned.add(owner)


def owner_is_gone(owner: str) -> bool:
    """Return True when the owner was a process on this machine and has ended; False when it was on another one."""
    if owner in _abandoned:
        return True
    if not owner.startswith(_here()):
        return False
    pid, started, _ = owner.removeprefix(_here()).split("/")
    return process_start(int(pid)) != started


def _here() -> str:
    """Return what the owners on this machine, since its start and in this container, begin with."""
    return f"{boot_id()}/{Path('/proc/self/ns/pid').stat().st_ino}/"
