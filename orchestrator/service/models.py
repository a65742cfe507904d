"""Models of what the API answers with, for its OpenAPI description. Values may have more fields in newer versions."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict


class _Answer(BaseModel):
    model_config = ConfigDict(extra="allow")


class JobRowModel(_Answer):
    """Job in a list. Times are seconds since the epoch."""

    id: str
    name: str
    cluster: str
    backend: str
    state: str
    reason: str
    attempts: int
    created_at: float
    updated_at: float
    ended_at: float | None
    hosts: list[str]
    tags: dict[str, str]
    seen_at: float | None
    owner: str
    project: str
    priority: int
    group_id: str | None
    group_index: int | None
    not_before: float | None
    deadline_at: float | None


class JobList(_Answer):
    """Page of jobs; ``next`` is the cursor of the page after it, `None` at the end."""

    jobs: list[JobRowModel]
    next: str | None


class AttemptModel(_Answer):
    """Attempt at running a job."""

    number: int
    marker: str
    state: str
    cause: str | None
    reason: str
    native_id: str | None
    hosts: list[str]
    failed_hosts: list[str]
    submitted_at: float | None
    started_at: float | None
    ended_at: float | None
    restarts: int
    progress: dict[str, Any]
    exit: dict[str, Any] | None


class JobModel(_Answer):
    """Job with its specification and its attempts."""

    id: str
    name: str
    cluster: str
    backend: str
    state: str
    reason: str
    created_at: float
    updated_at: float
    ended_at: float | None
    next_attempt_at: float | None
    cancel_requested_at: float | None
    tags: dict[str, str]
    spec: dict[str, Any]
    digests: dict[str, str]
    source: str
    owner: str
    project: str
    priority: int
    group_id: str | None
    group_index: int | None
    not_before: float | None
    deadline_at: float | None
    seen_at: float | None
    attempts: list[AttemptModel]


class EventModel(_Answer):
    """Event in a job's history."""

    id: int
    job: str
    attempt: int | None
    at: float
    kind: str
    data: dict[str, Any]


class EventList(_Answer):
    """Events, oldest first."""

    events: list[EventModel]


class LogName(_Answer):
    """Name of a log, by one of three keys."""

    rank: int | None
    node: int | None
    launcher: bool


class LogList(_Answer):
    """Logs that an attempt has so far."""

    attempt: int
    logs: list[LogName]


class LogMatch(_Answer):
    """Line that was found; *offset* is where it begins, in bytes."""

    offset: int
    text: str


class LogSearch(_Answer):
    """Lines that were found; ``next`` is where to go on, `None` at the end of the log."""

    matches: list[LogMatch]
    next: int | None


class JobIdModel(_Answer):
    """Job that was meant."""

    id: str


class ClusterModel(_Answer):
    """Cluster, and how it answers."""

    name: str
    kind: str
    polled_at: float | None
    answered_at: float | None
    interval_s: float | None
    error: str | None
    has_queue: bool


class ClusterList(_Answer):
    """Clusters of clusters.yaml."""

    clusters: list[ClusterModel]


class QueueModel(_Answer):
    """Queue of a cluster."""

    partitions: list[dict[str, Any]]
    jobs: list[dict[str, Any]]


class GroupMember(_Answer):
    """Member of a group: the values in which it differs, and the newest of its *submissions* jobs."""

    index: int
    stage: str | None
    parameters: dict[str, str]
    submissions: int
    metrics: dict[str, float]
    job: JobRowModel


class GroupModel(_Answer):
    """Group of jobs: a sweep, an array, a pipeline, the runs of a schedule."""

    id: str
    kind: str
    name: str
    owner: str
    created_at: float
    max_parallel: int | None
    counts: dict[str, int]
    members: list[GroupMember]


class GroupList(_Answer):
    """Groups, newest first."""

    groups: list[GroupModel]


class ScheduleModel(_Answer):
    """Schedule of a job. Times are seconds since the epoch; `next_at` is `None` while it is paused."""

    id: str
    name: str
    owner: str
    cron: str
    timezone: str
    enabled: bool
    next_at: float | None
    last_at: float | None
    last_job: str | None
    missed: str
    overlap: str
    source: str


class ScheduleList(_Answer):
    """All schedules, by name."""

    schedules: list[ScheduleModel]


class QuotaModel(_Answer):
    """Limit of one resource for a user or a project."""

    scope: str
    name: str
    resource: str
    amount: float


class QuotaList(_Answer):
    """All quotas."""

    quotas: list[QuotaModel]


class TokenModel(_Answer):
    """Token without its secret."""

    id: str
    user: str
    role: str
    note: str
    created_at: float
    expires_at: float | None
    revoked_at: float | None
    last_used_at: float | None


class TokenList(_Answer):
    """All tokens."""

    tokens: list[TokenModel]


class NewToken(TokenModel):
    """New token; its secret is shown this once."""

    token: str


class Me(_Answer):
    """Holder of the token of a request."""

    user: str
    role: str
    token_id: str


class AuditLine(_Answer):
    """Line of the audit log."""

    id: int
    at: float
    user: str
    token_id: str | None
    address: str
    action: str
    subject: str
    data: dict[str, Any]


class AuditList(_Answer):
    """Lines of the audit log, newest first; ``next`` is the `before` of the page after it."""

    lines: list[AuditLine]
    next: int | None


class Done(_Answer):
    """Something was done."""

    ok: bool


class Readiness(_Answer):
    """Parts that a service needs, and whether they work."""

    ready: bool
    ledger: str
    driver: str
