"""Client of a service: the methods of the ledger's client, over HTTP."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from orc.launchers.attempts.records import LogChunk, LogSelector
from orc.launchers.errors import BackendUnreachable, LaunchError
from orc.launchers.secrets import resolve_secrets
from orc.orchestrator.api.call import NewMember
from orc.orchestrator.api.jobs import cancel_job, get_job, resubmit_job, submit_job
from orc.orchestrator.clients.errors import NeedsLedger
from orc.orchestrator.clients.http_session import HttpSession, log_content, new_key, request_of
from orc.orchestrator.clients.logins import Login, checked_url
from orc.orchestrator.clients.surface import JobsClient
from orc.orchestrator.engine.steps import silent
from orc.orchestrator.views import JobView

if TYPE_CHECKING:
    from orc.launchers.backends.base import NodeEntry
    from orc.launchers.spec import LoadedJob
    from orc.launchers.spec.groups import LoadedGroup
    from orc.orchestrator.clients.http_session import Request
    from orc.orchestrator.engine.steps import Progress
    from orc.orchestrator.insight.metrics import Line
    from orc.orchestrator.views import GroupView, ScheduleView

Answer = TypeVar("Answer")
_LOG_BYTES = 1 << 20  # of one answer
# Between two looks of `wait`: a twentieth of the time since something changed, within these bounds (seconds).
_INTERVAL_S = (0.2, 3.0)


@dataclass(frozen=True)
class Refreshed:
    """Report of a refresh: the service itself keeps polling the clusters, so none is polled here."""

    unreachable: dict[str, str] = field(default_factory=dict)


class ServiceClient(JobsClient):
    """Submit jobs to a service, follow them, end them.

    Use it as a context manager or `close` it. The methods are those of `Client`, with the same arguments, values and
    errors; all raise `LaunchError` and its children only. A lost answer is asked for again: no request that is sent
    twice does its work twice.

    Args:
        url: URL of the service, like ``https://orc.example.org``.
        token: Token for it (``orc_...``).
        ca: File of the certificates to trust instead of the system's.
        insecure_http: Agree to send the token unencrypted to another machine.
        sleep: Waits between requests.

    Raises:
        LaunchError: The URL is none, or the token would travel in the clear.
    """

    log_interval_s = 1.0
    session: HttpSession

    def __init__(
        self,
        url: str,
        token: str = "",
        *,
        ca: str = "",
        insecure_http: bool = False,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.session = HttpSession(Login(checked_url(url), token, ca, insecure_http), sleep)
        self.address = self.session.login.url

    def close(self) -> None:
        """Close the connections."""
        self.session.connections.close()

    def ask(self, request: Request[Answer]) -> Answer:
        """Return the answer to *request*, sent again when it was lost. Raises `LaunchError`."""
        return self.session.ask(request)

    def me(self) -> Mapping[str, Any]:
        """Return the user that the service identifies this client as: ``{"user", "role", ...}``."""
        from orc.orchestrator.api.access import who_am_i

        return who_am_i(self.session).to_dict()

    # -- making jobs

    def submit(self, loaded: LoadedJob, *, on_progress: Progress | None = None) -> JobView:
        """Submit a job, exactly once whatever is lost on the way; an upload is a step of *on_progress*, too.

        Raises `ServiceUnreachable` where no answer came: the job may run; `jobs` will show it.
        """
        from orc.orchestrator.clients.sending import LocalSnapshot, send_with

        secrets = resolve_secrets(loaded.spec.secrets)  # before a file is read
        snapshot = LocalSnapshot(loaded, on_progress or silent)
        source, document = str(loaded.source_path.absolute()), loaded.spec.model_dump(mode="json")
        request = request_of(submit_job, document, snapshot.digests, source, secrets, new_key())
        return send_with(self.session, request, [snapshot])

    def resubmit(self, job_id: str, *, overrides: Sequence[str] = (), on_progress: Progress | None = None) -> JobView:
        """Submit a new job like *job_id*. The values of its secrets are looked up here, as at any submission."""
        from orc.orchestrator.engine.attempt_inputs import changed

        old = self.job(job_id)
        spec = changed(old.spec, overrides, where=old.id)
        return resubmit_job(self.session, old.id, tuple(overrides), resolve_secrets(spec.secrets), new_key())

    def submit_group(self, loaded: LoadedGroup, *, on_progress: Progress | None = None) -> GroupView:
        """Submit all members of a group, or none."""
        from orc.orchestrator.api.groups import submit_group
        from orc.orchestrator.clients.groups import snapshot_key
        from orc.orchestrator.clients.sending import LocalSnapshot, send_with
        from orc.orchestrator.engine.job_source import check_script

        progress = on_progress or silent
        secrets = resolve_secrets(list(dict.fromkeys(name for spec in loaded.specs for name in spec.secrets)))
        snapshots: dict[str, LocalSnapshot] = {}
        documents = [spec.model_dump(mode="json") for spec in loaded.specs]
        first = documents[0]
        shared = {key: first[key] for key in first if all(each.get(key) == first[key] for each in documents)}
        members = []
        for member, whole in zip(loaded.members, documents, strict=True):
            key = snapshot_key(member.loaded.spec)
            if key not in snapshots:
                snapshots[key] = LocalSnapshot(member.loaded, progress)
            check_script(member.loaded.spec, snapshots[key].code)
            own = {name: value for name, value in whole.items() if name not in shared}
            digests, parameters = snapshots[key].digests, dict(member.parameters)
            members.append(NewMember(member.number, digests, own, member.stage, parameters))
        request = request_of(
            submit_group, loaded.kind, loaded.name, members, loaded.max_parallel, str(loaded.source_path.absolute()),
            shared, secrets, new_key(),
        )  # fmt: skip
        return send_with(self.session, request, list(snapshots.values()))

    def retry_group(self, group_id: str) -> GroupView:
        """Submit the members that have ended without success once more; their secrets are looked up here."""
        from orc.orchestrator.api.groups import retry_group

        found = self.group(group_id)
        failed = [member.job.id for member in found.members if member.job.state in ("FAILED", "CANCELLED")]
        names: dict[str, None] = {}
        for job_id in failed if found.kind == "pipeline" else failed[:1]:  # those of a sweep have the same ones
            names |= dict.fromkeys(self.job(job_id).spec["secrets"])
        return retry_group(self.session, found.id, resolve_secrets(list(names)), new_key())

    def create_schedule(
        self,
        loaded: LoadedJob,
        cron: str,
        *,
        name: str = "",
        timezone: str = "UTC",
        missed: str = "skip",
        overlap: str = "skip",
        on_progress: Progress | None = None,
    ) -> ScheduleView:
        """Submit a job again and again, from the snapshot that is taken now."""
        from orc.orchestrator.api.groups import create_schedule
        from orc.orchestrator.clients.sending import LocalSnapshot, send_with
        from orc.orchestrator.engine.schedules import check

        check(loaded.spec, cron, timezone)
        secrets = resolve_secrets(loaded.spec.secrets)
        snapshot = LocalSnapshot(loaded, on_progress or silent)
        request = request_of(
            create_schedule, loaded.spec.model_dump(mode="json"), snapshot.digests, name or loaded.spec.name, cron,
            timezone, missed, overlap, str(loaded.source_path.absolute()), secrets, new_key(),
        )  # fmt: skip
        return send_with(self.session, request, [snapshot])

    def cancel(
        self,
        job_ids: Sequence[str],
        *,
        grace_s: float | None = None,
        on_unreachable: Callable[[Mapping[str, str]], None] | None = None,
    ) -> list[JobView]:
        """Cancel jobs, all of which must exist before one is cancelled."""
        if len(job_ids) > 1:
            for job_id in job_ids:
                self.job(job_id)
        cancelled = [cancel_job(self.session, job_id, grace_s) for job_id in job_ids]
        unreached = {cluster: why for one in cancelled for cluster, why in one.unreachable.items()}
        if unreached and on_unreachable:
            on_unreachable(unreached)
        return [JobView(**{field.name: getattr(view, field.name) for field in fields(JobView)}) for view in cancelled]

    # -- looking at jobs

    def refresh(self, job_ids: Sequence[str] | None = None, *, patience_s: float = 0.0) -> Refreshed:
        """Do nothing: the service keeps what is known of its jobs new."""
        return Refreshed()

    def refresh_within(self, job_ids: Sequence[str], seconds: float) -> None:
        """Do nothing: the service keeps what is known of its jobs new."""

    def wait(
        self,
        job_ids: Sequence[str],
        *,
        timeout_s: float | None = None,
        on_change: Callable[[JobView], None] | None = None,
    ) -> list[JobView]:
        """Wait until all jobs have ended, *timeout_s* seconds at most."""
        began = last_change = time.monotonic()
        views: dict[str, JobView] = {}
        while True:
            for job_id in job_ids:
                if job_id in views and views[job_id].ended:
                    continue
                view = get_job(self.session, job_id)
                if views.get(job_id) != view:
                    views[job_id] = view
                    last_change = time.monotonic()
                    if on_change is not None:
                        on_change(view)
            now = time.monotonic()
            if all(view.ended for view in views.values()) or (timeout_s is not None and now - began >= timeout_s):
                return [views[job_id] for job_id in job_ids]
            pause = min(max(_INTERVAL_S[0], (now - last_change) / 20), _INTERVAL_S[1])
            self.session.sleep(pause if timeout_s is None else min(pause, max(began + timeout_s - now, 0.0)))

    def read_log(
        self, job_id: str, selector: LogSelector, attempt: int | None = None, offset: int = 0
    ) -> Iterator[LogChunk]:
        """Yield the content of one log as it is now, from *offset* on."""
        named = {"rank": selector.rank, "node": selector.node, "launcher": selector.launcher or None}
        given = {name: value for name, value in {**named, "attempt": attempt}.items() if value is not None}
        while data := self.ask(log_content(job_id, {**given, "offset": offset, "limit": _LOG_BYTES})):
            yield LogChunk(selector, offset, data)
            offset += len(data)

    def log_file(self, job_id: str, selector: LogSelector, attempt: int | None = None) -> str | None:
        """Return `None`: logs of a service are not on this machine."""
        return None

    def metrics(self, job_id: str) -> ServiceMetrics:
        """Return a reader of what the training of a job measures."""
        return ServiceMetrics(self.session, job_id)

    def queueing_clusters(self) -> tuple[list[str], dict[str, LaunchError]]:
        """Return the clusters with a queue of their own; those that are configured wrongly are the service's care."""
        from orc.orchestrator.api.clusters import list_clusters

        return [cluster.name for cluster in list_clusters(self.session).clusters if cluster.has_queue], {}

    # -- what only the ledger's client can do

    def entries(self, job_id: str, attempt: int | None = None) -> list[NodeEntry]:
        """Raise `NeedsLedger`: nodes are entered from the service's machine."""
        self._refuse("entering the nodes of a job")

    @property
    def workspace(self) -> NoReturn:
        """Raise `NeedsLedger`: ledger and store are on the service's machine."""
        self._refuse("this")

    def _refuse(self, what: str) -> NoReturn:
        raise NeedsLedger(
            f"{what} is done where the ledger and the clusters are, and this client talks to a service",
            where=self.address,
            hint="run it on the service's machine, or with ORC_SERVICE_URL=local for the ledger of this one",
        )


class ServiceMetrics:
    """Reader of a job's measurements."""

    def __init__(self, session: HttpSession, job_id: str) -> None:
        self._session, self._job_id, self._after = session, job_id, ""
        self.unreachable: dict[str, BackendUnreachable] = {}

    def read(self) -> list[Line]:
        """Return the lines that were written since the last call, oldest first; it takes as many requests as needed."""
        from orc.orchestrator.api.insight import read_metrics

        lines: list[Line] = []
        while True:
            part = read_metrics(self._session, self._job_id, after=self._after)
            lines += part.lines
            over, self._after = part.complete or part.next == self._after, part.next
            if over:
                self.unreachable = {
                    host: BackendUnreachable(what, where=host) for host, what in part.unreachable.items()
                }
                return lines
