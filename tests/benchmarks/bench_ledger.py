"""The orchestrator's own share: listing 100,000 jobs, passes over 1,000 that wait. No cluster, no agents.

    python tests/benchmarks/bench_ledger.py

Budgets (seconds, medians): a process that lists the newest of 100,000 jobs 0.1, any page of them 0.02, a pass 2.
bench_scale.py measures passes over jobs of which something is new, bench_cli.py the commands as a whole.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from harness import Row, report

sys.path.insert(0, str(Path(__file__).parents[1] / "orchestrator"))  # the fake backend of the orchestrator's tests

from fake_backend import FakeBackend
from prepared_jobs import create_prepared

from orc.launchers.spec import load_job
from orc.orchestrator.client import Client
from orc.orchestrator.engine import job_source, queueing, steps
from orc.orchestrator.engine.submission import new_submission, submit
from orc.orchestrator.ledger.lifecycle import Event, Kind
from orc.orchestrator.ledger.prune import PruneRule, prune
from orc.orchestrator.ledger.records import NewJob
from orc.orchestrator.ledger.store import JobFilter


def median_of(rounds: int, action: Callable[[], object]) -> float:
    """Seconds, after one round to warm up."""
    action()
    times = []
    for _ in range(rounds):
        began = time.perf_counter()
        action()
        times.append(time.perf_counter() - began)
    return statistics.median(times)


@pytest.fixture
def backend(tmp_path: Path) -> FakeBackend:
    return FakeBackend(tmp_path / "fake")


@pytest.fixture
def client(orc_home: Path, backend: FakeBackend) -> Iterator[Client]:
    with Client(backend_of=lambda _: backend) as made:
        yield made


def fill(client: Client, count: int, state: str) -> list[str]:
    """So many jobs with a realistic specification, two tags and six events each, in *state*."""
    spec = {
        "name": "bench",
        "args": [f"--option-{i}=value" for i in range(60)],
        "retry": {"max_attempts": 3, "on": [], "backoff": 10.0},
    }
    ids = [f"bench-{i:06d}" for i in range(count)]
    with client.workspace.ledger.transaction() as tx:
        for job_id in ids:
            new = NewJob(
                job_id,
                "bench",
                "local",
                "fake",
                "job.yaml",
                spec,
                {"code": "c", "runtime": "r"},
                {"team": "vision", "run": job_id},
            )
            marker = f"orc-{job_id}-a1"
            job = create_prepared(tx, new, marker, "p" * 64, "nobody", 0.0)
            handle = {
                "cluster": "local",
                "backend": "fake",
                "marker": marker,
                "native_id": f"native-{marker}",
                "submitted_at": 1.0,
            }
            events = [Event(Kind.SUBMITTING, 1), Event(Kind.ACCEPTED, 1)]
            if state == "SUCCEEDED":
                events += [Event(Kind.SUCCEEDED, 1), Event(Kind.JOB_SUCCEEDED)]
            tx.record(job, *events, attempt_set={"handle": handle})
    with client.workspace.ledger.database.write() as connection:  # as if they had come one after the other
        connection.execute("UPDATE jobs SET created_at = created_at - 1e5 + CAST(substr(id, 7) AS INTEGER)")
    return ids


def multiply(client: Client, times: int) -> None:
    """As many jobs more for each one, with their attempts, tags and events, older than all before."""
    copies = ", ".join(f"({i})" for i in range(1, times))
    with client.workspace.ledger.database.write() as connection:
        connection.execute(f"CREATE TEMP TABLE copies AS SELECT column1 AS i FROM (VALUES {copies})")
        for table, key, moved in (
            ("jobs", "id", {"created_at": "created_at - i * 1e5", "owner": "'user-' || (i % 7)"}),
            ("attempts", "job_id", {"marker": "marker || '-' || i"}),
            ("job_tags", "job_id", {"value": "value || '-' || i"}),
            ("events", "job_id", {}),
        ):
            columns = [row[1] for row in connection.tuples(f"PRAGMA table_info({table})")]
            columns = [column for column in columns if (table, column) != ("events", "id")]
            changed = {key: f"{key} || '-' || i", **moved}
            values = ", ".join(changed.get(column, f'"{column}"') for column in columns)
            names = ", ".join(f'"{column}"' for column in columns)
            connection.execute(f"INSERT INTO {table} ({names}) SELECT {values} FROM {table}, copies")


def test_list_of_a_hundred_thousand_jobs(client: Client, capsys: pytest.CaptureFixture[str]) -> None:
    fill(client, 10_000, "SUCCEEDED")
    multiply(client, 10)
    ledger = client.workspace.ledger
    code = "from orc.orchestrator.client import Client; assert len(Client().jobs()) == 50"
    process = median_of(9, lambda: subprocess.run([sys.executable, "-c", code], check=True))
    deep = JobFilter(owner="user-6")
    cursor = None
    for _ in range(20):
        cursor = ledger.page(deep, cursor, 500).next
    looks: dict[str, Callable[[], object]] = {
        "newest 50": lambda: ledger.page(JobFilter()),
        "page after 10,000 of one owner": lambda: ledger.page(deep, cursor),
        "two states": lambda: ledger.page(JobFilter(states=["FAILED", "SUCCEEDED"])),
        "one tag": lambda: ledger.page(JobFilter(tags={"run": "bench-000007-3"})),
        "live jobs": ledger.active,
        "any live": ledger.any_active,
        "the last 100 events": lambda: ledger.events_after(ledger.last_event_id() - 100, 100),
    }
    rows = [Row("process that lists 100,000 jobs", "none", process, None, "s", None, 0.1, "ours")]
    rows += [
        Row(f"100,000 jobs: {name}", "none", median_of(20, look), None, "s", None, 0.02, "ours")
        for name, look in looks.items()
    ]
    search = median_of(5, lambda: ledger.page(JobFilter(q="nowhere to be found")))
    rows.append(Row("100,000 jobs: a search that finds nothing", "none", search, None, "s", None, None))
    with ledger.database.write() as connection:  # the oldest tenth ended when it was made
        connection.execute("UPDATE jobs SET ended_at = created_at WHERE id LIKE '%-9'")
        ((newest,),) = connection.tuples("SELECT max(created_at) FROM jobs WHERE id LIKE '%-9'")
    began = time.perf_counter()
    pruned = prune(ledger, PruneRule(newest)).jobs
    rows.append(Row("jobs pruned in a second", "none", pruned / (time.perf_counter() - began), None, "", None, None))
    assert pruned > 9_000
    with capsys.disabled():
        print()
        report(rows)


def test_pass_over_a_thousand_jobs_that_wait(
    client: Client, backend: FakeBackend, capsys: pytest.CaptureFixture[str]
) -> None:
    """Half of them are at the cluster, half wait for its limit, and a quota is to be counted as well."""
    ids = fill(client, 1_000, "PENDING")
    for job_id in ids:
        (backend.root / "jobs" / f"orc-{job_id}-a1.json").write_text('{"phase": "pending"}')
    ledger = client.workspace.ledger
    with ledger.transaction() as tx:
        queueing.put_quota(tx.connection, queueing.Quota("user", client.workspace.user, "gpus", 100))
        tx.connection.execute("UPDATE jobs SET state = 'QUEUED', attempt = 0 WHERE id >= 'bench-000500'")
    backend.cluster = backend.cluster.model_copy(update={"limits": {"max_jobs": 500}})
    first = median_of(1, client.refresh)
    again = median_of(5, client.refresh)
    assert len(client.jobs(states=["QUEUED"], limit=None)) == 500
    with capsys.disabled():
        print(f"\npass over 500 pending and 500 held jobs: {first * 1e3:.0f} ms, then {again * 1e3:.0f} ms each")
        report([Row("reconcile pass with 500 of 1,000 jobs held", "none", again, None, "s", None, 2.0, "ours")])


def test_pass_over_a_thousand_jobs_that_wait_for_hosts(
    orc_home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "project").mkdir()
    path = tmp_path / "project" / "job.yaml"
    path.write_text("name: bench\ncommand: 'true'\nlauncher: python\n")
    loaded = load_job(path)
    backend = FakeBackend(tmp_path / "hosts", hosts={f"n{i}": 1 for i in range(8)})
    with Client(backend_of=lambda _: backend) as client:
        ws = client.workspace
        snapshot = job_source.take(ws.store, loaded, steps.silent, backend)
        began = time.perf_counter()
        for _ in range(1_000):
            submit(ws, [new_submission(ws, loaded.spec, snapshot, source="")])
        each = (time.perf_counter() - began) / 1_000
        again = median_of(5, client.refresh)
        assert len(client.jobs(states=["QUEUED"], limit=None)) == 992
    with capsys.disabled():
        print(f"\n8 hosts, 992 jobs that wait for them: {each * 1e3:.0f} ms for each submission")
        report([Row("reconcile pass, 992 jobs wait for hosts", "none", again, None, "s", None, 2.0, "ours")])


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q", "-p", "no:cacheprovider"]))
