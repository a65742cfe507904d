"""Encrypted secrets of jobs: ciphertext only; the key that decrypts it is not in the ledger."""

from __future__ import annotations

from orc.orchestrator.ledger.database import Connection, insert

REMOVE = "DELETE FROM sealed_secrets WHERE job_id = :job"  # of a job that needs them no more


def put(connection: Connection, job_id: str, ciphertext: str, now: float) -> None:
    """Store the encrypted secrets of a job, in place of those that there may be."""
    conflict = "ON CONFLICT (job_id) DO UPDATE SET sealed = excluded.sealed, at = excluded.at"
    insert(connection, "sealed_secrets", {"job_id": job_id, "sealed": ciphertext, "at": now}, conflict=conflict)


def find(connection: Connection, job_id: str) -> str | None:
    """Return the encrypted secrets of a job."""
    rows = connection.tuples("SELECT sealed FROM sealed_secrets WHERE job_id = :job", {"job": job_id})
    return rows[0][0] if rows else None
