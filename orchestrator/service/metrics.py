"""Metrics of the service for Prometheus: of its requests, and of the ledger when they are read."""

from __future__ import annotations

from collections import Counter as Counting
from collections.abc import Iterator
from contextlib import contextmanager

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from orc.orchestrator.engine.passes import ReconcilerStatus
from orc.orchestrator.ledger.lifecycle import JobState
from orc.orchestrator.ledger.polls import by_cluster
from orc.orchestrator.ledger.store import Ledger

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_BUCKETS = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)


class ServiceMetrics:
    """Counts of one service process."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.streams_open = 0
        self.streams_of: Counting[str] = Counting()  # open ones by the ids of their tokens
        self.requests = Histogram(
            "orc_request_seconds",
            "Time until a request was answered",
            ("method", "route", "status"),
            registry=self.registry,
            buckets=_BUCKETS,
        )
        self.refused = Counter(
            "orc_requests_refused", "Requests that were refused", ("status",), registry=self.registry
        )
        streams = Gauge("orc_streams_open", "Event streams that are open", registry=self.registry)
        streams.set_function(lambda: self.streams_open)

    @contextmanager
    def stream(self, token_id: str) -> Iterator[None]:
        """Count an event stream while it is open."""
        self.streams_open += 1
        self.streams_of[token_id] += 1
        try:
            yield
        finally:
            self.streams_open -= 1
            self.streams_of[token_id] -= 1
            if not self.streams_of[token_id]:
                del self.streams_of[token_id]

    def text(self, ledger: Ledger, now: float, status: ReconcilerStatus | None) -> bytes:
        """Return all metrics as Prometheus reads them."""
        seen = CollectorRegistry()
        seen.register(_Of([*ledger_metrics(ledger, now), *pass_metrics(status)]))
        return generate_latest(self.registry) + generate_latest(seen)


class _Of:
    """Collector of metrics that are there already."""

    def __init__(self, metrics: list[Metric]) -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        return iter(self._metrics)


def ledger_metrics(ledger: Ledger, now: float) -> list[Metric]:
    """Return jobs by state, attempts by cause of their end, and how old each cluster's answer is."""
    with ledger.database.read() as connection:
        states = dict(connection.tuples("SELECT state, count(*) FROM jobs GROUP BY state"))
        attempts = connection.tuples("SELECT state, coalesce(cause, ''), count(*) FROM attempts GROUP BY state, cause")
        polls = by_cluster(connection)
    jobs = GaugeMetricFamily("orc_jobs", "Jobs by state", labels=["state"])
    for state in JobState:
        jobs.add_metric([str(state)], states.get(str(state), 0))
    tried = GaugeMetricFamily("orc_attempts", "Attempts by state and cause of their end", labels=["state", "cause"])
    for state, cause, count in attempts:
        tried.add_metric([state, cause], count)
    age = GaugeMetricFamily("orc_poll_age_seconds", "Time since a cluster has answered", labels=["cluster"])
    interval = GaugeMetricFamily("orc_poll_interval_seconds", "Time between two polls of a cluster", labels=["cluster"])
    failing = GaugeMetricFamily("orc_poll_failing", "1 while a cluster cannot be asked", labels=["cluster"])
    for poll in polls:
        if poll.answered_at is not None:
            age.add_metric([poll.cluster], max(0.0, now - poll.answered_at))
        if poll.interval_s is not None:
            interval.add_metric([poll.cluster], poll.interval_s)
        failing.add_metric([poll.cluster], 1 if poll.error else 0)
    return [jobs, tried, age, interval, failing]


def pass_metrics(status: ReconcilerStatus | None) -> list[Metric]:
    """Return the metrics of this process's passes over each cluster: their number, and the seconds of the last."""
    took = GaugeMetricFamily("orc_pass_seconds", "Time of the last pass over a cluster", labels=["cluster"])
    count = CounterMetricFamily("orc_passes", "Passes over a cluster", labels=["cluster"])
    for cluster in status.clusters if status else ():
        took.add_metric([cluster.cluster], cluster.took_s)
        count.add_metric([cluster.cluster], cluster.passes)
    return [took, count]
