"""Calls that look deeper into jobs: measurements, plans, comparisons, costs, notifications."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

from orc.launchers.errors import LaunchError, SpecError
from orc.orchestrator.api.call import Bounds, JobId, Kind, Name, call
from orc.orchestrator.api.jobs import get_job
from orc.orchestrator.api.session import LedgerSession
from orc.orchestrator.views import NotificationView, View

if TYPE_CHECKING:
    from orc.orchestrator.insight.comparison import Summaries
    from orc.orchestrator.insight.metrics import Line, Position

_MOST_LINES = 10_000  # of one answer
_MOST_BYTES = 4 << 20
Time = Annotated[float | None, Bounds("Seconds since the epoch", ge=0, le=4102444800)]
Delivery = Annotated[str, Bounds(choices=("due", "sent", "dead"))]


@dataclass(frozen=True)
class Measurements(View):
    """Lines of metrics, or curves, and the hosts whose metrics could not be read.

    Where it is not `complete`, there is more than one call reads: the next one goes on, for lines from `next`.
    """

    lines: list[Mapping[str, Any]]
    series: Mapping[str, list[tuple[float, float]]]
    unreachable: Mapping[str, str]
    complete: bool
    next: str
    times: list[tuple[float, float]] = field(default_factory=list)  # with curves: step, seconds since the epoch
    attempts: list[tuple[float, float]] = field(default_factory=list)  # with curves: first step, number of the attempt
    lowest: Mapping[str, float] = field(default_factory=dict)  # with curves: of all values, also those between points


@dataclass(frozen=True)
class RankSpeeds(View):
    """Speeds of the ranks of the newest attempt: by rank ``step``, ``step_s`` and ``data_wait``, as far as known."""

    at: float | None
    ranks: Mapping[int, Mapping[str, float]]


@dataclass(frozen=True)
class PlanView(View):
    """Plan of an attempt; secrets by name only."""

    format: int
    marker: str
    cluster: str
    backend: str
    trees: Mapping[str, str]
    env: Mapping[str, str]
    secrets: list[str]
    files: list[Mapping[str, Any]]
    commands: list[Mapping[str, Any]]


@dataclass(frozen=True)
class Comparison(View):
    """Differences between two jobs."""

    jobs: list[str]
    spec: list[Mapping[str, Any]]
    environment: list[Mapping[str, Any]]
    code: Mapping[str, Any]
    outcome: list[Mapping[str, Any]]
    metrics: Mapping[str, Any]


@dataclass(frozen=True)
class Costs(View):
    """Hours and costs by group; a cost of `null` is unknown."""

    by: str
    groups: list[Mapping[str, Any]]
    total: Mapping[str, Any]


@dataclass(frozen=True)
class Notifications(View):
    """Notifications, newest first."""

    notifications: list[NotificationView]


@dataclass(frozen=True)
class Revived(View):
    """Number of notifications that are due again."""

    due: int


@call("GET", "/jobs/{job_id}/metrics", shows=Kind.METRICS, asks_clusters=True)
def read_metrics(
    session: LedgerSession,
    job_id: JobId,
    points: Annotated[int | None, Bounds("Curves of so many points; lines else", ge=2, le=10000)] = None,
    after: Annotated[str, Bounds("`next` of the answer before: lines from there", max_length=500)] = "",
) -> Measurements:
    """Return what a job has measured: lines of it, or with `points` a curve ``[[step, value]]`` of each measurement.

    A curve leaves out what came after the checkpoint from which a later attempt went on.
    """
    from orc.orchestrator.insight.metrics import Position, new_lines

    ws, known = session.workspace, session.measured
    session.record(job_id)
    if points is not None:
        measured = known.of(job_id)
        series, times, attempts, ranges = measured.update(
            ws,
            job_id,
            lambda curves: (curves.points(points), curves.times.points(points), curves.begins, curves.summaries()),
            known.seconds,
        )
        unreachable = _reasons(measured.unreachable)
        lowest = {name: found["min"] for name, found in ranges.items()}
        return Measurements([], series, unreachable, measured.complete, "", times, attempts, lowest)
    try:
        position = Position.from_text(after)
    except ValueError as error:
        raise SpecError(str(error), where="query.after") from None
    lines = _some(new_lines(ws, job_id, position, known.seconds), position)
    return Measurements(lines, {}, _reasons(position.unreachable), position.complete, position.to_text())


@call("GET", "/jobs/{job_id}/ranks", shows=Kind.METRICS, asks_clusters=True)
def read_ranks(session: LedgerSession, job_id: JobId) -> RankSpeeds:
    """Return how each rank of a job gets on: its step, seconds per step, and share of waiting for data.

    None is known before the first metrics, nor of a job of one rank, whose metrics say it.
    """
    from orc.orchestrator.api.logs import at_backend
    from orc.orchestrator.insight.metrics import latest_ranks

    backend, handle = at_backend(session, job_id, None)
    number = session.record(job_id).number
    return RankSpeeds(*latest_ranks(backend, handle, number)) if handle and number else RankSpeeds(None, {})


def _reasons(unreachable: Mapping[str, LaunchError]) -> dict[str, str]:
    return {host: error.what for host, error in unreachable.items()}


def _some(lines: Iterable[Line], position: Position) -> list[Line]:
    """Return as many lines as go into one answer."""
    begin = sum(position.offsets)
    found = []
    for line in lines:
        found.append(line)
        if len(found) == _MOST_LINES or sum(position.offsets) - begin > _MOST_BYTES:
            break
    return found


@call("GET", "/jobs/{job_id}/plan", shows=Kind.PLAN)
def read_plan(session: LedgerSession, job_id: JobId) -> PlanView:
    """Return the plan of the newest attempt as `orc render` shows one: files, commands, names of secrets."""
    from orc.launchers.backends.base import Placement
    from orc.launchers.ids import AttemptId
    from orc.orchestrator.engine.attempt_inputs import stored_snapshot, stored_spec
    from orc.orchestrator.engine.placement import PlacementPlanner

    job = get_job(session, job_id)
    ws = session.workspace
    attempt = AttemptId(job_id, max(len(job.attempts), 1))
    planner = PlacementPlanner(ws, stored_spec(ws, job_id), stored_snapshot(ws, job.digests), attempt, owner=job.owner)
    hosts = job.attempt.hosts if job.attempt and planner.placer else ()
    return PlanView(**planner.render(Placement(hosts) if hosts else None).to_dict())


@call("GET", "/diff", shows=(Kind.CODE, Kind.PLACES), of=("a", "b"), asks_clusters=True)
def diff_jobs(session: LedgerSession, a: JobId, b: JobId) -> Comparison:
    """Return what differs between two jobs of the caller: specification, environment, code, outcome, metrics.

    An admin may compare those of other users, too.
    """
    from orc.orchestrator.insight.comparison import compare

    measured = {job_id: _measured(session, job_id) for job_id in (a, b)}
    return Comparison(**compare(session.workspace, get_job(session, a), get_job(session, b), measured))


def _measured(session: LedgerSession, job_id: str) -> Summaries | str:
    from orc.orchestrator.insight.metrics import Curves

    known = session.measured
    try:
        return known.of(job_id).update(session.workspace, job_id, Curves.summaries, known.seconds)
    except LaunchError as error:
        return error.what


@call("GET", "/costs", shows=Kind.SERVICE)
def add_up_costs(
    session: LedgerSession,
    by: Annotated[str, Bounds("job, user, project, cluster, day or tag:KEY", max_length=255)] = "job",
    job: Annotated[Sequence[JobId], Bounds("Only these jobs", max_length=500)] = (),
    owner: Name | None = None,
    since: Time = None,
    until: Time = None,
) -> Costs:
    """Return hours of nodes and GPUs, and what they cost by the prices of clusters.yaml."""
    from orc.orchestrator.engine.usage import read_use
    from orc.orchestrator.insight.costs import add_up, check_way

    check_way(by)
    ws = session.workspace
    with ws.ledger.database.read() as connection:
        key = "attempt" if by == "day" else by
        uses = read_use(connection, key, ws.clock(), job_ids=job or None, owner=owner, since=since, until=until)
    return Costs(**add_up(uses, session.clusters(), by))


@call("GET", "/notifications", shows=Kind.STATE, parts=(Kind.PLACES,))
def list_notifications(
    session: LedgerSession,
    job: Annotated[str | None, Bounds("About this job", min_length=1, max_length=64)] = None,
    state: Annotated[Sequence[Delivery], Bounds("In one of these")] = (),
    limit: Annotated[int, Bounds(ge=1, le=500)] = 50,
) -> Notifications:
    """Return the notifications of the caller's jobs and their receivers, newest first; of a URL no more than its host.

    An admin gets those of all users.
    """
    from orc.orchestrator.ledger import outbox
    from orc.orchestrator.notifications.targets import shown

    owner = None if session.caller.may_see(Kind.PLACES) else session.caller.user
    with session.workspace.ledger.database.read() as connection:
        found = outbox.listed(connection, job_id=job, states=state, limit=limit, owner=owner)
    views = []
    for sent in found:
        odd = {"job": sent.job_id, "event": sent.kind, "target": shown(sent.target), "error": sent.last_error}
        views.append(NotificationView.from_record(sent, next_at=sent.next_at if sent.state == "due" else None, **odd))
    return Notifications(views)


@call("POST", "/jobs/{job_id}/notifications/retry", shows=Kind.STATE)
def retry_notifications(session: LedgerSession, job_id: JobId) -> Revived:
    """Send what was given up about a job after all."""
    from orc.orchestrator.ledger import outbox

    with session.workspace.ledger.transaction() as tx:
        count = outbox.revive(tx.connection, job_id, tx.now)
    session.leave_reconciler()
    return Revived(count)
