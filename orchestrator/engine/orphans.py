"""Orphans: what a cut-off submission brings to its cluster after its job was refused or cancelled is cancelled.

A submission that nobody could find was given up (`RELEASED`), and its job may have ended before anything else was sent.
The agents' lease keeps two copies of one attempt from running, but of such an attempt the orphan is the first copy. Nor
does a lease help where the attempt was sent again to another place (its owner has another account, the cluster another
root) or to other hosts. So the copy is looked for by its marker, where it was sent, for some time, and told to end as
soon as it shows itself.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from orc.launchers.errors import LaunchError
from orc.launchers.ids import AttemptId
from orc.orchestrator.engine.steps import apply, what_of
from orc.orchestrator.ledger.database import LedgerError, insert
from orc.orchestrator.ledger.lifecycle import Event, Kind
from orc.orchestrator.ledger.records import Destination, JobUpdate, dump

if TYPE_CHECKING:
    from orc.launchers.backends.base import Handle
    from orc.orchestrator.engine.steps import PassReport
    from orc.orchestrator.ledger.records import AttemptRecord, JobRecord
    from orc.orchestrator.workspace import Workspace


WATCH_S = 900.0  # for which a copy is looked for after its attempt was last in doubt
LOOK_S = 30.0  # between two looks
GONE_S = 7 * 86400.0  # after that time, for which its cluster is waited for


@dataclass(frozen=True)
class Orphan:
    """Attempt of which a copy may come late, at one place. Times are seconds since the epoch."""

    job_id: str
    attempt: int
    sent_to: Destination | None  # where it may appear; `None`: where it would be sent now
    cluster: str
    owner: str
    hosts: tuple[str, ...]  # on which it may appear
    until: float  # after that nobody looks any more


_THIS = "job_id = :job_id AND attempt = :attempt AND sent_to = :sent_to"


def _key(job_id: str, attempt: int, sent_to: Destination | None) -> dict[str, Any]:
    place = dump(sent_to.place.to_dict()) if sent_to is not None else ""
    return {"job_id": job_id, "attempt": attempt, "sent_to": place}


def expect(ws: Workspace, job: JobRecord, hosts: Sequence[str]) -> None:
    """Have the newest attempt of *job* looked for on *hosts*, and on those where it is looked for already.

    It is about to be given up. Raises `LedgerError`.
    """
    key = _key(job.id, job.number, job.attempt.sent_to if job.attempt else None)
    with ws.ledger.transaction() as tx:
        before = tx.connection.tuples(f"SELECT hosts FROM late_copies WHERE {_THIS}", key)  # noqa: S608
        known = json.loads(before[0][0]) if before else []
        row = {**key, "hosts": dump(list(dict.fromkeys([*known, *hosts]))), "next_at": tx.now + LOOK_S}
        changes = "hosts = excluded.hosts, next_at = excluded.next_at, until = excluded.until"
        conflict = f"ON CONFLICT (job_id, attempt, sent_to) DO UPDATE SET {changes}"
        insert(tx.connection, "late_copies", {**row, "until": tx.now + WATCH_S}, conflict=conflict)


def next_due(ws: Workspace) -> float | None:
    """Return when the next look is due; `None` where no copy is expected."""
    with ws.ledger.database.read() as connection:
        at: float | None = connection.tuples("SELECT MIN(next_at) FROM late_copies")[0][0]
    return at


def due_clusters(ws: Workspace) -> set[str]:
    """Return the clusters at which a look is due."""
    return {copy.cluster for copy in _due(ws)}


def is_given_up(attempt: AttemptRecord) -> bool:
    """Return True for an attempt that is over and of which its cluster was found to have nothing."""
    return attempt.state.terminal and not attempt.handle


def is_outside_lease(attempt: AttemptRecord, sent_to: Destination | None, hosts: Sequence[str]) -> bool:
    """Return True where a copy at *sent_to*, on *hosts*, is kept from running by no lease that *attempt* has."""
    return _is_another_place(attempt, sent_to) or bool(_hosts_apart(attempt, hosts))


def _is_another_place(attempt: AttemptRecord, sent_to: Destination | None) -> bool:
    return sent_to is not None and attempt.sent_to is not None and sent_to.is_another_place(attempt.sent_to)


def _hosts_apart(attempt: AttemptRecord, hosts: Sequence[str]) -> tuple[str, ...]:
    """Return those of *hosts* that the handle of *attempt* does not name."""
    own = (attempt.handle or {}).get("hosts", ())
    return tuple(host for host in hosts if host not in own)


def end_if_orphaned(ws: Workspace, job: JobRecord, handle: Handle, sent_to: Destination | None) -> None:
    """End the copy that *handle* names at *sent_to*, where the newest attempt of *job* was given up before it came, or
    runs elsewhere.

    What cannot be told now is left to passes: an attempt is expected from the moment at which it is given up.
    """
    attempt = job.attempt
    if attempt is None or attempt.marker != handle.marker:
        return
    if not is_given_up(attempt) and not (attempt.handle and is_outside_lease(attempt, sent_to, handle.hosts)):
        return
    try:
        _end(ws, job, attempt, handle, sent_to)
    except LedgerError:
        raise
    except LaunchError:
        pass


def end_due(ws: Workspace, report: PassReport, cluster: str | None = None) -> None:
    """Look for the copies that are due (at *cluster*, if given), and end those that are there. Raises `LedgerError`."""
    for copy in _due(ws):
        if cluster is not None and copy.cluster != cluster:
            continue
        try:
            _look(ws, copy)
        except LedgerError:
            raise
        except Exception as error:  # noqa: BLE001 - one backend's defect must not keep the others' jobs waiting
            report.unreachable.setdefault(copy.cluster, what_of(error))
            if ws.clock() - copy.until > GONE_S:  # a cluster or an account that is gone for days does not come back
                _forget(ws, copy.job_id, copy.attempt, copy.sent_to)
            else:
                _look_later(ws, copy, copy.until)


def _due(ws: Workspace) -> list[Orphan]:
    now = ws.clock()
    with ws.ledger.database.read() as connection:
        # One due after the latest time was written before the clock was set back.
        rows = connection.tuples(
            "SELECT l.job_id, l.attempt, l.sent_to, j.cluster, j.owner, l.hosts, l.until FROM late_copies l JOIN "
            "jobs j ON j.id = l.job_id WHERE l.next_at <= :now OR l.next_at > :latest ORDER BY l.next_at, l.job_id",
            {"now": now, "latest": now + WATCH_S},
        )
    return [
        Orphan(job, attempt, Destination.from_text(sent_to), cluster, owner, tuple(json.loads(hosts)), until)
        for job, attempt, sent_to, cluster, owner, hosts, until in rows
    ]


def _look(ws: Workspace, copy: Orphan) -> None:
    job = ws.ledger.job(copy.job_id)
    attempt = next((one for one in ws.ledger.attempts(copy.job_id) if one.number == copy.attempt), None)
    if job is None or attempt is None or (attempt.handle and not is_outside_lease(attempt, copy.sent_to, copy.hosts)):
        # It was sent again, and the lease of that one keeps others away.
        _forget(ws, copy.job_id, copy.attempt, copy.sent_to)
        return
    if not attempt.handle and not attempt.state.terminal:
        _look_later(ws, copy, ws.clock() + WATCH_S)
        return
    marker = AttemptId(copy.job_id, copy.attempt).marker
    hosts = copy.hosts
    if attempt.handle and not _is_another_place(attempt, copy.sent_to):
        hosts = _hosts_apart(attempt, hosts)
    handle = ws.open(ws.access(copy.cluster, copy.owner, copy.sent_to)).find(marker, hosts, complete=False)
    if handle is not None:
        _end(ws, job, attempt, handle, copy.sent_to)
    elif copy.until - ws.clock() >= 0:
        _look_later(ws, copy, min(copy.until, ws.clock() + WATCH_S))
    else:
        _forget(ws, copy.job_id, copy.attempt, copy.sent_to)


def _end(ws: Workspace, job: JobRecord, attempt: AttemptRecord, handle: Handle, sent_to: Destination | None) -> None:
    """Cancel the copy, but nothing that *attempt* has itself, and record it in the job's history, once."""
    if attempt.handle and not _is_another_place(attempt, sent_to):
        handle = replace(handle, hosts=_hosts_apart(attempt, handle.hosts))
    ws.open(ws.access(job.cluster, job.owner, sent_to)).cancel([handle], timedelta(0))
    if not _forget(ws, job.id, attempt.number, sent_to):
        return
    event = Event(Kind.DUPLICATE, attempt.number, {"native_id": handle.native_id, "cancelled": True})
    if (now := ws.ledger.job(job.id)) is not None:
        apply(ws, now, lambda current: current.number == attempt.number, lambda _, __: JobUpdate((event,)))


def _look_later(ws: Workspace, copy: Orphan, until: float) -> None:
    with ws.ledger.transaction() as tx:  # it changes nothing where the job was removed meanwhile
        key = _key(copy.job_id, copy.attempt, copy.sent_to)
        query = f"UPDATE late_copies SET next_at = :next_at, until = :until WHERE {_THIS}"  # noqa: S608
        tx.connection.execute(query, {**key, "next_at": tx.now + LOOK_S, "until": until})


def _forget(ws: Workspace, job_id: str, attempt: int, sent_to: Destination | None) -> bool:
    """End the search; False where another process has done so already."""
    with ws.ledger.transaction() as tx:
        query = f"DELETE FROM late_copies WHERE {_THIS}"  # noqa: S608
        return tx.connection.execute(query, _key(job_id, attempt, sent_to)) == 1
