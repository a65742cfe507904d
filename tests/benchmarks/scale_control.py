"""Parts of bench_scale.py about the control plane: live jobs, submissions, arrays, history, followers."""

from __future__ import annotations

import contextlib
import os
import resource
import stat
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from unittest import mock

from harness import Row

TESTS = Path(__file__).parents[1]
sys.path[:0] = [str(TESTS / "orchestrator"), str(TESTS / "orchestrator/service"), str(TESTS / "testbed/postgres")]

from fake_backend import FakeBackend  # noqa: E402
from postgres_testbed import PostgresServer, _programs  # noqa: E402
from prepared_jobs import create_prepared  # noqa: E402

from orc.launchers.backends.base import Backend, Handle, Observation, Phase  # noqa: E402
from orc.launchers.backends.sagemaker.backend import SagemakerBackend  # noqa: E402
from orc.launchers.backends.slurm.backend import SlurmBackend  # noqa: E402
from orc.launchers.spec.clusters import Cluster  # noqa: E402
from orc.orchestrator.client import Client  # noqa: E402
from orc.orchestrator.ledger.database import Connection, Database  # noqa: E402
from orc.orchestrator.ledger.lifecycle import Event, Kind  # noqa: E402
from orc.orchestrator.ledger.records import NewJob  # noqa: E402
from orc.orchestrator.ledger.upgrade import upgrade  # noqa: E402

SPEC = {
    "name": "many",
    "grace": 30,
    "args": [f"--option-{i}=value" for i in range(30)],
    "resources": {"nodes": 1},
    "retry": {"max_attempts": 1, "on": [], "backoff": 10},
}


# -- measuring


@dataclass
class Measured:
    """What one call cost: seconds by the clock and of this process's processors, statements and transactions."""

    wall_s: float = 0.0
    cpu_s: float = 0.0
    statements: int = 0
    transactions: int = 0


class CountedDatabase:
    """A database of which each transaction and each statement is counted."""

    def __init__(self, database: Database, counted: Counter[str]) -> None:
        self._database, self._counted = database, counted

    def __getattr__(self, name: str) -> Any:
        return getattr(self._database, name)

    @contextlib.contextmanager
    def read(self) -> Iterator[Connection]:
        self._counted["transactions"] += 1
        with self._database.read() as connection:
            yield CountedConnection(connection, self._counted)  # type: ignore[misc]

    @contextlib.contextmanager
    def write(self) -> Iterator[Connection]:
        self._counted["transactions"] += 1
        with self._database.write() as connection:
            yield CountedConnection(connection, self._counted)  # type: ignore[misc]


class CountedConnection:
    """Its connection."""

    def __init__(self, connection: Connection, counted: Counter[str]) -> None:
        self._connection, self._counted = connection, counted

    def __getattr__(self, name: str) -> Any:
        self._counted["statements"] += 1
        return getattr(self._connection, name)


@contextlib.contextmanager
def measuring(client: Client) -> Iterator[Measured]:
    """Measure what is done with *client* in this context."""
    ledger, counted, measured = client.workspace.ledger, Counter[str](), Measured()
    plain, ledger.database = ledger.database, CountedDatabase(ledger.database, counted)  # type: ignore[assignment]
    began, used = time.perf_counter(), time.process_time()
    try:
        yield measured
    finally:
        ledger.database = plain
        measured.wall_s, measured.cpu_s = time.perf_counter() - began, time.process_time() - used
        measured.statements, measured.transactions = counted["statements"], counted["transactions"]


def peak_mb() -> float:
    """Megabytes that this process has had at most."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


@contextlib.contextmanager
def ledgers() -> Iterator[dict[str, Callable[[], str]]]:
    """Makers of the URL of an empty ledger, by the name of its database; PostgreSQL where it is installed."""
    with contextlib.ExitStack() as stack:
        root = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="orc-scale-")))
        found: dict[str, Callable[[], str]] = {
            "SQLite": lambda: f"sqlite:///{tempfile.mkdtemp(dir=root)}/ledger.db",
        }
        if (programs := _programs()) is not None:
            server = PostgresServer(programs, Path(tempfile.mkdtemp(dir=stack.enter_context(_readable()))))
            server.start()
            stack.callback(server.stop)

            def empty() -> str:
                url = server.url(server.create())
                upgrade(url, None)
                return url

            found["PostgreSQL"] = empty
        yield found


@contextlib.contextmanager
def _readable() -> Iterator[str]:
    """A directory that the server's user can enter."""
    with tempfile.TemporaryDirectory(prefix="orc-pg-", dir="/tmp") as path:
        Path(path).chmod(0o711)
        yield path


@contextlib.contextmanager
def opened(url: str, backend_of: Callable[[str], Backend], **options: Any) -> Iterator[Client]:
    """A client of the ledger at *url*, with a state directory of its own."""
    with (
        tempfile.TemporaryDirectory(prefix="orc-scale-") as state,
        mock.patch.dict(os.environ, {"ORC_LEDGER_URL": url, "ORC_CONFIG_DIR": f"{state}/config"}),
        Client(Path(state), backend_of=backend_of, reconciler=False, **options) as client,
    ):
        yield client


# -- live jobs


class Hosts(FakeBackend):
    """Hosts, or workers of TPUs: all attempts are in the same phase; polls are counted."""

    self_driving = False

    def __init__(self, root: Path, name: str, calls: Counter[str]) -> None:
        super().__init__(root, name=name)
        self.calls, self.phase = calls, Phase.RUNNING

    def poll(self, handles: Sequence[Handle]) -> dict[Handle, Observation]:
        self.calls[self.name] += 1
        return dict.fromkeys(handles, Observation(self.phase))


class Aws:
    """SageMaker, of which pages of a hundred jobs and descriptions are counted; no objects are in S3."""

    def __init__(self, name: str, calls: Counter[str]) -> None:
        self.name, self.calls, self.names, self.status = name, calls, list[str](), "InProgress"

    def _row(self, name: str) -> dict[str, Any]:
        now = datetime.now(UTC)
        return {
            "TrainingJobName": name,
            "TrainingJobStatus": self.status,
            "CreationTime": now,
            "LastModifiedTime": now,
        }

    def summaries(self, *, since: float | None = None) -> Iterator[dict[str, Any]]:
        for begin in range(0, len(self.names), 100):
            self.calls[self.name] += 1
            yield from (self._row(name) for name in self.names[begin : begin + 100])

    def describe(self, name: str) -> dict[str, Any]:
        self.calls[self.name] += 1
        return self._row(name)

    def get_many(self, uris: Sequence[str], limit: int) -> dict[str, bytes]:
        return {}

    def close(self) -> None:
        pass


class Clusters:
    """Eight clusters of four kinds: Slurm behind its real commands, SageMaker behind its API, hosts and TPUs."""

    KINDS = ("slurm", "ssh", "sagemaker", "tpu") * 2

    def __init__(self, directory: Path) -> None:
        self.directory, self.calls = directory, Counter[str]()
        self.backends: dict[str, Backend] = {}
        for number, kind in enumerate(self.KINDS):
            name = f"{kind}-{number}"
            self.backends[name] = getattr(self, f"_{kind}")(name)

    def _slurm(self, name: str) -> Backend:
        programs = self.directory / name
        programs.mkdir()
        for program in ("squeue", "sacct"):
            (programs / f"{program}.out").touch()
            path = programs / program
            path.write_text(f'#!/bin/sh\necho {program} >>"{programs}/calls"\ncat "{programs}/{program}.out"\n')
            path.chmod(path.stat().st_mode | stat.S_IXUSR)
        return SlurmBackend(
            Cluster(name=name, kind="slurm", root=str(programs / "root"), options={"bin": str(programs)})
        )

    def _sagemaker(self, name: str) -> Backend:
        options = {"region": "us-east-1", "account": "123456789012", "bucket": "my-bucket", "role": "training"}
        backend = SagemakerBackend(Cluster(name=name, kind="sagemaker", options=options))
        backend.__dict__["aws"] = Aws(name, self.calls)
        return backend

    def _ssh(self, name: str) -> Backend:
        return Hosts(self.directory / name, name, self.calls)

    _tpu = _ssh

    def let(self, phase: Phase, jobs: Mapping[str, Sequence[tuple[str, str]]]) -> None:
        """Let every job of *jobs* (native id and marker, by cluster) be in *phase*."""
        now = int(time.time())
        for name, there in jobs.items():
            backend = self.backends[name]
            if isinstance(backend, Hosts):
                backend.phase = phase
            elif isinstance(backend, SagemakerBackend):
                aws: Any = backend.aws
                aws.names = [native for native, _ in there]
                aws.status = {Phase.SUCCEEDED: "Completed"}.get(phase, "InProgress")
            elif phase.ended:
                (self.directory / name / "squeue.out").write_text("")
                rows = [f"{n}|{marker}|COMPLETED|{now}|{now}|{now}|00:30:00|n1|0:0|" for n, marker in there]
                (self.directory / name / "sacct.out").write_text("\n".join(rows) + "\n")
            else:
                rows = [f"{n}|{marker}|RUNNING|{now}|{now}|{now + 999}|30:00|n1|None" for n, marker in there]
                (self.directory / name / "squeue.out").write_text("\n".join(rows) + "\n")

    def taken_calls(self) -> Counter[str]:
        """Calls by kind of cluster, since the last time."""
        calls = Counter(self.calls)
        self.calls.clear()
        for name in self.backends:
            path = self.directory / name / "calls"
            if path.exists():
                calls[name] += len(path.read_text().split())
                path.unlink()
        by_kind = Counter[str]()
        for name, count in calls.items():
            by_kind[name.partition("-")[0]] += count
        return by_kind


def fill_live(client: Client, count: int) -> dict[str, list[tuple[str, str]]]:
    """So many PENDING jobs on the eight clusters; their native ids and markers, by cluster."""
    names = [f"{kind}-{number}" for number, kind in enumerate(Clusters.KINDS)]
    there: dict[str, list[tuple[str, str]]] = {name: [] for name in names}
    ledger, now = client.workspace.ledger, time.time()
    for begin in range(0, count, 1000):
        with ledger.transaction() as tx:
            for number in range(begin, min(begin + 1000, count)):
                cluster, job = names[number % len(names)], f"many-{number:06d}"
                marker = f"orc-{job}-a1"
                new = NewJob(job, "many", cluster, cluster.partition("-")[0], "", SPEC, {}, {"team": "a"})
                made = create_prepared(tx, new, marker, "p", "nobody", 0.0)
                native = marker if "sagemaker" in cluster else str(number + 1)
                handle = Handle(cluster, new.backend, marker, native, now).to_dict()
                tx.record(made, Event(Kind.SUBMITTING, 1), Event(Kind.ACCEPTED, 1), attempt_set={"handle": handle})
                there[cluster].append((native, marker))
    return there


def live(full: bool) -> Iterable[Row]:
    """One pass over so many live jobs on eight clusters."""
    rows = []
    with ledgers() as urls:
        for name, url_of in urls.items():
            for count in (100, 1000, 10_000) if full else (100, 1000):
                with tempfile.TemporaryDirectory(prefix="orc-scale-") as directory:
                    clusters = Clusters(Path(directory))
                    with opened(url_of(), clusters.backends.__getitem__) as client:
                        there = fill_live(client, count)
                        rows += [*_passes(name, count, client, clusters, there)]
                print(f"{name}, {count} jobs: peak {peak_mb():.0f} MB", flush=True)
    return rows


def _passes(
    database: str, count: int, client: Client, clusters: Clusters, there: Mapping[str, Sequence[tuple[str, str]]]
) -> Iterator[Row]:
    for what, phase in (("all start", Phase.RUNNING), ("nothing new", Phase.RUNNING), ("all end", Phase.SUCCEEDED)):
        clusters.let(phase, there)
        with measuring(client) as cost:
            report = client.refresh()
        assert report.unreachable == {}, report.unreachable
        calls = clusters.taken_calls()
        print(
            f"{database}, {count} jobs, {what}: {cost.wall_s:.2f} s, cpu {cost.cpu_s:.2f} s "
            f"({cost.cpu_s / count * 1e6:.0f} us a job), {cost.statements} statements, {cost.transactions} "
            f"transactions; calls {dict(calls)}",
            flush=True,
        )
        title = f"{database}: pass over {count:,} live jobs, {what}"
        yield Row(title, "none", cost.wall_s, None, "s", None, 5.0, "ours")
        if what == "nothing new":
            yield Row(f"{title}: calls of a Slurm cluster", "none", calls["slurm"] / 2, None, "", None, 2, "ours")
            each = calls["sagemaker"] / max(count / 4 / 100, 1)
            yield Row(f"{title}: API calls for 100 jobs", "none", each, None, "", None, 2, "ours")
    assert not client.workspace.ledger.active()


PARTS: dict[str, Callable[[bool], Iterable[Row]]] = {"live": live}
