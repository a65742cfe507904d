"""Client of a service: the methods of the ledger's client, over HTTP."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from orc.launchers.errors import BackendUnreachable, LaunchError
from orc.orchestrator.clients import flows, reports, requests, transport
from orc.orchestrator.clients.errors import NeedsLedger
from orc.orchestrator.clients.following import follow_log
from orc.orchestrator.clients.logins import Login, checked_url
from orc.orchestrator.clients.service_groups import ServiceGroupCalls
from orc.orchestrator.clients.uploads import silent

if TYPE_CHECKING:
    from types import TracebackType
    from typing import Self

    from orc.launchers.backends.base import LogChunk, LogSelector, NodeEntry, QueueReport
    from orc.launchers.spec import LoadedJob
    from orc.orchestrator.clients.flows import Flow
    from orc.orchestrator.clients.protocol import ProgressCallback
    from orc.orchestrator.clients.requests import Request
    from orc.orchestrator.insight.metrics import Line
    from orc.orchestrator.notifications.calls import NotificationView
    from orc.orchestrator.views import EventView, JobRow, JobView

Answer = TypeVar("Answer")


@dataclass(frozen=True)
class Refreshed:
    """Report of a refresh: the service itself keeps polling the clusters, so none is polled here."""

    unreachable: dict[str, str] = field(default_factory=dict)


class ServiceClient(ServiceGroupCalls):
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

    def __init__(
        self,
        url: str,
        token: str = "",
        *,
        ca: str = "",
        insecure_http: bool = False,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        import httpx

        self._login = Login(checked_url(url), token, ca, insecure_http)
        self._http = httpx.Client(**transport.options(self._login))
        self._sleep = sleep

    @property
    def address(self) -> str:
        """URL of the service."""
        return self._login.url

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def ask(self, request: Request[Answer]) -> Answer:
        """Return the answer to *request*, sent again when it was lost. Raises `LaunchError`."""
        import httpx

        transport.refuse_clear_secrets(self._login, request)
        attempt = 0
        while True:
            attempt += 1
            response, lost = None, None
            try:
                content: dict[str, Any] = {} if request.content is None else {"content": request.content()}
                response = self._http.request(request.method, request.path, **transport.arguments(request), **content)
            except httpx.TransportError as error:
                lost = error
            wait = transport.pause(attempt, response)
            if wait is not None:
                self._sleep(wait)
            elif response is None:
                assert lost is not None
                raise transport.unreachable(lost, self.address) from lost
            else:
                return transport.answer(response, request, self.address)

    def lead(self, flow: Flow[Answer]) -> Answer:
        """Return what *flow* returns, after doing what it requests."""
        step = next(flow)
        try:
            while True:
                try:
                    given = self._do(step)
                except LaunchError as error:  # the flow's to handle, or to let through
                    step = flow.throw(error)
                else:
                    step = flow.send(given)
        except StopIteration as end:
            answer: Answer = end.value
            return answer

    def _do(self, step: flows.Step) -> Any:
        if isinstance(step, flows.Pause):
            return self._sleep(step.seconds)
        return step.do() if isinstance(step, flows.Work) else self.ask(step)

    def me(self) -> Mapping[str, Any]:
        """Return the user that the service identifies this client as: ``{"user", "role", ...}``."""
        return self.ask(requests.me())

    # -- making jobs

    def submit(self, loaded: LoadedJob, *, on_progress: ProgressCallback | None = None) -> JobView:
        """Submit a job, exactly once whatever is lost on the way.

        Args:
            loaded: The job, from `orc.launchers.spec.load.load_job`.
            on_progress: As of `Client.submit`; ``("upload", {done, bytes})`` for contents that the service lacks.

        Returns:
            The job as it is now.

        Raises:
            LaunchError: The job certainly does not run.
            ServiceUnreachable: No answer came: the job may run; `jobs` will show it.
        """
        return self.lead(flows.submit(loaded, on_progress or silent))

    def resubmit(
        self, job_id: str, *, overrides: Sequence[str] = (), on_progress: ProgressCallback | None = None
    ) -> JobView:
        """Submit a new job like *job_id*, with *overrides* (``resources.nodes=4``) of its specification.

        The values of its secrets are looked up here, as at any submission.
        """
        return self.lead(flows.resubmit(job_id, overrides))

    def cancel(
        self,
        job_ids: Sequence[str],
        *,
        grace_s: float | None = None,
        on_unreachable: Callable[[Mapping[str, str]], None] | None = None,
    ) -> list[JobView]:
        """Cancel jobs; those that have ended stay as they are. Arguments as of `Client.cancel`."""
        return self.lead(flows.cancel(job_ids, grace_s, on_unreachable))

    def set_tags(self, job_id: str, tags: Mapping[str, str | None]) -> JobView:
        """Set tags of a job; `None` removes one."""
        return self.ask(requests.set_tags(job_id, tags))

    # -- looking at jobs

    def refresh(self, job_ids: Sequence[str] | None = None, *, patience_s: float = 0.0) -> Refreshed:
        """Do nothing: the service keeps what is known of its jobs new."""
        return Refreshed()

    def refresh_within(self, job_ids: Sequence[str], seconds: float) -> None:
        """Do nothing: the service keeps what is known of its jobs new."""

    def job(self, job_id: str) -> JobView:
        """Return a job. Raises `JobNotFound`."""
        return self.ask(requests.job(job_id))

    def jobs(
        self,
        *,
        states: Sequence[str] | None = None,
        name: str | None = None,
        tags: Mapping[str, str] | None = None,
        group: str | None = None,
        limit: int | None = 50,
    ) -> list[JobRow]:
        """Return jobs, newest first. Arguments as of `Client.jobs`."""
        return self.lead(flows.jobs(states, name, tags, limit, group))

    def events(self, job_id: str) -> list[EventView]:
        """Return the history of a job, oldest first."""
        return self.lead(flows.events(job_id))

    def resolve(self, ref: str) -> str:
        """Return the job id that *ref* means: an id, the unambiguous start of one, or ``@last``."""
        return self.ask(requests.resolve(ref))

    def wait(
        self,
        job_ids: Sequence[str],
        *,
        timeout_s: float | None = None,
        on_change: Callable[[JobView], None] | None = None,
    ) -> list[JobView]:
        """Wait until all jobs have ended, *timeout_s* seconds at most. Arguments as of `Client.wait`."""
        return self.lead(flows.wait(job_ids, timeout_s, on_change))

    # -- logs and metrics

    def log_selectors(self, job_id: str, attempt: int | None = None) -> list[LogSelector]:
        """Return the logs of an attempt (the newest by default) that exist so far."""
        return self.ask(requests.log_selectors(job_id, attempt))

    def read_log(
        self, job_id: str, selector: LogSelector, attempt: int | None = None, offset: int = 0
    ) -> Iterator[LogChunk]:
        """Yield the content of one log as it is now, from *offset* on."""
        while (chunk := self.ask(requests.log(job_id, selector, attempt, offset))).data:
            yield chunk
            offset = chunk.end

    def follow_log(
        self, job_id: str, selector: LogSelector, attempt: int | None = None, offset: int = 0
    ) -> Iterator[LogChunk]:
        """Yield the content of one log as it grows, until its attempt has ended."""
        return follow_log(self, self._sleep, job_id, selector, attempt, offset)

    def log_file(self, job_id: str, selector: LogSelector, attempt: int | None = None) -> str | None:
        """Return `None`: logs of a service are not on this machine."""
        return None

    def metrics(self, job_id: str) -> ServiceMetrics:
        """Return a reader of what the training of a job measures."""
        return ServiceMetrics(self, job_id)

    # -- reports

    def notifications(
        self, *, job_id: str | None = None, states: Sequence[str] = (), limit: int = 100
    ) -> list[NotificationView]:
        """Return the notifications that were sent, newest first. Arguments as of `Client.notifications`."""
        return self.ask(reports.notifications(job_id, states, limit))

    def retry_notifications(self, job_id: str) -> int:
        """Make the notifications about a job that were given up due again; return how many there were."""
        return self.ask(reports.retry_notifications(job_id))

    def diff(self, a: str, b: str) -> dict[str, Any]:
        """Return the differences between two jobs, as `Client.diff` does."""
        return self.ask(reports.diff(a, b))

    def costs(
        self,
        *,
        by: str = "job",
        job_ids: Sequence[str] | None = None,
        owner: str | None = None,
        since: float | None = None,
        until: float | None = None,
    ) -> dict[str, Any]:
        """Return hours of nodes and GPUs, and what they cost. Arguments as of `Client.costs`."""
        return self.ask(reports.costs(by, job_ids, owner, since, until))

    # -- clusters

    def queueing_clusters(self) -> tuple[list[str], dict[str, LaunchError]]:
        """Return the clusters with a queue of their own, and the errors of those that are configured wrongly."""
        return self.ask(requests.queueing_clusters())

    def queue(self, cluster: str) -> QueueReport:
        """Return a cluster's own queue, and the jobs of the service in it."""
        return self.ask(requests.queue(cluster))

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

    def __init__(self, client: ServiceClient, job_id: str) -> None:
        self._client, self._job_id, self._after = client, job_id, ""
        self.unreachable: dict[str, BackendUnreachable] = {}

    def read(self) -> list[Line]:
        """Return the lines that were written since the last call, oldest first."""
        found = self._client.lead(flows.metrics(self._job_id, self._after))
        self.unreachable = {host: BackendUnreachable(what, where=host) for host, what in found.unreachable.items()}
        self._after = found.next
        return found.lines
