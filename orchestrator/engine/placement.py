"""Placement: choose hosts for a job, examine them, and keep them in the transaction that makes the attempt.

Looking at hosts takes seconds and happens outside any transaction, so the choice is made twice: before, and again in
the transaction, where it must come out the same. So the ledger tells two processes apart that want the same hosts.

Hosts that the doctor has found bad are excluded: used only when nothing else will do, until it examines them again.
"""

from __future__ import annotations

import json
import time
import zlib
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from orc.launchers.errors import BackendError, BackendUnreachable, LaunchError, NoRoom
from orc.launchers.remote.files import write_file
from orc.orchestrator.engine import admission
from orc.orchestrator.engine.queueing import queue_key, read_head_starts
from orc.orchestrator.engine.steps import Progress, fault_point, silent
from orc.orchestrator.ledger import leases
from orc.orchestrator.ledger.lifecycle import JobState
from orc.orchestrator.ledger.transaction import Transaction

if TYPE_CHECKING:
    from orc.launchers.backends.base import Backend, Placement, Snapshot, SupportsPlacement
    from orc.launchers.ids import AttemptId
    from orc.launchers.plan import Plan
    from orc.launchers.spec import JobSpec
    from orc.orchestrator.ledger.records import JobRecord, Reservation
    from orc.orchestrator.workspace import Workspace

_LOOKED_AT = 10  # jobs that are read at once of those that are before one in the queue: mostly the first decides
# What decides about a job's place in the queue: when it was made, its priority, its owner, its id.
Place = tuple[float, int, str, str]


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


@dataclass(frozen=True)
class RenderedPlan:
    """Plan of an attempt, and the hosts that it is for."""

    plan: Plan
    placement: Placement | None


def render_anywhere(ws: Workspace, spec: JobSpec, snapshot: Snapshot, attempt: AttemptId, owner: str) -> RenderedPlan:
    """Return the plan of a job of *owner* were the cluster empty. Raises `LaunchError` for what can never be sent."""
    from orc.launchers.backends.base import SupportsPlacement

    backend = ws.backend_of_user(spec.cluster, owner)
    placement = backend.place(spec, {}) if isinstance(backend, SupportsPlacement) else None
    return RenderedPlan(backend.render(spec, snapshot, attempt, placement), placement)


@dataclass(frozen=True)
class PreparedAttempt(RenderedPlan):
    """A PREPARED attempt, its plan, and the hosts that are kept for it."""

    job: JobRecord


@dataclass
class PlacementPlanner:
    """The search for a plan of one attempt, and for the hosts it needs."""

    ws: Workspace
    spec: JobSpec
    snapshot: Snapshot
    attempt: AttemptId
    owner: str  # of the job
    progress: Progress = silent
    rendered: Mapping[str, RenderedPlan] = field(default_factory=dict)  # by marker, what this process has rendered
    unusable: dict[str, LaunchError] = field(default_factory=dict)  # hosts that cannot be used just now, and why
    _place_in_queue: Place = (0.0, 0, "", "")
    _excluded: tuple[str, ...] = ()  # by the doctor, for all jobs

    @property
    def backend(self) -> Backend:
        """The backend of the job's cluster, as the owner of the job reaches it."""
        return self.ws.backend_of_user(self.spec.cluster, self.owner)

    @property
    def placer(self) -> SupportsPlacement | None:
        """The backend, where hosts have to be chosen and kept."""
        from orc.launchers.backends.base import SupportsPlacement

        backend = self.backend
        return backend if isinstance(backend, SupportsPlacement) else None

    def prepare(self, job: JobRecord) -> PreparedAttempt:
        """Return a PREPARED attempt: the next one of a QUEUED *job*, or of a PREPARED one, on its hosts if they do.

        Raises `Conflict`, `NoRoom`, and what rendering and looking raise.
        """
        if job.state is JobState.PREPARED and (found := self._recorded(job)):
            return found
        self._place_in_queue = (job.created_at, job.priority, job.owner, job.id)
        while True:
            plan, placement = self._choose()

            def write(tx: Transaction, plan: Plan = plan, placement: Placement | None = placement) -> JobRecord:
                if job.state is JobState.QUEUED:
                    admission.admit(self.ws, tx, [job])
                    return tx.prepare(job, self.attempt.marker, plan.digest, placement)
                assert placement is not None
                return tx.place(job, placement)

            prepared = self.commit(placement, write)
            if prepared is not None:
                return PreparedAttempt(plan, placement, prepared)

    def _recorded(self, job: JobRecord) -> PreparedAttempt | None:
        """Return the attempt as it was prepared before; `None` when it has no hosts any more, or bad ones."""
        from orc.launchers.backends.base import Placement

        if self.placer is None:
            placement = self._avoiding()
            return PreparedAttempt(self.render(placement), placement, job)
        kept = self.ws.ledger.reservations(job_id=job.id)
        if not kept or {r.host for r in kept} & set(self.unusable):
            return None
        placement = Placement(tuple(r.host for r in kept), kept[0].slots)
        plan = self.render(placement)
        return PreparedAttempt(plan, placement, job) if self.check(plan, placement) else None

    def _choose(self) -> tuple[Plan, Placement | None]:
        """Return a plan that can be sent: bad hosts are left out where others will do.

        Raises `NoRoom`, and what rendering and looking raise.
        """
        while True:
            if backend := self.placer:
                self._excluded = tuple(excluded(self.ws.state_dir, self.spec.cluster))
                with self.ws.ledger.database.read() as connection:
                    placement: Placement | None = self._place(backend, Transaction(connection, self.ws.clock()))
            else:
                placement = self._avoiding()
            plan = self.render(placement)
            if not (backend or self.attempt.number == 1) or self.check(plan, placement):
                return plan, placement

    def render(self, placement: Placement | None) -> Plan:
        """Return the plan on these hosts."""
        rendered = self.rendered.get(self.attempt.marker)
        if rendered is not None and rendered.placement == placement:
            return rendered.plan
        return self.backend.render(self.spec, self.snapshot, self.attempt, placement)

    def commit(self, placement: Placement | None, write: Callable[[Transaction], JobRecord]) -> JobRecord | None:
        """Run *write* in the transaction in which *placement* is still what is to be had; `None` when it is not."""
        with self.ws.ledger.transaction() as tx:
            if (backend := self.placer) and self._place(backend, tx) != placement:
                return None
            return write(tx)

    def waiting_reason(self, error: NoRoom) -> str:
        """Return the reason of a job that waits: its hosts, their holders, and the hosts that were left out."""
        held = self.ws.ledger.reservations(self.spec.cluster)
        candidates = self.placer.candidates(self.spec) if self.placer else ()
        text = waiting_reason(error, candidates, held, besides=self.attempt.job)
        return "; ".join([text, *(f"{host}: {trouble.what}" for host, trouble in sorted(self.unusable.items()))])

    def exclude_host(self, placement: Placement | None, error: LaunchError) -> bool:
        """Note that a host of *placement* is to blame for *error*; False when none is, or there is no way around it."""
        if self.placer is None or placement is None or error.host not in placement.hosts or error.host in self.unusable:
            return False
        self.unusable[error.host] = error
        return True

    def check(self, plan: Plan, placement: Placement | None) -> bool:
        """Run the preflight of *plan*; return False for a bad host of *placement*, where others should be tried."""
        warnings, hosts = [], set(placement.hosts) if placement else set()
        unavoidable = set(self.unusable) & hosts
        for finding in self.backend.preflight(plan):
            if finding.level != "error":
                warnings.append(finding)
                continue
            kind = BackendUnreachable if finding.unreachable else BackendError
            error = kind(finding.what, where=finding.where, hint=finding.hint).of(finding.where)
            if finding.where not in hosts or finding.where in unavoidable:
                raise error
            self.unusable.setdefault(finding.where, error)
        if (set(self.unusable) & hosts) - unavoidable:
            return False
        for host, trouble in self.unusable.items():
            self._tell("warning", f"{trouble.what}; other hosts are used", host, trouble.hint)
        for finding in warnings:
            self._tell(finding.level, finding.what, finding.where, finding.hint)
        fault_point("examined")
        return True

    def _tell(self, level: str, what: str, where: str, hint: str) -> None:
        self.progress("finding", {"level": level, "what": what, "where": where, "hint": hint})

    def _place(self, backend: SupportsPlacement, tx: Transaction) -> Placement:
        cluster, job_id = self.spec.cluster, self.attempt.job
        taken = taken_slots(tx.reservations(cluster), besides=job_id)
        avoid = {*_to_avoid(self.spec, tx.failed_hosts(job_id), self.attempt.number), *self.unusable, *self._excluded}
        return placement_in_order(backend, self.spec, taken, ahead=self._ahead(tx), avoid=avoid)

    def _ahead(self, tx: Transaction) -> Iterator[WaitingJob]:
        """Yield the jobs that are before this one in the queue and have no hosts yet, in order."""
        from orc.launchers.spec import JobSpec

        starts = read_head_starts(self.ws, tx, self.spec.cluster)

        def key_of(created_at: float, priority: int, owner: str, job: str) -> tuple[float, float, str]:
            return queue_key(created_at, priority, job, head_start_s=starts.get(owner, 0.0))

        mine = key_of(*self._place_in_queue)
        waiting = (
            (key_of(at, priority, owner, job), job) for job, at, priority, owner in tx.unplaced(self.spec.cluster)
        )
        ahead = [job for place, job in sorted(waiting) if place < mine and job != self.attempt.job]
        look = admission.Admission(self.ws, tx, [])
        for start in range(0, len(ahead), _LOOKED_AT):
            jobs = tx.reload_all(ahead[start : start + _LOOKED_AT])
            specs = tx.specs([job.id for job in jobs])
            look.go_on_with(jobs)
            for other in jobs:
                if other.state is JobState.QUEUED and look.hold(other):
                    continue  # it does not wait for room
                in_hand = other.claim_owner != self.ws.owner and not leases.is_free(
                    other.claim_owner, other.claim_expires_at, tx.now
                )
                try:
                    spec = JobSpec.model_validate(json.loads(specs[other.id]))
                except ValueError:
                    continue  # of a version of orc that this one cannot read: its own dispatch says so
                avoid = {*_to_avoid(spec, tx.failed_hosts(other.id), _coming(other)), *self._excluded}
                yield WaitingJob(other.id, spec, avoid, in_hand)

    def _avoiding(self) -> Placement | None:
        """For a cluster that chooses the hosts itself: those that it should not choose."""
        from orc.launchers.backends.base import Placement

        if self.attempt.number == 1 or not self.backend.avoids:
            return None
        earlier = {
            n: hosts for n, hosts in self.ws.ledger.failed_hosts(self.attempt.job).items() if n < self.attempt.number
        }
        return Placement((), avoid=_flat(earlier)) if earlier else None


def _to_avoid(spec: JobSpec, failed_hosts: Mapping[int, tuple[str, ...]], attempt: int) -> tuple[str, ...]:
    """Return the hosts that *attempt* of a job keeps away from, of those that were to blame for earlier ends.

    A job of a fixed size has no use for a host that has failed it. An elastic one has gone on without it, and takes it
    back with the attempt after: by then it answers again, or is found bad.
    """
    if spec.resources.min_nodes == spec.resources.max_nodes:
        return _flat(failed_hosts)
    return failed_hosts.get(attempt - 1, ())


def _coming(job: JobRecord) -> int:
    """Return the number of the attempt that *job* waits to place."""
    prepared = job.attempt is not None and not job.attempt.state.terminal
    return job.number if prepared else job.number + 1


def _flat(failed_hosts: Mapping[int, tuple[str, ...]]) -> tuple[str, ...]:
    return tuple(sorted({host for hosts in failed_hosts.values() for host in hosts}))


_NAME = "excluded-hosts.json"


def excluded(state_dir: Path, cluster: str) -> dict[str, str]:
    """Return the excluded hosts of *cluster*, and why."""
    found = _read(state_dir).get(cluster, {})
    return {host: str(entry.get("reason", "")) for host, entry in found.items()}


def exclude(state_dir: Path, cluster: str, hosts: Mapping[str, str]) -> None:
    """Replace the excluded hosts of *cluster* by *hosts* (with reasons); none ends all exclusions there."""
    everything = _read(state_dir)
    everything.pop(cluster, None)
    if hosts:
        everything[cluster] = {host: {"reason": reason, "at": time.time()} for host, reason in hosts.items()}
    path = state_dir / _NAME
    if not everything:
        path.unlink(missing_ok=True)
        return
    write_file(str(path), f"{json.dumps(everything, indent=1)}\n".encode(), 0o600)


def _read(state_dir: Path) -> dict[str, dict[str, dict[str, object]]]:
    try:
        data = json.loads((state_dir / _NAME).read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):  # a damaged list excludes nobody
        return {}
    return data if isinstance(data, dict) else {}
