"""Admission: the decision that a QUEUED job may be sent now, and the reason why not.

`CHECKS` is the whole truth: each check looks at one job within one `Admission`, which is one look at the ledger, and
returns nothing, or the reason to hold the job back: one line for people that begins with "waiting". The reconciler asks
before it dispatches a job; the transaction that makes an attempt PREPARED asks again, so that two passes at once cannot
both take the last place.

Dependencies are orc's own, on every backend alike: one is on a job with all of its attempts, which no cluster's own
dependencies know, and the two may be on different clusters.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

from orc.launchers.errors import LaunchError, SpecError
from orc.orchestrator.engine import queueing
from orc.orchestrator.engine.steps import apply
from orc.orchestrator.ledger import groups
from orc.orchestrator.ledger.database import one_of
from orc.orchestrator.ledger.groups import Dependency, dependencies_of
from orc.orchestrator.ledger.lifecycle import Event, JobState, Kind
from orc.orchestrator.ledger.records import JobUpdate

if TYPE_CHECKING:
    from orc.launchers.spec import JobSpec
    from orc.launchers.spec.relations import Requirement
    from orc.orchestrator.ledger.records import JobRecord
    from orc.orchestrator.ledger.transaction import Transaction
    from orc.orchestrator.workspace import Workspace

_SHOWN = 3


def is_met(condition: str, state: JobState) -> bool:
    """Return True when a job in *state* has ended as *condition* requires: success, failure (or cancelled), any."""
    return state.terminal and (condition == "any" or (condition == "success") == (state is JobState.SUCCEEDED))


def waiting_reason(found: Iterable[tuple[Dependency, JobState]]) -> str:
    """Return the reason that a job with these dependencies waits; empty when all are met."""
    open_ = [one.on_job for one, state in found if not state.terminal]
    if not open_:
        return ""
    more = f" and {len(open_) - _SHOWN} more" if len(open_) > _SHOWN else ""
    return f"waiting for the end of {', '.join(open_[:_SHOWN])}{more}"


def impossible_reason(found: Iterable[tuple[Dependency, JobState]]) -> str:
    """Return the reason that a job with these dependencies can never start; empty while it can."""
    for one, state in found:
        if state.terminal and not is_met(one.condition, state):
            wanted = "ended without success" if one.condition == "failure" else "succeeded"
            return f"{one.on_job} has {state.lower()}, and this job runs only after it has {wanted}"
    return ""


# -- new jobs


def required(ws: Workspace, spec: JobSpec, known: Collection[str] = ()) -> list[Requirement]:
    """Return what *spec* waits for, with the full ids of the jobs; *known* are ids that are about to be submitted.

    Raises `SpecError` for jobs that are not there, outputs that they do not have, and ends that can no longer come.
    """
    from orc.launchers.spec.relations import Requirement, artefact, requirement

    found: dict[str, Requirement] = {}
    for text in spec.depends_on:
        wanted = requirement(text)
        job = wanted.job if wanted.job in known else ws.ledger.resolve(wanted.job, where="depends_on")
        found[job] = Requirement(job, wanted.condition)
    for name, text in spec.inputs.items():
        source, output = artefact(text)
        if source not in known:
            source = ws.ledger.resolve(source, where=f"inputs.{name}")
            outputs = ws.ledger.spec(source).get("outputs", {})
            if output not in outputs:
                from orc.launchers.spec.problems import choose

                hint = choose(output, list(outputs)) if outputs else ": it has none"
                raise SpecError(f"inputs.{name}: {source} has no output {output!r}{hint}", where=spec.name)
        if found.get(source, Requirement(source)).condition != "success":
            raise SpecError(f"inputs.{name} needs the success of {source}, which depends_on has otherwise")
        found[source] = Requirement(source)
    if not found:
        return []
    states = {job.id: job.state for job in ws.ledger.jobs([job for job in found if job not in known])}
    ended = [(Dependency("", job, one.condition), states[job]) for job, one in found.items() if job in states]
    if never := impossible_reason(ended):
        raise SpecError(never, where=spec.name, hint="resubmit that job first, or wait for another end: JOB:any")
    return list(found.values())


# -- passes


def with_relatives(ws: Workspace, job_ids: Sequence[str]) -> list[str]:
    """Return *job_ids* and the live jobs whose end decides about them, or whose start they decide about."""
    with ws.ledger.database.read() as connection:
        every = dependencies_of(connection)
        of_group = connection.tuples(
            "SELECT j.id, j.group_id FROM jobs j JOIN groups g ON g.id = j.group_id "
            "WHERE g.max_parallel IS NOT NULL AND j.state NOT IN ('SUCCEEDED', 'FAILED', 'CANCELLED')"
        )
        these, parameters = one_of("id", job_ids)
        query = f"SELECT id, group_id FROM jobs WHERE group_id IS NOT NULL AND {these}"  # noqa: S608
        given = connection.tuples(query, parameters) if of_group else []
    before: dict[str, list[str]] = defaultdict(list)
    after: dict[str, list[str]] = defaultdict(list)
    for one, _ in every:
        before[one.job_id].append(one.on_job)
        after[one.on_job].append(one.job_id)
    groups = {group for _, group in given}
    neighbours = [job for job, group in of_group if group in groups]
    found = dict.fromkeys([*job_ids, *_reached(job_ids, after), *neighbours])
    found.update(dict.fromkeys(_reached(list(found), before)))
    return list(found)


def _reached(starts: Sequence[str], following: Mapping[str, Sequence[str]]) -> list[str]:
    """Return the jobs that can be reached from *starts*, these left out."""
    found: dict[str, None] = {}
    left = list(starts)
    while left:
        for job in following.get(left.pop(), ()):
            if job not in found:
                found[job] = None
                left.append(job)
    return list(found)


def cancel_impossible(ws: Workspace, jobs: Sequence[JobRecord]) -> bool:
    """Cancel those of *jobs* that can no longer start, with the reason; and those that wait for these. True if any."""
    waiting = {job.id: job for job in jobs if job.state is JobState.QUEUED and not job.number}
    changed = False
    while waiting:
        with ws.ledger.database.read() as connection:
            found = dependencies_of(connection, list(waiting))
        reasons: dict[str, str] = {}
        for one, state in found:
            if why := impossible_reason([(one, state)]):
                failed = ws.ledger.jobs([one.on_job]) if state is JobState.FAILED else []
                said = "".join(job.reason.partition("\n")[0] for job in failed)
                reasons.setdefault(one.job_id, f"{why}: {said}" if said else why)
        if not reasons:
            break
        changed = True
        for job_id, why in reasons.items():
            _cancel(ws, waiting.pop(job_id), why)
    return changed


def _cancel(ws: Workspace, job: JobRecord, why: str) -> None:
    def change(_: JobRecord, now: float) -> JobUpdate:
        over = Event(Kind.JOB_CANCELLED, None, {"cause": "dependency", "reason": why})
        return JobUpdate((over,), {"reason": why, "ended_at": now, "next_attempt_at": None, "poll_error_at": None})

    apply(ws, job, lambda current: current.state is JobState.QUEUED, change)


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
            self.book.take(queueing.demand_of(self.ws, self.tx.connection, job))
        return ""

    @cached_property
    def book(self) -> queueing.Book | None:
        """Limits and quotas, and what is taken of them; `None` where nothing is limited."""
        clusters = {job.cluster for job in self.jobs}
        return queueing.read_book(self.ws, self.tx.connection, self.tx.now, clusters, self.besides)

    @cached_property
    def dependencies(self) -> dict[str, list[tuple[Dependency, JobState]]]:
        """Dependencies of the jobs that have not begun yet, by job."""
        found: dict[str, list[tuple[Dependency, JobState]]] = defaultdict(list)
        if ids := [job.id for job in self.jobs if not job.number]:
            for one, state in dependencies_of(self.tx.connection, ids):
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
    look = Admission(ws, tx, jobs, together=together)
    for job in jobs:
        if found := look.hold(job):
            raise Held(found, where=job.id)


def hold_prepared(ws: Workspace, job: JobRecord) -> str:
    """Return the reason that a PREPARED *job* is not sent by itself now; empty when it may be.

    Each attempt of an array is PREPARED, also those for which its cluster would have kept the limit of the group.
    """
    if job.group_id is None:
        return ""
    with ws.ledger.database.read() as connection:
        group = groups.find(connection, job.group_id)
        if group is None or group.max_parallel is None:
            return ""
        sent = groups.under_way(connection, job.group_id, (JobState.QUEUED, JobState.PREPARED))
    return _turn(job.group_id) if sent >= group.max_parallel else ""


def _turn(group_id: str) -> str:
    return f"waiting for its turn in {group_id}"


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
    return "" if free else _turn(job.group_id)


def _limits(look: Admission, job: JobRecord) -> str:
    if look.book is None or (not look.book.quotas and job.cluster not in look.book.limits):
        return ""
    return look.book.hold(queueing.demand_of(look.ws, look.tx.connection, job))


CHECKS: tuple[Callable[[Admission, JobRecord], str], ...] = (_not_before, _dependencies, _max_parallel, _limits)
