"""Calls that read, make and change jobs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

from orc.launchers.errors import SpecError
from orc.orchestrator.api.call import (
    Bounds,
    Digests,
    JobId,
    JobNotFound,
    Key,
    Kind,
    Name,
    NewMember,
    Secrets,
    Text,
    call,
)
from orc.orchestrator.api.session import LedgerSession
from orc.orchestrator.ledger.lifecycle import JobState
from orc.orchestrator.ledger.store import JobFilter
from orc.orchestrator.views import EventView, JobRow, JobView, View

State = Annotated[str, Bounds(choices=tuple(str(state) for state in JobState))]
Tags = Annotated[Sequence[str], Bounds("key=value; with all of these tags", max_length=20)]
Part = Annotated[str | None, Bounds("Part of id, name, owner, cluster or project", max_length=255)]
Ended = Annotated[float | None, Bounds("Has ended since, in seconds since the epoch", ge=0, le=4102444800)]
Grace = Annotated[
    float | None, Bounds("Seconds between SIGTERM and SIGKILL; the job's own by default", ge=0, le=30 * 86400)
]


@dataclass(frozen=True)
class JobPage(View):
    """Page of jobs; ``next`` is the cursor of the page after it, `None` at the end."""

    jobs: list[JobRow]
    next: str | None = None


@dataclass(frozen=True)
class Events(View):
    """Events, oldest first."""

    events: list[EventView]


@dataclass(frozen=True)
class MeantJob(View):
    """Job that was meant."""

    id: str


@dataclass(frozen=True)
class CancelledJob(JobView):
    """Job whose cancellation was requested, and clusters that could not be reached yet."""

    unreachable: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class JobCounts(View):
    """Numbers of jobs by state; of those that have not ended by cluster and state, too."""

    states: Mapping[str, int]
    clusters: Mapping[str, Mapping[str, int]]


@call("GET", "/jobs", shows=Kind.STATE)
def list_jobs(
    session: LedgerSession,
    state: Annotated[Sequence[State], Bounds("In one of these states")] = (),
    name: Name | None = None,
    owner: Name | None = None,
    cluster: Name | None = None,
    project: Name | None = None,
    group: Name | None = None,
    tag: Tags = (),
    q: Part = None,
    ended_since: Ended = None,
    limit: Annotated[int, Bounds(ge=1, le=500)] = 50,
    cursor: Annotated[str | None, Bounds("`next` of the page before", max_length=500)] = None,
) -> JobPage:
    """Return jobs, newest first, a page at a time."""
    wanted = JobFilter(state or None, name, owner, cluster, project, group, _tag_pairs(tag), q, ended_since)
    page = session.workspace.ledger.page(wanted, cursor, limit)
    return JobPage([JobRow(*row) for row in page.rows], page.next)


@call("GET", "/job-counts", shows=Kind.STATE)
def count_jobs(
    session: LedgerSession,
    name: Name | None = None,
    owner: Name | None = None,
    cluster: Name | None = None,
    project: Name | None = None,
    group: Name | None = None,
    tag: Tags = (),
    q: Part = None,
    ended_since: Ended = None,
) -> JobCounts:
    """Return how many jobs are in each state, with the filters of the list of jobs."""
    wanted = JobFilter(None, name, owner, cluster, project, group, _tag_pairs(tag), q, ended_since)
    return JobCounts(*session.workspace.ledger.counts(wanted))


def _tag_pairs(texts: Sequence[str]) -> dict[str, str]:
    """Return ``key=value`` texts as a mapping. Raises `SpecError`."""
    for text in texts:
        if not text.partition("=")[0] or "=" not in text:
            raise SpecError(f"tag takes key=value, not {text!r}", where="query.tag")
    return {key: value for key, _, value in (text.partition("=") for text in texts)}


@call("GET", "/resolve", shows=Kind.STATE)
def resolve_job(
    session: LedgerSession,
    ref: Annotated[str, Bounds("An id, the unambiguous start of one, or `@last`", max_length=64)],
) -> MeantJob:
    """Return the id of the job that a text means."""
    try:
        return MeantJob(session.workspace.ledger.resolve(ref))
    except SpecError as error:
        raise JobNotFound(error.what, hint=error.hint) from None


@call("GET", "/jobs/{job_id}", shows=Kind.STATE, parts=(Kind.PLACES,))
def get_job(session: LedgerSession, job_id: JobId) -> JobView:
    """Return a job and its attempts, as the ledger has them.

    The path of its job file and who is told of it are there for its owner and admins alone.
    """
    view = session.job(job_id)
    return session.caller.shown(view, view.owner)


@call("GET", "/jobs/{job_id}/events", shows=Kind.STATE, parts=(Kind.PLACES,))
def list_events(
    session: LedgerSession, job_id: JobId, after: Annotated[int, Bounds("Id of an event", ge=0)] = 0
) -> Events:
    """Return the history of a job, oldest first."""
    owner = session.record(job_id).owner
    found = session.workspace.ledger.events(job_id)
    return Events([session.caller.shown(event, owner) for event in found if event.id > after])


@call("POST", "/jobs", shows=Kind.OWN, asks_clusters=True)
def submit_job(
    session: LedgerSession,
    spec: Mapping[str, Any],
    digests: Digests,
    source: Text = "",
    secrets: Secrets = {},  # noqa: B006
    idempotency_key: Key = "",
) -> JobView:
    """Submit a job; a second request with the same `Idempotency-Key` answers with the same job.

    Its specification is as `orc render --json` shows it. Where a tree has not been uploaded by who asks it is 409, and
    ``missing`` names it.
    """
    from orc.orchestrator.api.submitting import Submitter

    view = Submitter(session, idempotency_key).submit(NewMember(0, digests, spec), source, secrets)
    session.caller.note(view.id)
    return view


@call("POST", "/jobs/{job_id}/resubmit", shows=Kind.OWN, asks_clusters=True)
def resubmit_job(
    session: LedgerSession,
    job_id: JobId,
    set: Annotated[
        Sequence[Text] | Mapping[str, Any], Bounds("Changes of the specification, ``key.path=VALUE``", max_length=100)
    ] = (),
    secrets: Secrets = {},  # noqa: B006
    idempotency_key: Key = "",
) -> JobView:
    """Submit a new job with the code of another one, and its specification after changes."""
    from orc.orchestrator.api.submitting import Submitter
    from orc.orchestrator.engine.attempt_inputs import as_overrides

    overrides = as_overrides(set) if isinstance(set, Mapping) else set
    view = Submitter(session, idempotency_key).resubmit(job_id, overrides, secrets)
    session.caller.note(view.id, like=job_id)
    return view


@call("POST", "/jobs/{job_id}/cancel", shows=Kind.STATE, parts=(Kind.PLACES,), writes=False, asks_clusters=True)
def cancel_job(session: LedgerSession, job_id: JobId, grace_s: Grace = None) -> CancelledJob:
    """Cancel a job; one that has ended stays as it is."""
    from orc.orchestrator.clients.ending import cancel

    unreachable: dict[str, str] = {}
    cancel(session, [job_id], grace_s=grace_s, on_unreachable=unreachable.update)
    return CancelledJob(**vars(get_job(session, job_id)), unreachable=unreachable)


@call("PATCH", "/jobs/{job_id}/tags", shows=Kind.STATE, parts=(Kind.PLACES,), whole_body="tags")
def change_tags(
    session: LedgerSession, job_id: JobId, tags: Annotated[Mapping[str, str | None], Bounds(max_length=100)]
) -> JobView:
    """Set tags of a job; null removes one, others stay."""
    from orc.orchestrator.ledger.tags import checked_tags, write_tags

    changes = checked_tags(tags)
    session.record(job_id)
    with session.workspace.ledger.transaction() as tx:
        write_tags(tx, job_id, changes)
    return get_job(session, job_id)
