"""The service is killed, its database restarted, its disk filled while jobs are submitted: none is lost or doubled."""

from __future__ import annotations

import contextlib
import getpass
import os
import random
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from fake_backend import FakeBackend
from postgres_testbed import PostgresServer

sys.path.insert(0, str(Path(__file__).parent))

from served import Served, make_served

from orc.launchers.backends.base import Phase
from orc.launchers.spec import load_job
from orc.orchestrator.engine.job_source import take
from orc.orchestrator.ledger import audit
from orc.orchestrator.ledger.lifecycle import Event, Kind, fold
from orc.orchestrator.service.api.bundles import note_holder

pytestmark = pytest.mark.timeout(300)
JOB = """\
name: storm
command: 'true'
launcher: python
retry: {max_attempts: 2, on: [crash], backoff: 0}
"""


class Storm:
    """Submissions to one or several services on one ledger, and a cluster that ends what was sent to it."""

    def __init__(self, services: list[Served], directory: Path) -> None:
        self.services = services
        self.backend = FakeBackend(services[0].state_dir / "fake")
        (directory / "project").mkdir()
        (directory / "project" / "job.yaml").write_text(JOB)
        loaded = load_job(directory / "project" / "job.yaml")
        with services[0].open_client() as client:
            snapshot = take(client.workspace.store, loaded, lambda *_: None, self.backend)
            note_holder(client.workspace.ledger, getpass.getuser(), [snapshot.code.digest])  # as if it was uploaded
        self.body = {"spec": loaded.spec.model_dump(mode="json"), "digests": {"code": snapshot.code.digest}}
        self.over = threading.Event()
        self.tries = Counter[str]()

    def submit(self, number: int) -> str:
        """Submit a job, again and again until somebody says that it is there; return its id."""
        chance = random.Random(number)
        while True:
            service = chance.choice(self.services)
            self.tries[f"storm-{number}"] += 1
            try:
                with service.http("me") as http:
                    said = http.post("/api/v1/jobs", json=self.body, headers={"Idempotency-Key": f"storm-{number:06d}"})
            except httpx.TransportError:
                time.sleep(0.02)
                continue
            if said.status_code == 503:
                time.sleep(0.05)
                continue
            assert said.status_code == 200, said.text
            return str(said.json()["id"])

    def end_jobs(self) -> None:
        """Let what the cluster has end: every fifth first attempt crashes."""
        while not self.over.wait(0.02):
            for marker in self.backend.calls("run"):
                if self.backend._observe(marker).phase is Phase.PENDING:
                    crashes = marker.endswith("-a1") and sum(marker.encode()) % 5 == 0
                    phase, cause = (Phase.FAILED, "crash") if crashes else (Phase.SUCCEEDED, None)
                    self.backend.set(marker, phase, cause=cause)

    def run(self, count: int, trouble: Callable[[], None]) -> list[str]:
        """Submit *count* jobs while *trouble* happens; the ids that the users were told."""
        ender = threading.Thread(target=self.end_jobs)
        ender.start()
        try:
            with ThreadPoolExecutor(6) as pool:
                told = pool.map(self.submit, range(count))
                trouble()
                ids = list(told)
            self.wait_for_the_end(len(ids))
        finally:
            self.over.set()
            ender.join()
        return ids

    def wait_for_the_end(self, count: int) -> None:
        deadline = time.monotonic() + 200
        with self.services[0].open_client() as client:
            while len(client.jobs(states=["SUCCEEDED", "FAILED", "CANCELLED"], limit=None)) < count:
                assert time.monotonic() < deadline, Counter(row.state for row in client.jobs(limit=None))
                client.refresh()
                time.sleep(0.1)

    def check(self, ids: list[str], count: int) -> None:
        """Counts and states are exact."""
        assert len(set(ids)) == len(ids) == count
        with self.services[0].open_client() as client:
            rows = client.jobs(limit=None)
            assert sorted(row.id for row in rows) == sorted(ids)
            assert {row.state for row in rows} == {"SUCCEEDED"}
            markers = []
            for row in rows:
                events = client.events(row.id)
                told, view = fold(Event(Kind(e.kind), e.attempt, e.data) for e in events), client.job(row.id)
                assert told.job == view.state
                assert told.attempts == {a.number: a.state for a in view.attempts}
                assert view.owner == getpass.getuser()
                markers += [a.marker for a in view.attempts]
        started = [path.stem for path in (self.backend.root / "jobs").glob("*.json")]  # each can be there once
        assert sorted(started) == sorted(markers)
        assert {m.rpartition("-a")[2] for m in markers} == {"1", "2"}


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Callable[[], list[Served]]]:
    """Makes two services on one ledger, both of which run passes."""
    made: list[Served] = []

    def make() -> list[Served]:
        first = make_served(
            tmp_path / "state", users={"me": getpass.getuser()}, reconciler=True, requests_per_minute=1_000_000
        )
        second = Served(first.state_dir, dict(first.settings), first.tokens)
        made.extend([first, second])
        for service in made:
            service.start()
            service.settings["port"] = int(service.url.rpartition(":")[2])  # it comes back where it was
        return made

    yield make
    for service in made:
        service.kill()


def test_services_killed_in_a_storm_of_submissions_lose_and_double_nothing(pair: Any, tmp_path: Path) -> None:
    services = pair()
    storm = Storm(services, tmp_path)
    chance = random.Random(13)

    def kill() -> None:
        for number in range(8):
            time.sleep(chance.uniform(0.05, 0.6))
            services[number % 2].kill()
            services[number % 2].start()

    ids = storm.run(120, kill)
    storm.check(ids, 120)
    assert max(storm.tries.values()) > 1  # it was in the way of some


def test_a_change_of_a_service_that_was_killed_before_it_answered_is_in_the_audit_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = make_served(tmp_path / "state", users={"me": getpass.getuser()})
    storm = Storm([service], tmp_path)
    monkeypatch.setenv("ORC_FAULT_POINT", "prepared")
    service.start()
    with service.http("me") as http, pytest.raises(httpx.TransportError):
        http.post("/api/v1/jobs", json=storm.body)
    with service.open_client() as client:
        assert len(client.jobs(limit=None)) == 1
        with client.workspace.ledger.database.write() as connection:
            assert audit.settle(connection, time.time() + 1) == 1
            (line,) = audit.page(connection, 9)
    assert (line.action, line.user, line.data) == ("submit_job", getpass.getuser(), {"status": None})


def test_a_database_that_is_restarted_is_waited_for(pair: Any, tmp_path: Path, monkeypatch: Any, postgres: Any) -> None:
    directory = Path(tempfile.mkdtemp(prefix="orc-postgres-", dir="/tmp"))
    server = PostgresServer(postgres._programs, directory)
    try:
        server.start()
        monkeypatch.setenv("ORC_LEDGER_URL", server.url(server.create()))
        services = pair()
        storm = Storm(services, tmp_path)

        def restart() -> None:
            for _ in range(2):
                time.sleep(0.5)
                server.stop()
                server.run()

        ids = storm.run(40, restart)
        storm.check(ids, 40)
        for service in services:
            with service.http("me") as http:
                assert http.get("/readyz").json() == {"ready": True, "ledger": "ok", "driver": "ok"}
    finally:
        server.stop()
        shutil.rmtree(directory)


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a file system of 24 MiB")
def test_on_a_full_disk_the_service_shows_jobs_and_says_what_it_cannot_do(tmp_path: Path) -> None:
    state = tmp_path / "small"
    state.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=24m,mode=0700", "tmpfs", state], check=True)
    service = None
    try:
        service = make_served(state / "state", users={"me": getpass.getuser()})
        service.add_job("digits-aaaaaa")
        service.start()
        with (state / "fill").open("wb", buffering=0) as file, contextlib.suppress(OSError):
            while file.write(b"0" * 4096):
                pass
        with service.http("ada") as http:
            assert [job["id"] for job in http.get("/api/v1/jobs").json()["jobs"]] == ["digits-aaaaaa"]
            refused = http.post("/api/v1/tokens", json={"user": "x", "role": "viewer"})
            assert refused.status_code == 503
            assert "full" in refused.json()["error"]["what"]
            (state / "fill").unlink()
            assert http.post("/api/v1/tokens", json={"user": "x", "role": "viewer"}).status_code == 201
    finally:
        if service is not None and service.process is not None:
            service.kill()
        subprocess.run(["umount", "-l", state], check=True)


def test_a_token_that_ends_closes_what_was_opened_with_it(tmp_path: Path) -> None:
    service = make_served(tmp_path / "state", poll_interval=0.05)
    service.start()
    try:
        with service.http("grace") as http, http.stream("GET", "/api/v1/events/stream") as stream:
            lines = stream.iter_lines()
            assert next(lines).startswith("retry")
            with service.http("ada") as admin:
                (mine,) = [t for t in admin.get("/api/v1/tokens").json()["tokens"] if t["user"] == "grace"]
                assert admin.delete(f"/api/v1/tokens/{mine['id']}").status_code == 200
            assert http.get("/api/v1/me").status_code == 401
            began = time.monotonic()
            for _ in lines:
                pass
            assert time.monotonic() - began < 60
    finally:
        service.kill()
