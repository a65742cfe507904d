"""Queueing: on each cluster the oldest job gets hosts first, younger ones where no older one waits. Pure.

The age of a job counts from its submission, earlier by `PRIORITY_S` for each point of its priority. So a job of a
higher priority overtakes those that were submitted at most so many hours before it, and nobody waits for ever: after
200 hours even the lowest priority comes before everything that is submitted then.

Fair share, where orc places jobs: users with little usage go before users with much. With all users of a cluster
entitled to the same,

- use of a user: the slot-seconds of the user's attempts (a slot is a GPU, or a process of a job without GPUs), of which
  those of a week ago count half, those of two weeks ago a quarter, and so on (`HALF_LIFE_S`);
- factor: ``2 ** -(n * use / use of all)`` for *n* users; 1 for one who has used nothing, 0.5 for the average one;
- head start: the factor times `HEAD_START_S`. A job counts as submitted earlier by so much.

So use never outweighs more than half a day of waiting, and with one user nothing changes.
"""

from __future__ import annotations

import math
import zlib
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from orc.launchers.errors import LaunchError, NoRoom

if TYPE_CHECKING:
    from orc.launchers.backends.base import Placement, SupportsPlacement
    from orc.launchers.spec import JobSpec
    from orc.orchestrator.ledger.records import Reservation
    from orc.orchestrator.ledger.transaction import Transaction
    from orc.orchestrator.workspace import Workspace

PRIORITY_S = 3600.0


def queue_key(created_at: float, priority: int, job: str, *, head_start_s: float = 0.0) -> tuple[float, float, str]:
    """Return the key by which jobs are sorted: the smallest goes first.

    *head_start_s* is what fair share gives the job's owner.
    """
    return (created_at - priority * PRIORITY_S - head_start_s, created_at, job)


_ALL = 1 << 30  # more slots than any host has
ROOM_BACKOFF_S = (2.0, 60.0)
_SHOWN = 5


@dataclass(frozen=True)
class WaitingJob:
    """A job that waits for hosts."""

    job: str
    spec: JobSpec
    avoid: Collection[str] = ()  # hosts that have failed it
    in_hand: bool = False  # a process is placing it at this very moment


def taken_slots(reservations: Iterable[Reservation], *, besides: str = "") -> dict[str, int]:
    """Slots taken on each host by all jobs but *besides*."""
    taken: Counter[str] = Counter()
    for reservation in reservations:
        if reservation.job != besides:
            taken[reservation.host] += reservation.slots
    return dict(taken)


def placement_in_order(
    backend: SupportsPlacement,
    spec: JobSpec,
    taken: Mapping[str, int],
    *,
    ahead: Iterable[WaitingJob] = (),
    avoid: Collection[str] = (),
) -> Placement:
    """Hosts for a job of *spec*, while the jobs *ahead* (oldest first) wait too.

    A job ahead that does not fit closes all hosts that it could run on; one that is in hand gets its hosts first. One
    that would fit and that nobody has in hand is left to those who can send it, and stops nobody.

    Raises `NoRoom` when the job has to wait, `RenderError` when the cluster can never carry it.
    """
    left: Counter[str] = Counter(taken)
    closed: dict[str, str] = {}
    mine = set(backend.candidates(spec))
    for older in ahead:
        if closed and mine <= closed.keys():
            break  # nothing is left for it, whatever else waits
        try:
            placement = backend.place(older.spec, _with(left, closed), older.avoid)
        except NoRoom:
            for host in backend.candidates(older.spec):
                closed.setdefault(host, older.job)
        except LaunchError:
            continue  # it will never run here, and its own dispatch says so
        else:
            if older.in_hand:
                left.update(dict.fromkeys(placement.hosts, placement.slots))
    if not closed:
        return backend.place(spec, left, avoid)
    try:
        return backend.place(spec, _with(left, closed), avoid)
    except NoRoom:
        backend.place(spec, left, avoid)  # raises where the older jobs make no difference
        first = next(job for job in closed.values())
        raise NoRoom(f"{first} is older and waits for the same hosts") from None


def _with(taken: Mapping[str, int], closed: Collection[str]) -> dict[str, int]:
    return {**taken, **dict.fromkeys(closed, _ALL)}


def waiting_reason(
    error: NoRoom, candidates: Collection[str], reservations: Iterable[Reservation], *, besides: str = ""
) -> str:
    """Return the reason of a job that waits for hosts, with the jobs that hold them."""
    what = error.what if error.what.startswith("waiting") else f"waiting for room: {error.what}"
    holders = list(error.holders) or [r.job for r in reservations if r.host in candidates and r.job != besides]
    names = list(dict.fromkeys(holders))
    if not names:
        return what
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"{what} (held by {', '.join(names[:_SHOWN])}{more})"


def room_backoff(waited_s: float, job: str) -> float:
    """Return the seconds until *job*, whose hosts another ledger holds, is sent again: a quarter of its waiting time.

    A quarter more or less for each job, so that two that get in each other's way do not go on doing so.
    """
    shortest, longest = ROOM_BACKOFF_S
    return min(max(waited_s / 4, shortest), longest) * (0.75 + zlib.crc32(job.encode()) % 1000 / 2000)


HALF_LIFE_S = 7 * 86400.0
HEAD_START_S = 12 * 3600.0
_LOOK_BACK_S = 4 * HALF_LIFE_S  # what is older counts less than a sixteenth
_KEPT_S = 30.0  # for which a reading is good enough


class Use(NamedTuple):
    """Time for which one attempt held its slots."""

    user: str
    slots: int
    began_at: float
    ended_at: float


def decayed(use: Use, now: float) -> float:
    """Return the slot-seconds of *use* that count at *now*."""
    rate = math.log(2) / HALF_LIFE_S
    ended, began = min(use.ended_at, now), min(use.began_at, now)
    return use.slots * (math.exp(-rate * (now - ended)) - math.exp(-rate * (now - began))) / rate


def head_starts(uses: Iterable[Use], users: Collection[str], now: float) -> dict[str, float]:
    """Return the seconds by which jobs of each of *users* have their turns earlier; empty for one user alone."""
    used: Counter[str] = Counter()
    for use in uses:
        used[use.user] += decayed(use, now)  # type: ignore[assignment]
    everybody = {*users, *used}
    total = sum(used.values())
    if len(everybody) < 2 or total <= 0:
        return {}
    return {user: HEAD_START_S * 2.0 ** -(len(everybody) * used[user] / total) for user in everybody}


def read_head_starts(ws: Workspace, tx: Transaction, cluster: str) -> Mapping[str, float]:
    """Return the head starts of the users of *cluster*, at most `_KEPT_S` old."""
    at, known = ws.head_starts.get(cluster, (-math.inf, {}))
    if 0 <= tx.now - at < _KEPT_S:
        return known
    waiting = {
        owner
        for (owner,) in tx.connection.tuples(
            "SELECT DISTINCT owner FROM jobs WHERE cluster = :c AND state IN ('QUEUED', 'PREPARED')", {"c": cluster}
        )
    }
    found: Mapping[str, float] = {}
    if len(waiting) > 1:  # one alone overtakes nobody
        rows = tx.connection.tuples(
            "SELECT j.id, j.owner, a.started_at, a.ended_at FROM attempts a JOIN jobs j ON j.id = a.job_id "
            "WHERE j.cluster = :c AND a.started_at IS NOT NULL AND (a.ended_at IS NULL OR a.ended_at > :since)",
            {"c": cluster, "since": tx.now - _LOOK_BACK_S},
        )
        sizes = {job: ws.size_of(tx.connection, job) for job, *_ in rows}
        slots = {job: size.gpus or size.ranks for job, size in sizes.items()}
        uses = [Use(owner, slots[job], began, ended or tx.now) for job, owner, began, ended in rows]
        found = head_starts(uses, waiting, tx.now)
    ws.head_starts[cluster] = (tx.now, found)
    return found
