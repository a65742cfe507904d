"""Fair share: on clusters where orc places jobs, users with little usage go before users with much.

The formula, with all users of a cluster entitled to the same:

- use of a user: the slot-seconds of the user's attempts (a slot is a GPU, or a process of a job without GPUs), of which
  those of a week ago count half, those of two weeks ago a quarter, and so on (`HALF_LIFE_S`);
- factor: ``2 ** -(n * use / use of all)`` for *n* users; 1 for one who has used nothing, 0.5 for the average one;
- head start: the factor times `HEAD_START_S`. A job counts as submitted earlier by so much.

So use never outweighs more than half a day of waiting: nobody waits for ever, and with one user nothing changes.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from orc.orchestrator.ledger.transaction import Transaction
    from orc.orchestrator.workspace import Workspace

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
        uses = [Use(owner, _slots(ws, tx, job), began, ended or tx.now) for job, owner, began, ended in rows]
        found = head_starts(uses, waiting, tx.now)
    ws.head_starts[cluster] = (tx.now, found)
    return found


def _slots(ws: Workspace, tx: Transaction, job: str) -> int:
    if job not in ws.slots:
        ((text,),) = tx.connection.tuples("SELECT spec FROM jobs WHERE id = :id", {"id": job})
        resources = json.loads(text).get("resources", {})
        each = resources.get("gpus_per_node") or resources.get("procs_per_node") or 1
        ws.slots[job] = int(str(resources.get("nodes", 1)).rpartition(":")[2]) * int(each)
    return ws.slots[job]
