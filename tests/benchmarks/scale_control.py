"""Parts of bench_scale.py about the control plane: live jobs, submissions, arrays, history, followers."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import stat
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from unittest import mock

import httpx
import psutil
from harness import Row

TESTS = Path(__file__).parents[1]
sys.path[:0] = [str(TESTS / "orchestrator"), str(TESTS / "orchestrator/service"), str(TESTS / "testbed/postgres")]

from counted_database import counting  # noqa: E402
from fake_backend import FakeBackend  # noqa: E402
from postgres_testbed import PostgresServer, _programs  # noqa: E402
from prepared_jobs import create_prepared  # noqa: E402
from served import Served, make_served  # noqa: E402

from orc.launchers.backends.base import Backend, Handle, Observation, Phase  # noqa: E402
from orc.launchers.backends.sagemaker.backend import SagemakerBackend  # noqa: E402
from orc.launchers.backends.slurm.backend import SlurmBackend  # noqa: E402
from orc.launchers.spec import LoadedJob  # noqa: E402
from orc.launchers.spec.clusters import Cluster  # noqa: E402
from orc.launchers.spec.groups import LoadedGroup, load_jobs  # noqa: E402
from orc.orchestrator.client import Client  # noqa: E402
from orc.orchestrator.clients.service import ServiceClient  # noqa: E402
from orc.orchestrator.ledger.engine import upgrade  # noqa: E402
from orc.orchestrator.ledger.lifecycle import Event, Kind  # noqa: E402
from orc.orchestrator.ledger.prune import PruneRule, prune  # noqa: E402
from orc.orchestrator.ledger.records import NewJob  # noqa: E402
from orc.orchestrator.ledger.store import JobFilter  # noqa: E402
from orc.orchestrator.service.api import events as event_routes  # noqa: E402

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


@contextlib.contextmanager
def measuring(client: Client) -> Iterator[Measured]:
    """Measure what is done with *client* in this context."""
    measured = Measured()
    with counting(client.workspace.ledger) as counted:
        began, used = time.perf_counter(), time.process_time()
        yield measured
        measured.wall_s, measured.cpu_s = time.perf_counter() - began, time.process_time() - used
    measured.statements, measured.transactions = counted["statements"], counted["transactions"]


def peak_mb() -> float:
    """Megabytes that this process has had at most."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


@contextlib.contextmanager
def postgres() -> Iterator[PostgresServer | None]:
    """A PostgreSQL of our own; `None` where it is not installed."""
    with tempfile.TemporaryDirectory(prefix="orc-pg-", dir="/tmp") as path:
        Path(path).chmod(0o711)  # its user can enter it
        if (programs := _programs()) is None:
            yield None
            return
        server = PostgresServer(programs, Path(tempfile.mkdtemp(dir=path)))
        server.start()
        try:
            yield server
        finally:
            server.stop()


@contextlib.contextmanager
def ledgers() -> Iterator[dict[str, Callable[[], str]]]:
    """Makers of the URL of an empty ledger, by the name of its database; PostgreSQL where it is installed."""
    with tempfile.TemporaryDirectory(prefix="orc-scale-") as root, postgres() as server:
        found: dict[str, Callable[[], str]] = {"SQLite": lambda: f"sqlite:///{tempfile.mkdtemp(dir=root)}/ledger.db"}
        if server is not None:

            def empty() -> str:
                url = server.url(server.create())
                upgrade(url, None)
                return url

            found["PostgreSQL"] = empty
        yield found


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
                rows = [f"{n}|{marker}|RUNNING|{now}|{now}|{now + 999}|30:00|n1|cpu|1|None" for n, marker in there]
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


# -- arrays


ARRAY = """\
name: many
command: /bin/true
launcher: python
cluster: CLUSTER
max_parallel: 50
sweep: {limit: 10000, random: {count: COUNT, seed: 7, parameters: {args.x: {uniform: [0, 1]}}}}
"""


class CountedSlurm(Clusters):
    """One Slurm, whose sbatch takes what it gets."""

    KINDS = ("slurm",)

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        for program in ("sbatch", "scancel", "sinfo", "scontrol"):
            path = directory / "slurm-0" / program
            answer = "up" if program != "sbatch" else "1"
            path.write_text(f'#!/bin/sh\necho {program} >>"{path.parent}/calls"\necho {answer}\n')
            path.chmod(path.stat().st_mode | stat.S_IXUSR)
        slurm: Any = self.backends["slurm-0"]
        slurm.preflight, slurm.stage = lambda plan: [], lambda snapshot, plan: None


def array(full: bool) -> Iterable[Row]:
    """One submission of so many elements: a native array of Slurm, and a sweep that hosts without arrays take."""
    for count in (100, 1000, 10_000) if full else (30, 100):
        for cluster in ("slurm-0", "hosts"):
            with ledgers() as urls, tempfile.TemporaryDirectory(prefix="orc-scale-") as directory:
                slurm = CountedSlurm(Path(directory))
                slurm.backends["hosts"] = Hosts(Path(directory, "hosts"), "hosts", slurm.calls)
                job = Path(directory, "project/job.yaml")
                job.parent.mkdir()
                job.write_text(ARRAY.replace("CLUSTER", cluster).replace("COUNT", str(count)))
                with opened(urls["SQLite"](), slurm.backends.__getitem__) as client:
                    before, began = peak_mb(), time.perf_counter()
                    loaded = load_jobs(job)
                    read_s = time.perf_counter() - began
                    assert isinstance(loaded, LoadedGroup)
                    with measuring(client) as cost:
                        client.submit_group(loaded)
                calls = slurm.taken_calls()
                wall = read_s + cost.wall_s
                print(
                    f"{count} elements on {cluster}: {wall:.2f} s ({read_s:.2f} s to read the file), cpu "
                    f"{cost.cpu_s / count * 1e6:.0f} us each, {cost.statements} statements, {cost.transactions} "
                    f"transactions, calls {dict(calls)}, {peak_mb() - before:.0f} MB more",
                    flush=True,
                )
                budget = 3.0 if count <= 1000 else None
                yield Row(f"{count:,} elements submitted to {cluster}", "none", wall, None, "s", None, budget, "ours")


# -- submissions through a service

USERS = 20
JOB = """\
name: many
command: /bin/true
launcher: python
"""


def submit(full: bool) -> Iterable[Row]:
    """So many jobs submitted by 20 users at once through one service, on 20 hosts; then all of them run."""
    count = 1000 if full else 100
    users = {f"user-{number}": f"user-{number}" for number in range(USERS)}
    with ledgers() as urls, tempfile.TemporaryDirectory(prefix="orc-scale-") as directory:
        root = Path(directory)
        (root / "project").mkdir()
        (root / "project/job.yaml").write_text(JOB)
        loaded = load_jobs(root / "project/job.yaml")
        assert isinstance(loaded, LoadedJob)
        for database, url_of in urls.items():
            with mock.patch.dict(os.environ, {"ORC_LEDGER_URL": url_of(), "ORC_CONFIG_DIR": str(root / "config")}):
                served = make_served(root / database, users, requests_per_minute=1_000_000, reconciler=True)
                served.hosts = {f"n{number}": 1 for number in range(USERS)}
                served.described = {"run_as": "service"}
                served.start()
                try:
                    yield from _submissions(database, served, loaded, list(users), count // USERS)
                finally:
                    served.kill()


def _submissions(database: str, served: Served, loaded: LoadedJob, users: Sequence[str], each: int) -> Iterator[Row]:
    taken: list[float] = []
    ids: list[str] = []

    def work(user: str) -> None:
        with ServiceClient(served.url, served.tokens[user]) as client:
            for _ in range(each):
                began = time.perf_counter()
                ids.append(client.submit(loaded).id)
                taken.append(time.perf_counter() - began)

    process = psutil.Process(served.process.pid)  # type: ignore[union-attr]
    before, began = process.cpu_times(), time.perf_counter()
    with ThreadPoolExecutor(len(users)) as pool:
        list(pool.map(work, users))
    after, wall = process.cpu_times(), time.perf_counter() - began
    cpu = after.user + after.system - before.user - before.system
    p99 = sorted(taken)[-max(len(taken) // 100, 1)]
    count = len(ids)
    print(
        f"{database}: {count} jobs in {wall:.1f} s, {cpu / count * 1e3:.1f} ms of a processor each, median "
        f"{statistics.median(taken):.2f} s, p99 {p99:.2f} s, memory {served.memory() / 1e6:.0f} MB",
        flush=True,
    )
    assert len(set(ids)) == count
    with served.open_client() as client:
        ledger = client.workspace.ledger
        assert {row.id for row in client.jobs(limit=None)} == set(ids)
        order: list[str] = []  # of the users whose jobs have started
        backend = FakeBackend(served.state_dir / "fake")
        deadline = time.monotonic() + 600
        while jobs := ledger.active():
            assert time.monotonic() < deadline, f"{len(jobs)} jobs are left"
            for job in jobs:
                if job.state == "PENDING" and job.attempt:
                    order.append(job.owner)
                    backend.set(job.attempt.marker, Phase.SUCCEEDED)
            client.refresh()
        ran = backend.calls("run")
    assert len(ran) == len(set(ran)) == count, "a job has run twice, or not at all"
    half = Counter(order[: len(order) // 2])
    print(f"{database}: of the first half of all starts each user had {min(half.values())} to {max(half.values())}")
    yield Row(
        f"{database}: {count:,} jobs by {len(users)} users, p99 of submit", "none", p99, None, "s", None, 2.0, "ours"
    )


def histories(full: bool) -> Iterable[Row]:
    """Random histories against the model (scale_histories.py)."""
    import scale_histories

    with postgres() as server:
        made: dict[str, Callable[[Path], Any]] = {"SQLite": scale_histories.lives.in_a_file}
        if server is not None:
            server.do("CREATE DATABASE empty")
            upgrade(server.url("empty"), None)
            made["PostgreSQL"] = lambda _: server.ledger("empty")
        yield from scale_histories.histories(full, made)


# -- history

BASE = 100  # jobs, which are multiplied
PERIOD_S = 365 * 86400.0  # over which they have come


def fill_history(client: Client, jobs: int, events: int) -> None:
    """So many jobs that have ended over a year, by 20 users on 8 clusters, each with an attempt and so many events."""
    names = list(dict.fromkeys(f"{kind}-{number}" for number, kind in enumerate(Clusters.KINDS)))
    ledger, now = client.workspace.ledger, time.time()
    ends = [(Kind.SUCCEEDED, Kind.JOB_SUCCEEDED), (Kind.FAILED, Kind.JOB_FAILED), (Kind.CANCELLED, Kind.JOB_CANCELLED)]
    with ledger.transaction() as tx:
        for number in range(BASE):
            job = f"many-{number:06d}"
            tags = {"team": f"team-{number % 5}", "run": job}
            new = NewJob(job, f"name-{number % 10}", names[number % 8], "fake", "", SPEC, {}, tags,
                         owner=f"user-{number % USERS}", project=f"project-{number % 4}")  # fmt: skip
            made = create_prepared(tx, new, f"orc-{job}-a1", "p", "nobody", 0.0)
            own, whole = ends[0 if number % 10 < 8 else number % 3]
            polls = [Event(Kind.POLL_ERROR, None, {"reason": "no answer"})] * (events - 6)
            begun = (Event(Kind.SUBMITTING, 1), Event(Kind.ACCEPTED, 1), Event(Kind.RUNNING, 1))
            times = {"submitted_at": now, "started_at": now, "ended_at": now + 600}
            tx.record(made, *begun, *polls, Event(own, 1), Event(whole), job_set={"ended_at": now + 600},
                      attempt_set=times)  # fmt: skip
    copies = jobs // BASE
    ago = f"g.i * {PERIOD_S / copies!r}"
    with ledger.database.write() as connection:
        connection.execute("SET LOCAL session_replication_role = replica")  # foreign keys are not looked up row by row
        for table, key, changed in (
            ("jobs", "id", {column: f"{column} - {ago}" for column in ("created_at", "updated_at", "ended_at")}),
            ("attempts", "job_id", {"marker": "marker || '-' || g.i"}
             | {column: f"{column} - {ago}" for column in ("prepared_at", "started_at", "ended_at")}),
            ("job_tags", "job_id", {"value": "CASE key WHEN 'run' THEN value || '-' || g.i ELSE value END"}),
            ("events", "job_id", {"at": f"at - {ago}"}),
        ):  # fmt: skip
            columns = [row[0] for row in connection.tuples(
                "SELECT column_name FROM information_schema.columns WHERE table_name = :t", {"t": table}
            ) if (table, row[0]) != ("events", "id")]  # fmt: skip
            values = {key: f"{key} || '-' || g.i", **changed}
            connection.execute(
                f"INSERT INTO {table} ({', '.join(columns)}) SELECT {', '.join(values.get(c, c) for c in columns)} "
                f"FROM {table}, generate_series(1, {copies - 1}) AS g(i)"
            )
    with ledger.database.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as raw:  # type: ignore[attr-defined]
        raw.exec_driver_sql("VACUUM ANALYZE")


def history(full: bool) -> Iterable[Row]:
    """Looks at a long history in PostgreSQL, and what pruning it does to those who submit meanwhile."""
    sizes = ((10_000, 50), (100_000, 50), (1_000_000, 50)) if full else ((1_000, 50), (10_000, 50))
    for jobs, events in sizes:
        with ledgers() as urls:
            if "PostgreSQL" not in urls:
                print("PostgreSQL is not installed: not measured")
                return
            with opened(urls["PostgreSQL"](), lambda name: FakeBackend(Path("/nowhere"), name=name)) as client:
                began = time.perf_counter()
                fill_history(client, jobs, events)
                print(
                    f"{jobs:,} jobs, {jobs * events:,} events: filled in {time.perf_counter() - began:.0f} s",
                    flush=True,
                )
                yield from _looks(client, jobs, jobs * events)
                yield _pruning(client, jobs)


def _looks(client: Client, jobs: int, events: int) -> Iterator[Row]:
    ledger, now = client.workspace.ledger, time.time()
    cursor = None
    for _ in range(10):
        cursor = ledger.page(JobFilter(owner="user-6"), cursor, 200).next or cursor
    some = ledger.page(JobFilter(), limit=1).rows[0][0]
    looks: dict[str, Callable[[], object]] = {
        "newest 50": lambda: ledger.page(JobFilter()),
        "a later page of one owner": lambda: ledger.page(JobFilter(owner="user-6"), cursor),
        "one cluster, two states": lambda: ledger.page(JobFilter(cluster="ssh-1", states=["FAILED", "CANCELLED"])),
        "a tag of one job": lambda: ledger.page(JobFilter(tags={"run": "many-000007-9"})),
        "a tag of a fifth of all": lambda: ledger.page(JobFilter(tags={"team": "team-3"})),
        "a search that finds much": lambda: ledger.page(JobFilter(q="name-3")),
        "a search that finds nothing": lambda: ledger.page(JobFilter(q="nowhere to be found")),
        "a job with its history": lambda: (client.job(some), ledger.events(some)),
        "the last 100 events": lambda: ledger.events_after(ledger.last_event_id() - 100, 100),
        "live jobs": ledger.active,
        "orc cost of a day": lambda: client.costs(by="user", since=now - 86400),
        "orc cost of a week of one user": lambda: client.costs(by="day", since=now - 7 * 86400, owner="user-6"),
        "orc cost of all, by user": lambda: client.costs(by="user"),
        "orc cost of all, by a tag": lambda: client.costs(by="tag:team"),
        "orc cost of all, by day": lambda: client.costs(by="day"),
        "orc cost of all, by job": lambda: client.costs(by="job"),
    }
    for name, look in looks.items():
        look()
        times = []
        for _ in range(1 if "all" in name else 5):
            began = time.perf_counter()
            look()
            times.append(time.perf_counter() - began)
        budget = None if name.endswith(("by a tag", "by day", "by job")) else 0.5
        yield Row(f"{jobs:,} jobs, {events:,} events: {name}", "none", min(times), None, "s", None, budget, "ours")


def _pruning(client: Client, jobs: int) -> Row:
    """Prune a tenth of the jobs in steps; the longest that a submission could have had to wait is that of a step."""
    ledger, steps = client.workspace.ledger, list[float]()
    plain = ledger.transaction

    @contextlib.contextmanager
    def timed(**options: bool) -> Iterator[Any]:
        began = time.perf_counter()
        with plain(**options) as tx:
            yield tx
        steps.append(time.perf_counter() - began)

    with mock.patch.object(ledger, "transaction", timed):
        gone = prune(ledger, PruneRule(time.time() - PERIOD_S * 0.9)).jobs
    print(f"{jobs:,} jobs: {gone} pruned in {len(steps)} steps, {sum(steps):.1f} s", flush=True)
    return Row(f"{jobs:,} jobs: the longest step of pruning a tenth", "none", max(steps), None, "s", None, 0.5, "ours")


# -- followers

LOG_BYTES = 10 << 30  # with holes: the file system does not keep them
FOLLOWERS = 200
TAIL, WRITTEN = 1 << 20, 8 << 20


def followers(full: bool) -> Iterable[Row]:
    """So many followers of one log of 10 GB, in a service with 10,000 jobs: what it costs while nothing happens."""
    count, jobs, idle_s = (FOLLOWERS, 10_000, 20.0) if full else (20, 500, 3.0)
    with tempfile.TemporaryDirectory(prefix="orc-scale-") as directory:
        served = make_served(Path(directory, "state"), requests_per_minute=1_000_000, max_streams_per_token=1000)
        with served.open_client() as client:
            backend = FakeBackend(served.state_dir / "fake")
            with client.workspace.ledger.transaction() as tx:
                for number in range(jobs):
                    job = f"many-{number:06d}"
                    new = NewJob(job, "many", "local", "fake", "", SPEC, {}, {}, owner="grace")
                    made = create_prepared(tx, new, f"orc-{job}-a1", "p", "nobody", 0.0)
                    backend._start(f"orc-{job}-a1", {})
                    handle = backend._handle(f"orc-{job}-a1").to_dict()
                    tx.record(made, Event(Kind.SUBMITTING, 1), Event(Kind.ACCEPTED, 1), attempt_set={"handle": handle})
        log = served.state_dir / "fake" / "orc-many-000000-a1.rank-0.log"
        with log.open("wb") as file:
            file.truncate(LOG_BYTES - TAIL)
            file.seek(LOG_BYTES - TAIL)
            file.write((b"x" * 1023 + b"\n") * (TAIL >> 10))
        served.ping_s = event_routes.PING_S
        served.start()
        try:
            yield from asyncio.run(_followed(served, log, count, jobs, idle_s))
        finally:
            served.kill()


async def _followed(served: Served, log: Path, count: int, jobs: int, idle_s: float) -> list[Row]:
    process = psutil.Process(served.process.pid)  # type: ignore[union-attr]
    headers = {"Authorization": f"Bearer {served.tokens['grace']}"}
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    follow, wanted = "/api/v1/jobs/many-000000/log/stream", LOG_BYTES + WRITTEN
    listening, began_at, got = asyncio.Semaphore(0), LOG_BYTES - TAIL, [0] * count

    async def listen(http: httpx.AsyncClient, number: int) -> None:
        async with http.stream("GET", follow, params={"offset": began_at}) as answer:
            assert answer.status_code == 200, await answer.aread()
            async for line in answer.aiter_lines():
                if line.startswith("id: "):
                    got[number] = int(line[4:])
                    if got[number] == LOG_BYTES:
                        listening.release()
                    if got[number] == wanted:
                        return

    async def used(work: Any) -> float:
        before = process.cpu_times()
        await work
        after = process.cpu_times()
        return after.user + after.system - before.user - before.system

    async with httpx.AsyncClient(base_url=served.url, headers=headers, timeout=600, limits=limits) as http:
        await http.get("/api/v1/jobs", params={"limit": 50})
        start = served.memory()
        tasks = [asyncio.create_task(listen(http, number)) for number in range(count)]
        for _ in range(count):
            await asyncio.wait_for(listening.acquire(), 300)
        there = served.memory()
        idle = await used(asyncio.sleep(idle_s)) / idle_s
        with log.open("ab", buffering=0) as file:
            for _ in range(WRITTEN >> 16):
                file.write(b"x" * 65535 + b"\n")
        busy = await used(asyncio.wait_for(asyncio.gather(*tasks), 600))
        assert got == [wanted] * count
        after = served.memory()
        pages = []
        for offset in (0, LOG_BYTES // 2, LOG_BYTES):
            began = time.perf_counter()
            said = await http.get("/api/v1/jobs/many-000000/log", params={"offset": offset, "limit": 1 << 16})
            assert len(said.content) == 1 << 16
            pages.append(time.perf_counter() - began)
        began = time.perf_counter()
        rows, cursor = 0, None
        while True:
            query = {"limit": 500} if cursor is None else {"limit": 500, "cursor": cursor}
            said = (await http.get("/api/v1/jobs", params=query)).json()
            rows, cursor = rows + len(said["jobs"]), said["next"]
            if cursor is None:
                break
        assert rows == jobs
        listed = time.perf_counter() - began
    print(
        f"{count} followers: {idle:.1%} of a processor while nothing comes, {busy:.2f} s of it for "
        f"{WRITTEN >> 20} MiB to each; memory {start / 1e6:.0f} MB before, {there / 1e6:.0f} MB with them, "
        f"{after / 1e6:.0f} MB after; a piece of a log of 10 GB {max(pages) * 1e3:.0f} ms; {jobs:,} jobs page by page "
        f"{listed:.2f} s",
        flush=True,
    )
    return [
        Row(f"{count} followers of a silent log, share of a processor", "none", idle, None, "", None, 0.05, "ours"),
        Row(f"{count} followers of a log of 10 GB, memory more", "none", (after - start) / 1e6, None, "MB", None, None),
        Row("a piece of a log of 10 GB", "none", max(pages), None, "s", None, 0.5, "ours"),
    ]


PARTS: dict[str, Callable[[bool], Iterable[Row]]] = {
    "live": live,
    "array": array,
    "submit": submit,
    "history": history,
    "followers": followers,
    "histories": histories,
}
