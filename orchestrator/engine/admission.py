"""Admission: the decision that a QUEUED job may be sent now, and the reason why not.

`CHECKS` is the whole truth: each check looks at one job within one `Admission`, which is one look at the ledger, and
returns nothing, or the reason to hold the job back: one line for people that begins with "waiting". The reconciler asks
before it dispatches a job; the transaction that makes an attempt PREPARED asks again, so that two passes at once cannot
both take the last place.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

from orc.launchers.errors import LaunchError
from orc.orchestrator.engine import limits
from orc.orchestrator.engine.dependencies import impossible_reason, waiting_reason
from orc.orchestrator.ledger import dependencies, groups
from orc.orchestrator.ledger.lifecycle import JobState

if TYPE_CHECKING:
    from orc.orchestrator.ledger.records import JobRecord
    from orc.orchestrator.ledger.transaction import Transaction
    from orc.orchestrator.workspace import Workspace


class Held(LaunchError):
    """A job may not be sent now: it waits, and that is no failure."""


@dataclass
class Admission:
    """Admission of jobs within one transaction on the ledger: what the checks share is read once.

    To be asked about jobs in the order of the queue.
    """

    ws: Workspace
    tx: Transaction
    jobs: Sequence[JobRecord]  # that will be asked about
    besides: Collection[str] = ()  # jobs that could not be sent just now although they may be: in nobody's way
    together: Collection[str] = ()  # groups whose jobs go as one array: their cluster keeps the limit
    admitted: list[JobRecord] = field(default_factory=list)  # by this look: they take places, too

    def go_on_with(self, jobs: Sequence[JobRecord]) -> None:
        """Be asked about *jobs* next: they are further down the queue."""
        self.jobs = jobs
        for name in ("dependencies", "places"):
            self.__dict__.pop(name, None)

    def hold(self, job: JobRecord) -> str:
        """Return the reason that *job* is not sent now; empty when it may be."""
        for check in CHECKS:
            if found := check(self, job):
                return found
        self.admitted.append(job)
        if self.book is not None:
            self.book.take(limits.demand_of(self.ws, self.tx.connection, job))
        return ""

    @cached_property
    def book(self) -> limits.Book | None:
        """Limits and quotas, and what is taken of them; `None` where nothing is limited."""
        clusters = {job.cluster for job in self.jobs}
        return limits.read_book(self.ws, self.tx.connection, self.tx.now, clusters, self.besides)

    @cached_property
    def dependencies(self) -> dict[str, list[tuple[dependencies.Dependency, JobState]]]:
        """Dependencies of the jobs that have not begun yet, by job."""
        found: dict[str, list[tuple[dependencies.Dependency, JobState]]] = defaultdict(list)
        if ids := [job.id for job in self.jobs if not job.number]:
            for one, state in dependencies.of_jobs(self.tx.connection, ids):
                found[one.job_id].append((one, state))
        return found

    @cached_property
    def places(self) -> dict[str, tuple[int, int]]:
        """Number of jobs that each group may have under way, where it has a limit, and has."""
        found = {}
        for group_id in {job.group_id for job in self.jobs if job.group_id}:
            group = groups.find(self.tx.connection, group_id)
            if group is not None and group.max_parallel is not None:
                found[group_id] = (group.max_parallel, groups.under_way(self.tx.connection, group_id))
        return found


def admit(ws: Workspace, tx: Transaction, jobs: Sequence[JobRecord], *, together: Collection[str] = ()) -> None:
    """Check, in the transaction that makes attempts of *jobs*, that they may be sent. Raises `Held`.

    *together* are groups as of `Admission`.
    """
    for group_id in dict.fromkeys(job.group_id for job in jobs if job.group_id):
        tx.connection.lock(f"group:{group_id}")
    look = Admission(ws, tx, jobs, together=together)
    for job in jobs:
        if found := look.hold(job):
            raise Held(found, where=job.id)


def _not_before(look: Admission, job: JobRecord) -> str:
    if job.not_before is None or job.not_before <= look.tx.now:
        return ""
    from orc.orchestrator.engine.cron import shown

    return f"waiting until {shown(job.not_before)}"


def _dependencies(look: Admission, job: JobRecord) -> str:
    found = look.dependencies.get(job.id, ())
    if reason := waiting_reason(found):
        return reason
    # It has ended otherwise since this pass has looked for jobs that cannot start any more; the next one cancels this.
    never = impossible_reason(found)
    return f"waiting to be cancelled: {never}" if never else ""


def _max_parallel(look: Admission, job: JobRecord) -> str:
    if job.group_id is None or job.group_id not in look.places:
        return ""
    most, taken = look.places[job.group_id]
    if job.group_id in look.together:
        free = not taken
    else:
        free = taken + sum(one.group_id == job.group_id for one in look.admitted) < most
    return "" if free else f"waiting for its turn in {job.group_id}"


def _limits(look: Admission, job: JobRecord) -> str:
    if look.book is None or (not look.book.quotas and job.cluster not in look.book.limits):
        return ""
    return look.book.hold(limits.demand_of(look.ws, look.tx.connection, job))


CHECKS: tuple[Callable[[Admission, JobRecord], str], ...] = (_not_before, _dependencies, _max_parallel, _limits)
